// Subgroup: some ranks of a transport as a separate transport over the same wires.
//
// Correct because of how it is used (ADR 13): all ranks carry out the batches of all process sets
// in one order, so the messages of any two ranks match in the order in which they are posted, for
// whichever subgroup. It has only a data plane; negotiation has one control plane for all.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace hororing {

class Subgroup final : public Transport {
 public:
  // `ranks` of `parent`, this one among them, in their order here. The parent is borrowed.
  Subgroup(Transport& parent, std::vector<int> ranks)
      : parent_(parent), ranks_(std::move(ranks)), rank_(RankOf(parent.rank())) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  const char* name() const override { return parent_.name(); }

  Request Send(int peer, const void* data, size_t bytes) override {
    return parent_.Send(ParentRank(peer), data, bytes);
  }
  Request Receive(int peer, void* data, size_t bytes) override {
    return parent_.Receive(ParentRank(peer), data, bytes);
  }
  Status Wait(Request request, TimeNs deadline) override { return parent_.Wait(request, deadline); }
  bool Done(Request request) override { return parent_.Done(request); }

  void Post(int peer, std::string message) override {
    parent_.Post(ParentRank(peer), std::move(message));
  }
  bool Poll(int* /*peer*/, std::string* /*message*/) override { return false; }
  void Sleep(TimeNs deadline) override { parent_.Sleep(deadline); }
  void Wake() override { parent_.Wake(); }
  void Revoke(const Status& why) override { parent_.Revoke(why); }
  // The ranks in the parent, in the order of the subgroup.
  const std::vector<int>& ranks() const { return ranks_; }
  // The rank in the subgroup of a rank of the parent.
  int RankOf(int parent_rank) const {
    const auto found = std::find(ranks_.begin(), ranks_.end(), parent_rank);
    return static_cast<int>(found - ranks_.begin());
  }
  TimeNs Silence(int peer) override { return parent_.Silence(ParentRank(peer)); }
  Status CheckPeers() override { return parent_.CheckPeers(); }
  void AnnounceFailure(const Status& why) override { parent_.AnnounceFailure(why); }
  bool Flush(TimeNs deadline) override { return parent_.Flush(deadline); }

 private:
  int ParentRank(int peer) const { return ranks_[static_cast<size_t>(peer)]; }

  Transport& parent_;
  const std::vector<int> ranks_;
  const int rank_;
};

}  // namespace hororing
