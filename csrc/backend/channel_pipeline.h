// ChannelPipeline: all-gathers over several hosts. A channel is the data of one rank. It crosses
// once to every host, to one rank there, its owner, from whose slot the other ranks copy it.
//
//   all-gather, 2 hosts x 2 ranks, channels a b c d of ranks 0 1 2 3
//
//                  slot 0   slot 1        slot 2   slot 3
//   PACK           a .      b .           . c      . d        each rank's own channel
//   over the wire  a c      b d           a c      b d        0 <-> 2, 1 <-> 3
//   UNPACK         all ranks of the host copy a b c d from both slots
//
// Channels go directly to all hosts, because each host must send that much anyway. They are cut
// into pieces; block n holds the n-th piece of every channel.
//
// Cost per host: every byte of other hosts is received once, and its own are sent (H-1) times.
#pragma once

#include <cstddef>
#include <vector>

#include "backend/host_pipeline.h"

namespace hororing {

struct Channel {
  // A contiguous part of the channel in this rank's output.
  struct Extent {
    size_t begin;  // in the channel
    size_t size;
    std::byte* at;
  };
  std::vector<Extent> extents;  // in order, without gaps
  size_t bytes = 0;
  int owner = 0;        // local rank on this host; if the channel starts here, that rank
  bool begins = false;  // starts on this rank
  int from = -1;        // the rank of the job that sends it to this rank; -1: none
  std::vector<int> to;  // if it begins here: the ranks to which this rank sends it

  void Add(std::byte* at, size_t length) {
    if (length > 0) extents.push_back({bytes, length, at});
    bytes += length;
  }
};

// Equal on all ranks, except for the extents.
struct ChannelPlan {
  std::vector<Channel> channels;
  std::vector<size_t> place;  // index of a channel among those of its owner
  std::vector<bool> owns;     // by local rank
  size_t piece = 0;           // bytes of a channel in one block
  uint64_t blocks = 0;

  // `most`: the most channels that a rank owns. REQUIRES: capacity / most >= kMinBytes.
  ChannelPlan(std::vector<Channel> all, const SetSlots& set, size_t most);
  static constexpr size_t kMinBytes = 4 << 10;
};

class ChannelPipeline final : public HostPipeline {
 public:
  ChannelPipeline(SetSlots& set, const Batch& batch, const ChannelPlan& plan, TimeNs deadline,
                  TraceSink& trace);

 private:
  bool Finished() const override { return consumed_ == end_ && sends_.empty(); }
  bool Advance(Status* status) override;
  int LaggingOnWire() const override;
  bool Lags(int peer) const override {
    return !BlockIsFree(peer, begun_) || (plan_.owns[static_cast<size_t>(peer)] &&
                                          !Reached(peer, &SlotProgress::packed, consumed_ + 1));
  }

  bool CanBegin() const {
    return begun_ < end_ && begun_ < consumed_ + depth_ &&
           begun_ < sends_.FirstOpen(end_) + depth_ && BlockIsFree(begun_);
  }
  bool CanUnpack() const {
    return consumed_ < arrived_ &&
           PeersReached([this](int peer) { return plan_.owns[static_cast<size_t>(peer)]; },
                        &SlotProgress::packed, consumed_ + 1);
  }
  void Begin();
  void Unpack();
  std::byte* Place(size_t channel, uint64_t number) const {
    return BlockAt(plan_.channels[channel].owner, number) + plan_.place[channel] * plan_.piece;
  }
  Range PieceOf(const Channel& channel, uint64_t number) const {
    return HostPipeline::PieceOf(channel.bytes, plan_.piece, number);
  }

  const ChannelPlan& plan_;
  Inflight receives_, sends_;
  // The next block of each stage: consumed_ <= arrived_ <= begun_.
  uint64_t begun_ = first_, arrived_ = first_, consumed_ = first_;
};

}  // namespace hororing
