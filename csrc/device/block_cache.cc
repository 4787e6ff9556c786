#include "device/block_cache.h"

#include <iterator>
#include <utility>

namespace hororing {
namespace {

// What is kept for later where the framework may want it.
constexpr size_t kMostBytes = 256 << 20;
constexpr size_t kLeastBlock = 512;
constexpr size_t kLargeUnit = 2 << 20;  // what a driver gives to the process at a time

}  // namespace

// So that blocks of sizes that differ from step to step fit again.
size_t BlockCache::Rounded(size_t bytes) {
  if (bytes > kLargeUnit) return (bytes + kLargeUnit - 1) / kLargeUnit * kLargeUnit;
  size_t rounded = kLeastBlock;
  while (rounded < bytes) rounded *= 2;
  return rounded;
}

BlockCache::~BlockCache() {
  for (const Block& block : blocks_) {
    api_.mem_free(block.memory);
    api_.event_destroy(block.free);
  }
}

Status BlockCache::Take(size_t* bytes, CuAddress* memory) {
  const size_t wanted = *bytes = Rounded(*bytes);
  std::list<Block> taken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto best = blocks_.end();
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
      const bool fits = block->bytes >= wanted && block->bytes / 2 <= wanted;
      if (fits && (best == blocks_.end() || block->bytes < best->bytes)) best = block;
    }
    if (best != blocks_.end()) taken.splice(taken.end(), blocks_, best);
  }
  if (!taken.empty()) {
    const Block& block = taken.front();
    const CuResult waits = api_.stream_wait_event(own_, block.free, 0);
    api_.event_destroy(block.free);
    *memory = block.memory;
    *bytes = block.bytes;
    return api_.Check(waits, "cuStreamWaitEvent");
  }
  CuResult result = api_.mem_alloc(memory, wanted);
  if (result != kCuSuccess) {
    Trim(0);
    result = api_.mem_alloc(memory, wanted);
  }
  return api_.CheckMemory(result, "cuMemAlloc", wanted);
}

Status BlockCache::Give(CuAddress memory, size_t bytes, CuStream stream) {
  Block block{memory, bytes, nullptr};
  HORORING_RETURN_IF_ERROR(
      api_.Check(api_.event_create(&block.free, kCuEventDisableTiming), "cuEventCreate"));
  const CuResult recorded = api_.event_record(block.free, stream);
  // Where nobody knows when it is free, nobody gets it.
  if (recorded != kCuSuccess) {
    api_.event_destroy(block.free);
    return api_.Check(recorded, "cuEventRecord");
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_.push_back(block);
  }
  Trim(kMostBytes);
  return Status::Ok();
}

// Gives the oldest of what no stream uses any more back to the driver, down to `keep_bytes`. It is
// not called under the mutex.
void BlockCache::Trim(size_t keep_bytes) {
  std::list<Block> looked_at;
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Block& block : blocks_) bytes += block.bytes;
    if (bytes <= keep_bytes) return;
    looked_at.swap(blocks_);
  }
  for (auto block = looked_at.begin(); block != looked_at.end() && bytes > keep_bytes;) {
    if (api_.event_query(block->free) != kCuSuccess) {
      ++block;
      continue;
    }
    bytes -= block->bytes;
    api_.mem_free(block->memory);
    api_.event_destroy(block->free);
    block = looked_at.erase(block);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_.splice(blocks_.begin(), looked_at);
}

}  // namespace hororing
