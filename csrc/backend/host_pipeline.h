// HostPipeline: the pipeline of all collectives through shared memory. The ranks of a host process
// a batch in numbered blocks, in slots of their segment, while some of them may exchange data with
// other hosts. No stage may block, because both sides must make progress: the pipeline is a loop
// that runs any stage that can proceed, and sleeps if none can.
//
// A rank that is late, or has lost its core, delays others only when they have run out of blocks.
//
// Invariants
//   1. A block of a slot is overwritten only when consumed[q] shows for every rank q that it has
//      read the previous contents.
//   2. Block numbers never restart: they increase over all batches of a set, and continue in a
//      later set with the same id.
//   3. A rank's slot serves one set at a time: before a batch of another set writes to it, the rank
//      waits for the readers of the latest one.
//   4. All pipelines of a set divide slots alike (SlotGeometry). After every collective, `packed`
//      and `consumed` of all ranks equal the number of the next block.
//   5. Messages between two ranks within a batch have one order, independent of arrival.
//   6. A rank that cannot proceed waits for one peer per counter, notes which
//   (SlotCounter::awaits),
//      and is rung by that one only. All ranks ringing all would cost n^2 thread switches a stage.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/virtual_buffer.h"
#include "collective/segments.h"
#include "transport/factory.h"
#include "transport/shm/shm_transport.h"

namespace hororing {

// The members of a process set by hosts, as seen by one. Hosts are in the order of first members.
struct HostGroup {
  HostGroup(const Topology& topology, Members members);

  // The rank on a host that receives or sums for a local rank of another host.
  int OwnerOn(int on_host, int local_rank) const {
    return local_rank % static_cast<int>(group_ranks_on[static_cast<size_t>(on_host)].size());
  }
  int JobRank(int on_host, int local_rank) const {
    const int at = group_ranks_on[static_cast<size_t>(on_host)][static_cast<size_t>(local_rank)];
    return members.ranks[static_cast<size_t>(at)];
  }
  int hosts() const { return static_cast<int>(group_ranks_on.size()); }
  int size() const { return static_cast<int>(members.ranks.size()); }
  int local_size() const { return static_cast<int>(slots.size()); }
  // The number of ranks on the smallest host.
  int least_local_size() const {
    size_t least = members.ranks.size();
    for (const std::vector<int>& ranks : group_ranks_on) least = std::min(least, ranks.size());
    return static_cast<int>(least);
  }

  const Members members;
  std::vector<int> host_of;                      // by group rank
  std::vector<int> local_of;                     // by group rank: the rank on its host
  std::vector<std::vector<int>> group_ranks_on;  // per host, ascending
  std::vector<int> slots;  // of this host's members: their ranks in its segment
  // The other members of the host, in the order in which this one looks for a rank to wait for.
  std::vector<int> others;
  int group_rank = 0;  // of this rank, in the set
  int host = 0;
  int local = 0;  // its rank among the members of its host
};

// Bytes reduced at a time: the next stage finds the result in the first-level cache.
constexpr size_t kReducePiece = 16 << 10;

// How a rank's slot is divided: block n of a set is at place n % depth.
struct SlotGeometry {
  // Measured on one host with benchmarks/shm_direct.cc on 2 and 4 ranks: 128 KiB costs 10 to 30 %
  // at 64 MiB (more waits), 1 MiB up to 50 % if the second-level cache has 1 MiB. Cutting smaller
  // batches into more blocks, to overlap the stages, gains nothing.
  static constexpr size_t kMaxLocalBlock = 512 << 10;

  size_t depth;     // blocks
  size_t capacity;  // bytes of one
  // At least two blocks, so that the stages of adjacent blocks overlap.
  static SlotGeometry OneHost(size_t slot_bytes);
  // While one block is packed and another unpacked, the others are on the wire.
  static SlotGeometry SeveralHosts(size_t slot_bytes);
};

// A process set's ranks, their slots on this host, and the transports that connect them.
struct SetSlots {
  const HostGroup group;
  // All ranks of the job. On one host it is `local` itself.
  Transport& wire;
  ShmTransport& local;  // those of this host
  const SlotGeometry geometry;
  uint64_t next_block;  // of the next batch
};

class HostPipeline {
 public:
  // `on_wire`: whether this rank exchanges data with other hosts in this batch.
  HostPipeline(SetSlots& set, const Batch& batch, bool on_wire, uint64_t blocks, TimeNs deadline,
               TraceSink& trace);
  virtual ~HostPipeline() = default;
  HostPipeline(const HostPipeline&) = delete;

