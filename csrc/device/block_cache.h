// BlockCache: memory in the order of streams for a device that has no memory pools (some virtual
// GPUs and old drivers): cuMemAlloc's, used again.
//
// Thread-safe. REQUIRES: the device's context is current, in all calls.
#pragma once

#include <cstddef>
#include <list>
#include <mutex>

#include "base/status.h"
#include "device/cuda_api.h"

namespace hororing {

class BlockCache {
 public:
  // `own`: the stream in whose order memory is taken. `api` lives longer.
  BlockCache(const CudaApi& api, CuStream own) : api_(api), own_(own) {}
  // REQUIRES: nothing is in the streams any more.
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // At least `bytes`, not 0, that may be written in the order of the own stream; then how many.
  Status Take(size_t* bytes, CuAddress* memory);
  // Of Take, and as many. It is free when `stream` has come so far.
  Status Give(CuAddress memory, size_t bytes, CuStream stream);

 private:
  struct Block {
    CuAddress memory;
    size_t bytes;
    CuEvent free;  // when it is
  };
  static size_t Rounded(size_t bytes);
  void Trim(size_t keep_bytes);

  const CudaApi& api_;
  const CuStream own_;
  std::mutex mutex_;
  std::list<Block> blocks_;  // the oldest first; GUARDED_BY(mutex_)
};

}  // namespace hororing
