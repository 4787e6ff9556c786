#include <cstdlib>

#include "collective/allreduce.h"

namespace hororing {
namespace {

constexpr size_t kAlign = 64;

}  // namespace

Scratch::~Scratch() { std::free(data_); }

void* Scratch::Reserve(size_t bytes) {
  if (bytes <= bytes_ && data_ != nullptr) return data_;
  // Freed first: the old contents are of no use, and both at once may be more than there is.
  std::free(data_);
  data_ = nullptr;
  if (total_ != nullptr) *total_ -= bytes_;
  bytes_ = 0;
  if (bytes > SIZE_MAX - kAlign) return nullptr;
  const size_t rounded = bytes / kAlign * kAlign + kAlign;
  data_ = std::aligned_alloc(kAlign, rounded);
  if (data_ != nullptr) bytes_ = rounded;
  if (total_ != nullptr) *total_ += bytes_;
  return data_;
}

}  // namespace hororing
