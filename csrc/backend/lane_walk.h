// LaneWalk: all-gathers and broadcasts over several hosts. What begins on one rank and ends on all
// is a lane: the contribution of a rank to an all-gather, a part of what a broadcast sends. Each
// lane crosses to every host once, to one rank there, its carrier; ranks of a host copy it from
// the carrier's slot.
//
//   all-gather, 2 hosts x 2 ranks, lanes a b c d of ranks 0 1 2 3
//
//                  slot 0   slot 1        slot 2   slot 3
//   PACK           a .      b .           . c      . d        the own lane
//   over the wire  a c      b d           a c      b d        0 <-> 2, 1 <-> 3
//   UNPACK         all ranks of the host copy a b c d from both slots
//
// The lanes of an all-gather go straight to all hosts, since each host sends as much as it must
// anyway. A broadcast goes from host to host, along a chain or a tree as in
// collective/broadcast.cc, in as many lanes as each host has ranks, where there is enough to send.
//
// Lanes are cut into pieces; block n holds the n-th piece of every lane. A piece is received into
// the slot, and sent on from there.
//
// Cost per host: every byte of others is received once; sent are (H-1) times the own bytes by an
// all-gather, at most S (chain) or S log2(H) (tree) by a broadcast.
#pragma once

#include <cstddef>
#include <vector>

#include "backend/host_walk.h"

namespace hororing {

struct Lane {
  // A part of the lane where it lies in this rank's output.
  struct Stretch {
    size_t begin;  // in the lane
    size_t bytes;
    std::byte* at;
  };
  std::vector<Stretch> stretches;  // in order, without gaps
  size_t bytes = 0;
  int carrier = 0;      // on this host, by local rank; where the lane begins, that rank
  bool begins = false;  // on this rank
  int from = -1;        // the rank of the job that sends it here; -1: not here
  std::vector<int> to;  // those to which this one sends it on

  void Add(std::byte* at, size_t length) {
    if (length > 0) stretches.push_back({bytes, length, at});
    bytes += length;
  }
};

// What all ranks compute alike, but for the stretches.
struct LanePlan {
  std::vector<Lane> lanes;
  std::vector<size_t> place;  // of a lane among those of its carrier
  std::vector<bool> carries;  // by local rank
  size_t piece = 0;           // bytes of a lane in one block
  uint64_t blocks = 0;

  // `most`: lanes that a rank of any host carries. REQUIRES: capacity / most >= kLeastRoom.
  LanePlan(std::vector<Lane> all, const HostGroup& group, size_t capacity, size_t most);
  static constexpr size_t kLeastRoom = 4 << 10;
};

class LaneWalk final : public HostWalk {
 public:
  LaneWalk(const HostGroup& group, ShmTransport& local, Transport& wire, const Batch& batch,
           const LanePlan& plan, uint64_t first, TimeNs deadline, TraceSink& trace);

 private:
  bool Finished() const override;
  Status Advance(bool* moved) override;
  int LaggingOnWire() const override;
  bool Lags(int peer) const override;

  Status TakeArrivals(bool* moved);
  bool CanBegin() const;
  bool CanUnpack() const;
  void Begin();
  void Unpack();
  void SendOn(size_t lane, uint64_t number);
  std::byte* Place(size_t lane, uint64_t number) const;
  size_t PieceOf(const Lane& lane, uint64_t number) const;
  template <typename Copy>
  size_t ForEachStretch(const Lane& lane, uint64_t number, Copy copy) const;

  const LanePlan& plan_;
  WireQueue receives_, sends_;
  // The next block of each stage: consumed_ <= arrived_ <= begun_.
  uint64_t begun_;
  uint64_t arrived_;
  uint64_t consumed_;
};

}  // namespace hororing
