// FaultyTransport: a Transport with an injected fault. It counts the data-plane operations (Send,
// Receive) of its rank. From operation `at` on (0: the first),
//
//   kFail   the data plane is broken: every Wait fails with kTransport;
//   kDie    the rank is silent, like a process that was killed or stopped: it sends and receives
//           nothing, its waits fail, and it makes no announcement.
//
// Independently, `delay_ns` delays every operation by computing, as on a slow rank.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "transport/transport.h"

namespace hororing_test {

struct Fault {
  enum class Kind { kNone, kFail, kDie };
  Kind kind = Kind::kNone;
  uint64_t at = 0;
  hororing::TimeNs delay_ns = 0;
};

class FaultyTransport final : public hororing::Transport {
 public:
  FaultyTransport(std::unique_ptr<hororing::Transport> inner, Fault fault)
      : inner_(std::move(inner)), fault_(fault) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const char* name() const override { return inner_->name(); }

  Request Send(int peer, const void* data, size_t bytes) override {
    return Operate() ? Request() : inner_->Send(peer, data, bytes);
  }
  Request Receive(int peer, void* data, size_t bytes) override {
    return Operate() ? Request() : inner_->Receive(peer, data, bytes);
  }
  // Ends requests from before the fault with a deadline in the past, so that the inner transport
  // releases their buffers.
  hororing::Status Wait(Request request, hororing::TimeNs deadline) override {
    if (!Faulty()) return inner_->Wait(request, deadline);
    if (request.slot != 0) (void)inner_->Wait(request, 0).ok();
    return Broken();
  }
  bool Done(Request request) override { return Faulty() || inner_->Done(request); }
  void Post(int peer, std::string message) override {
    if (!Dead()) inner_->Post(peer, std::move(message));
  }
  bool Poll(int* peer, std::string* message) override {
    return !Dead() && inner_->Poll(peer, message);
  }
  void Sleep(hororing::TimeNs deadline) override { inner_->Sleep(deadline); }
  void Wake() override { inner_->Wake(); }
  void Revoke(const hororing::Status& why) override {
    Transport::Revoke(why);
    inner_->Revoke(why);
  }
  hororing::Status CheckPeers() override { return Dead() ? Broken() : inner_->CheckPeers(); }
  void AnnounceFailure(const hororing::Status& why) override {
    if (!Dead()) inner_->AnnounceFailure(why);
  }
  bool Flush(hororing::TimeNs deadline) override { return !Dead() && inner_->Flush(deadline); }

  // Data-plane operations so far.
  uint64_t operations() const { return operations_; }

 private:
  bool Faulty() const { return fault_.kind != Fault::Kind::kNone && operations_ > fault_.at; }
  bool Dead() const { return fault_.kind == Fault::Kind::kDie && Faulty(); }
  // Counts an operation. Returns whether it must not happen.
  bool Operate() {
    ++operations_;
    const hororing::TimeNs until = hororing::NowNs() + fault_.delay_ns;
    while (hororing::NowNs() < until) {
    }
    return Faulty();
  }
  hororing::Status Broken() const {
    return hororing::Status(hororing::Code::kTransport,
                            "injected fault at operation " + std::to_string(fault_.at),
                            inner_->rank());
  }

  const std::unique_ptr<hororing::Transport> inner_;
  const Fault fault_;
  uint64_t operations_ = 0;
};

}  // namespace hororing_test
