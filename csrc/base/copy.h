// Copies of what may be large, and may lie anywhere.
#pragma once

#include <cstddef>

namespace hororing {

// As memcpy.
void CopyBytes(void* to, const void* from, size_t bytes);

}  // namespace hororing