  Status Run();  // Runs the whole batch.

 protected:
  using Counter = SlotCounter SlotProgress::*;

  virtual bool Finished() const = 0;
  // Runs the stages that can proceed now. False if there are none; true if one fails.
  virtual bool Advance(Status* status) = 0;
  // The rank of the job that it waits for on the wire; -1 if none.
  virtual int LaggingOnWire() const = 0;
  // Whether the local peer's counter keeps this rank from proceeding.
  virtual bool Lags(int peer) const = 0;

  bool Reached(int peer, Counter counter, uint64_t value) const {
    return (Progress(peer).*counter).reached.load() >= value;
  }
  // The same, but if not, notes that this rank waits for `peer`, whose next Publish then rings it.
  bool ReachedOrAwaited(int peer, Counter counter, uint64_t value) const;
  // True if `counter` has reached `value` on the other ranks of the host for which counts(peer).
  template <typename Counts>
  bool PeersReached(Counts counts, Counter counter, uint64_t value) const {
    for (const int peer : group_.others) {
      if (counts(peer) && !ReachedOrAwaited(peer, counter, value)) return false;
    }
    return true;
  }
  bool PeersReached(Counter counter, uint64_t value) const {
    return PeersReached([](int) { return true; }, counter, value);
  }
  void Publish(Counter counter, uint64_t value);
  // Notes, before Publish, whether this rank's sums of block `number` are finite; for IsFinite.
  void NoteFinite(uint64_t number, bool finite) {
    std::atomic<uint64_t>& bits = Progress(rank_).reduced.nonfinite;
    const uint64_t others = bits.load(std::memory_order_relaxed) & ~BitOf(number);
    bits.store(finite ? others : others | BitOf(number), std::memory_order_relaxed);
  }
  bool IsFinite(int peer, uint64_t number) const {
    return (Progress(peer).reduced.nonfinite.load(std::memory_order_relaxed) & BitOf(number)) == 0;
  }
  // True if `peer`, or all ranks of the host, have read what was at the place of block `number`.
  bool BlockIsFree(int peer, uint64_t number) const {
    return number < set_begin_ + depth_ ||
           Reached(peer, &SlotProgress::consumed, number + 1 - depth_);
  }
  bool BlockIsFree(uint64_t number) const {
    return number < set_begin_ + depth_ ||
           PeersReached(&SlotProgress::consumed, number + 1 - depth_);
  }
  // The range of block `number` in `total`, which is cut into pieces.
  Range PieceOf(size_t total, size_t piece, uint64_t number) const {
    const size_t begin = static_cast<size_t>(number - first_) * piece;
    return {std::min(begin, total), std::min(begin + piece, total)};
  }
  std::byte* BlockAt(int peer, uint64_t number) const {
    return segment_.slot(group_.slots[static_cast<size_t>(peer)]) +
           static_cast<size_t>(number % depth_) * capacity_;
  }

  SetSlots& set_;
  const HostGroup& group_ = set_.group;
  Transport& wire_ = set_.wire;
  ShmTransport& local_ = set_.local;
  ShmSegment& segment_ = local_.segment();
  const Batch& batch_;
  TraceSink& trace_;
  const bool on_wire_;
  const TimeNs deadline_;
  const size_t depth_ = set_.geometry.depth, capacity_ = set_.geometry.capacity;  // of the slots
  // Among this host's members, like everything called local or peer.
  const int rank_ = group_.local, size_ = group_.local_size();
  const uint64_t set_begin_ = FirstBlock(group_.members);  // the set's first block
  const uint64_t first_ = set_.next_block, end_;           // blocks of this batch

 private:
  SlotProgress& Progress(int peer) const {
    return segment_.rank_state(group_.slots[static_cast<size_t>(peer)])
        .progress[group_.members.set];
  }
  uint64_t BitOf(uint64_t number) const { return uint64_t{1} << number % depth_ % 64; }
  template <typename Ready, typename Peers>
  Status RunUntil(Ready ready, Peers lagging);
  Status WaitForReaders();
  std::vector<int> Lagging() const;

  TimeNs next_check_ns_ = 0;
};

}  // namespace hororing
