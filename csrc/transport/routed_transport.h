// RoutedTransport: the transport of a job over several hosts, within which ranks share memory.
// Control messages between ranks of one host go through that memory, everything else over the wire.
//
// With MPI one thread must do everything. The loop's thread sleeps on the doorbell of the shared
// memory, which the host's ranks and callers ring, and polls the wire in between.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/shm/shm_transport.h"
#include "transport/transfers.h"
#include "transport/transport.h"

namespace hororing {

class RoutedTransport final : public Transport {
 public:
  // `local` connects this host's `ranks`, by local rank. Borrowed; the destructor does not need it.
  RoutedTransport(std::unique_ptr<Transport> wire, ShmTransport& local,
                  const std::vector<int>& ranks, TimeNs spin_ns);

  int rank() const override { return wire_->rank(); }
  int size() const override { return wire_->size(); }
  const char* name() const override { return wire_->name(); }

  Request Send(int peer, const void* data, size_t bytes) override {
    return wire_->Send(peer, data, bytes);
  }
  Request Receive(int peer, void* data, size_t bytes) override {
    return wire_->Receive(peer, data, bytes);
  }
  Status Wait(Request request, TimeNs deadline) override;
  bool Done(Request request) override;

  void Post(int peer, std::string message) override;
  bool Poll(int* peer, std::string* message) override;
  bool Progress() override;
  void Sleep(TimeNs deadline) override;
  void Wake() override { local_.Wake(); }
  void Revoke(const Status& why) override;

  void Watch(CallWatch* calls) override { wire_->Watch(calls); }
  Status CheckPeers() override;
  TimeNs Silence(int peer) override { return wire_->Silence(peer); }
  TimeNs Extended(TimeNs deadline, TimeNs progressed_ns) const override {
    return wire_->Extended(deadline, progressed_ns);
  }
  void SetWaitLimits(WaitLimits wait_limits) override {
    wire_->SetWaitLimits(std::move(wait_limits));
  }
  void AnnounceFailure(const Status& why) override { wire_->AnnounceFailure(why); }
  bool Flush(TimeNs deadline) override;
  bool Close(TimeNs deadline) override { return wire_->Close(deadline); }

 private:
  // Continues sending messages that did not fit into the pipes. True when all are sent.
  bool MoveLocal() { return !local_.HasUnsent() || local_.Flush(0); }
  bool Fetch();

  const std::unique_ptr<Transport> wire_;
  ShmTransport& local_;
  const std::vector<int> ranks_;    // of this host, by local rank
  std::vector<int> local_rank_of_;  // per rank: its local rank, or -1 on another host
  const TimeNs spin_ns_;
  Inbox inbox_;
  uint32_t last_sleep_epoch_ = 0;  // after the last Sleep: shows a later Wake
};

}  // namespace hororing
