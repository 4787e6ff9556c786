#include "backend/shm_plan.h"

#include <algorithm>

namespace hororing {
namespace {

// Measured with benchmarks/shm_direct.cc on 2 and 4 ranks: 128 KiB costs 10 to 30 % at 64 MiB
// (more waits), 1 MiB up to 50 % where the second-level cache has 1 MiB. Cutting smaller batches
// into more blocks than needed, for the stages to overlap, gains nothing.
constexpr size_t kMaxBlock = 512 << 10;
// Up to here every rank reduces everything itself: one wait for the peers instead of two, where a
// wait may be a change of threads. Not two ranks: they save little by it, reduce twice as much, and
// leave at different times, so that the report on the next tensor of the one that is ahead wakes
// the loop thread of the other, which was about to look.
constexpr size_t kSmallBatch = 32 << 10;
constexpr int kLeastForSmall = 3;

}  // namespace

Plan::Plan(const Batch& batch, int ranks, size_t slot_bytes, size_t chunk_bytes)
    : VirtualBuffer(batch) {
  capacity = std::min(kMaxBlock, slot_bytes / 2) / kEntryAlign * kEntryAlign;
  depth = slot_bytes / capacity;
  small = ranks >= kLeastForSmall && total <= std::min(kSmallBatch, capacity);
  const size_t wanted = chunk_bytes == 0 || small ? capacity : RoundUp(chunk_bytes, kEntryAlign);
  block_bytes = std::min({total, capacity, wanted});
  blocks = total == 0 ? 0 : (total + block_bytes - 1) / block_bytes;
}

}  // namespace hororing
