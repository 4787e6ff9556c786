// How the direct allreduce (backend/shm_direct.h) cuts its virtual buffer, and which of its tensors
// are packed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/virtual_buffer.h"
#include "transport/arena.h"

namespace hororing {

// All but `in_arena` is the same on all ranks.
struct Plan : VirtualBuffer {
  // By place: where it is reduced in place in this rank's arena; or Arena::kElsewhere.
  std::vector<uint64_t> in_arena;
  size_t capacity = 0;  // bytes of one block's room in a slot
  size_t depth = 0;     // such rooms in a slot
  size_t block_bytes = 0;
  uint64_t blocks = 0;
  bool small = false;          // each rank reduces everything itself
  size_t bytes_in_arena = 0;   // of this rank's tensors that are not packed
  bool packs_nothing = false;  // all of them

  // `arena` may be null. `chunk_bytes`: of a block, at most `capacity`; 0: built in.
  Plan(const Batch& batch, int ranks, size_t slot_bytes, const Arena* arena,
       size_t chunk_bytes = 0);
};

}  // namespace hororing
