// Arena: memory of one rank that its peers on the host see too, so that a collective can work
// where a tensor lies instead of copying it (backend/shm_direct.h, ADR 0015).
//
//   | pages of the segment's arena of this rank |  free ranges, first fit
//
// Allocation is this rank's own business: no peer agrees to it or hears of it. Pages are reserved
// in it, so a full /dev/shm is an error here and not a SIGBUS later, and given back by Free. The
// mapping lives as long as the last Arena that refers to the segment.
//
// Thread-safety: every function from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/status.h"
#include "transport/shm_segment.h"

namespace hororing {

class Arena {
 public:
  // Of `rank`, which is attached to the segment.
  Arena(std::shared_ptr<ShmSegment> segment, int rank);

  // `bytes` of zeroed memory, aligned to a page, from 2 MiB on to a huge page. Fails where a
  // rank does not see the arenas, where the arena is full, and where less than half of
  // /dev/shm would stay free, which data loaders and MPI need too.
  // REQUIRES: all ranks have attached; bytes > 0.
  Status Allocate(size_t bytes, void** memory);
  // Not while a batch uses the memory.
  void Free(void* memory);

  // In whole pages, allocated now.
  size_t used_bytes() const;

  static constexpr uint64_t kElsewhere = UINT64_MAX;
  // The offset of [data, data + bytes) in the arena, if it lies inside.
  uint64_t OffsetOf(const void* data, size_t bytes) const {
    const uint64_t offset = reinterpret_cast<uintptr_t>(data) - begin_;
    return offset < bytes_ && bytes <= bytes_ - offset ? offset : kElsewhere;
  }

 private:
  Status Take(size_t wanted, size_t* begin);
  size_t Used() const;  // REQUIRES: mutex_

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_;
  const uintptr_t begin_;
  const size_t bytes_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;  // GUARDED_BY(mutex_); offset -> bytes, no two adjacent
  std::map<size_t, size_t> used_;  // GUARDED_BY(mutex_); the same of what is allocated
};

// Reserves the pages of a shared mapping by touching them; false where there are not enough,
// without a signal.
bool ReservePages(void* memory, size_t bytes);

}  // namespace hororing
