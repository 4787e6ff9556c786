#include <cstdint>
#include <cstdlib>
#include <string>

#include "collective/allreduce.h"

namespace hororing {

Scratch::~Scratch() { std::free(data_); }

Status Scratch::Reserve(size_t bytes, const char* lacking, std::byte** memory) {
  if (bytes > bytes_ || data_ == nullptr) {
    // Freed first: the old contents are of no use, and both at once may be more than there is.
    std::free(std::exchange(data_, nullptr));
    if (total_ != nullptr) *total_ -= bytes_;
    bytes_ = bytes / kCacheLine * kCacheLine + kCacheLine;
    if (bytes <= SIZE_MAX - kCacheLine) data_ = std::aligned_alloc(kCacheLine, bytes_);
    if (data_ == nullptr) bytes_ = 0;
    if (total_ != nullptr) *total_ += bytes_;
  }
  *memory = static_cast<std::byte*>(data_);
  if (data_ != nullptr) return Status::Ok();
  return Status(Code::kInternal, std::string(lacking) + " of " + std::to_string(bytes) + " bytes");
}

}  // namespace hororing
