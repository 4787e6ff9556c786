#include <cstdlib>

#include "collective/allreduce.h"

namespace hororing {

Scratch::~Scratch() { std::free(data_); }

void* Scratch::Reserve(size_t bytes) {
  if (bytes <= bytes_ && data_ != nullptr) return data_;
  // Freed first: the old contents are of no use, and both at once may be more than there is.
  std::free(data_);
  data_ = nullptr;
  if (total_ != nullptr) *total_ -= bytes_;
  bytes_ = 0;
  if (bytes > SIZE_MAX - kCacheLine) return nullptr;
  const size_t rounded = bytes / kCacheLine * kCacheLine + kCacheLine;
  data_ = std::aligned_alloc(kCacheLine, rounded);
  if (data_ != nullptr) bytes_ = rounded;
  if (total_ != nullptr) *total_ += bytes_;
  return data_;
}

}  // namespace hororing
