// Copies for data that may be large and unaligned.
#pragma once

#include <cstddef>

namespace hororing {

// Like memcpy.
void CopyBytes(void* to, const void* from, size_t bytes);

}  // namespace hororing
