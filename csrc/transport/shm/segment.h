// ShmSegment: the memory that all ranks of one world map, and its layout: a POSIX shared-memory
// object (processes), or the heap (ranks as threads in tests), which is the same to the code above.
//
//   | header | RankState 0 .. N-1 | Pipe (src, dst) | their bytes | slots of rank 0 .. N-1 |
//   | exchange, its slots 0 .. N-1 |
//
// Each pair has two pipes, control and data; those of the pairs (r, r) are unused.
//
// A name in /dev/shm exists only between Create and Unlink, which the factory calls as soon as all
// ranks have attached. After that nothing can be left behind, not even by SIGKILL. Until then the
// creator holds a lock on the file, so that the next Create on this host can remove ownerless
// files. The pages are reserved at creation (posix_fallocate), so a full /dev/shm is an error at
// init, not a SIGBUS in the middle of training.
//
// Thread-safety: the struct is shared between processes; every field says who writes it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "base/types.h"

namespace hororing {

// The blocks that have passed a stage on a rank, in a process set. Written by that rank only.
struct alignas(kCacheLine) SlotCounter {
  std::atomic<uint64_t> reached{0};
  // The rank of this host for whose counter this rank waits; -1: none yet.
  std::atomic<int32_t> awaits{-1};
  // Bit n % depth: its sums of block n are not all finite. Written before `reached`.
  std::atomic<uint64_t> nonfinite{0};
};

// The progress of one rank with the blocks of one process set (backend/host_pipeline.h).
struct SlotProgress {
  SlotCounter packed;    // its block lies in its slot
  SlotCounter reduced;   // its slice of the block is reduced
  SlotCounter consumed;  // it has read all slices of the block
};
constexpr int kSlotSets = 16;  // the world and 15 more at a time; other sets use pipes

// One rank's place in the segment.
struct alignas(kCacheLine) RankState {
  // A futex word: any rank or thread that changes what this rank may sleep on increments it.
  std::atomic<uint32_t> doorbell{0};
  // Bits: which threads of this rank are in, or about to enter, futex_wait, and whether a caller
  // runs its loop. Wakers see whom to wake, and save the system call if there are none.
  std::atomic<uint32_t> sleepers{0};
  // Bit n: the pipes with a peer of a number n, modulo 64, have changed. Set before the doorbell is
  // rung, and cleared by this rank before it looks at those pipes.
  std::atomic<uint64_t> changed{0};
  // Set by a peer that has failed or found a dead one, before it rings: check all peers now.
  std::atomic<uint32_t> alarm{0};
  // Set by a peer that has found the process of this rank dead, and the rank attached.
  std::atomic<uint32_t> gone{0};
  // The rest of the line is written by this rank only.
  std::atomic<int32_t> pid{0};
  std::atomic<int64_t> start_time{0};  // of the process, in clock ticks: guards against pid reuse
  std::atomic<uint32_t> attached{0};   // 1 from construction of the transport on, 2 when it ends
  // 0, or 1 + the rank to blame, once this rank has failed; set after `reason` is complete.
  std::atomic<uint32_t> failed{0};
  std::atomic<uint32_t> failure_code{0};  // as in Status; set before `failed`
  char reason[208] = {};                  // why, zero-terminated
  std::atomic<int64_t> alive_ns{0};       // the latest sign of life, by the clock of this host
  SlotProgress progress[kSlotSets];
};

// A one-way byte stream between two ranks: one writer process, one reader process.
struct alignas(kCacheLine) Pipe {
  alignas(kCacheLine) std::atomic<uint64_t> written{0};  // by the source
  std::atomic<uint32_t> full{0};  // by the source: it waits for room, so a reader rings it
  alignas(kCacheLine) std::atomic<uint64_t> read{0};  // by the destination
};

class ShmSegment {
 public:
  struct Geometry {
    int ranks = 1;
    size_t control_pipe_bytes = 0;   // a power of two, per ordered pair
    size_t data_pipe_bytes = 0;      // a power of two, per ordered pair
    size_t slot_bytes = 0;           // per rank: blocks of the pipelines
    size_t exchange_bytes = 0;       // of each rank (transport/shm/one_shot_exchange.h)
    static Geometry For(int ranks);  // below 64 MiB in total for up to 64 ranks
    // For the ranks of one of several hosts, whose data goes over MPI or TCP. `most` is the number
    // of ranks on the largest host: slots have the same size on all hosts.
    static Geometry OfHost(int ranks, int most);
    size_t total_bytes() const;
  };

  // In private memory, for ranks that are threads of this process.
  static std::shared_ptr<ShmSegment> OnHeap(const Geometry& geometry);
  // A fresh object under a new unique name (see name()).
  static Status Create(const Geometry& geometry, std::shared_ptr<ShmSegment>* segment);
  // kInvalidArgument: it is another user's, or this process has no right to it.
  static Status Attach(const std::string& name, const Geometry& geometry,
                       std::shared_ptr<ShmSegment>* segment);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;

  // For the creator: removes the name; the memory lives until the last rank unmaps it. The
  // destructor calls it at the latest. Does nothing on other ranks, or when called again.
  void Unlink();

  const std::string& name() const { return name_; }
  const Geometry& geometry() const { return geometry_; }
  bool process_shared() const { return !name_.empty(); }

  RankState& rank_state(int rank) {
    return reinterpret_cast<RankState*>(base_ + layout_.states)[rank];
  }
  Pipe& control_pipe(int source, int destination) {
    return reinterpret_cast<Pipe*>(base_ + layout_.pipes)[Pair(source, destination)];
  }
  Pipe& data_pipe(int source, int destination);
  std::byte* control_pipe_data(int source, int destination) {
    return base_ + layout_.control_data + Pair(source, destination) * geometry_.control_pipe_bytes;
  }
  std::byte* data_pipe_data(int source, int destination) {
    return base_ + layout_.data_data + Pair(source, destination) * geometry_.data_pipe_bytes;
  }
  std::byte* slot(int rank) {
    return base_ + layout_.slots + static_cast<size_t>(rank) * geometry_.slot_bytes;
  }
  // Of the one OneShotExchange of these ranks. REQUIRES: geometry().exchange_bytes > 0.
  std::atomic<uint64_t>& exchange_word() {
    return *reinterpret_cast<std::atomic<uint64_t>*>(base_ + layout_.exchange);
  }
  std::byte* exchange_slots(int rank) {
    return base_ + layout_.exchange + kCacheLine +
           static_cast<size_t>(rank) * geometry_.exchange_bytes;
  }

 private:
  // Offsets of the parts in the picture above.
  struct Layout {
    explicit Layout(const Geometry& geometry);
    size_t states, pipes, control_data, data_data, slots, exchange, end;
  };

  // Takes ownership of the mapping.
  ShmSegment(const Geometry& geometry, void* base, std::string name);
  void Construct();
  size_t Pair(int source, int destination) const {
    return static_cast<size_t>(source) * static_cast<size_t>(geometry_.ranks) +
           static_cast<size_t>(destination);
  }

  const Geometry geometry_;
  const Layout layout_;
  std::byte* const base_;
  const std::string name_;  // of the shared-memory object, "/..."; empty in private memory
  int owned_fd_ = -1;       // of the creator, until Unlink: holds the lock
};

}  // namespace hororing
