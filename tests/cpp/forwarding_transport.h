// ForwardingTransport: wraps a transport and changes nothing; tests override single functions.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "transport/transport.h"

namespace hororing_test {

class ForwardingTransport : public hororing::Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<hororing::Transport> inner)
      : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const char* name() const override { return inner_->name(); }
  Request Send(int peer, const void* data, size_t bytes) override {
    return inner_->Send(peer, data, bytes);
  }
  Request Receive(int peer, void* data, size_t bytes) override {
    return inner_->Receive(peer, data, bytes);
  }
  hororing::Status Wait(Request request, hororing::TimeNs deadline) override {
    return inner_->Wait(request, deadline);
  }
  bool Done(Request request) override { return inner_->Done(request); }
  void SetWaitLimits(WaitLimits wait_limits) override {
    inner_->SetWaitLimits(std::move(wait_limits));
  }
  void Post(int peer, std::string message) override { inner_->Post(peer, std::move(message)); }
  bool Poll(int* peer, std::string* message) override { return inner_->Poll(peer, message); }
  void Sleep(hororing::TimeNs deadline) override { inner_->Sleep(deadline); }
  void Wake() override { inner_->Wake(); }
  void Revoke(const hororing::Status& why) override {
    Transport::Revoke(why);
    inner_->Revoke(why);
  }
  hororing::TimeNs Silence(int peer) override { return inner_->Silence(peer); }
  hororing::Status CheckPeers() override { return inner_->CheckPeers(); }
  void AnnounceFailure(const hororing::Status& why) override { inner_->AnnounceFailure(why); }
  bool Flush(hororing::TimeNs deadline) override { return inner_->Flush(deadline); }

 protected:
  const std::unique_ptr<hororing::Transport> inner_;
};

}  // namespace hororing_test
