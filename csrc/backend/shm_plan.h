// How the direct allreduce (backend/shm_direct.h) cuts its virtual buffer: the same on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/virtual_buffer.h"

namespace hororing {

struct Plan : VirtualBuffer {
  size_t capacity = 0;  // bytes of one block in a slot
  size_t depth = 0;     // blocks in a slot
  size_t block_bytes = 0;
  uint64_t blocks = 0;
  bool small = false;  // each rank reduces everything itself

  // `chunk_bytes`: of a block, at most `capacity`; 0: built in.
  Plan(const Batch& batch, int ranks, size_t slot_bytes, size_t chunk_bytes = 0);
};

}  // namespace hororing
