// QueueTransport: a Transport of queues under one mutex, for ranks that are threads. It is written
// independently of ShmTransport and is stricter: a send completes only when its receive is posted
// (so code that relies on buffering hangs, and the watchdog reports it), sizes must match, posting
// a receive overwrites its buffer, and the later side copies the bytes (so ThreadSanitizer sees who
// touches a buffer in flight).
//
// CheckedTransport: wraps any transport, and checks that every request is awaited exactly once.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "transport/transport.h"

namespace hororing_test {

class QueueTransport final : public hororing::Transport {
 public:
  static std::vector<std::unique_ptr<hororing::Transport>> MakeWorld(int size) {
    auto world = std::make_shared<World>(size);
    std::vector<std::unique_ptr<hororing::Transport>> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<QueueTransport>(world, r));
    return ranks;
  }

  // The state that the ranks share.
  struct Transfer {
    void* data;
    size_t bytes;
    bool done = false;
  };
  using TransferPtr = std::shared_ptr<Transfer>;
  struct Wire {  // from one rank to another
    std::deque<TransferPtr> sends, receives;
    bool cut = false;  // a transfer was withdrawn, so later ones would not match
  };
  struct World {
    explicit World(int ranks)
        : size(ranks),
          wires(static_cast<size_t>(ranks * ranks)),
          inboxes(static_cast<size_t>(ranks)),
          woken(static_cast<size_t>(ranks), false) {}
    const int size;
    std::mutex mutex;
    std::condition_variable changed;
    // GUARDED_BY(mutex)
    std::vector<Wire> wires;
    std::vector<std::deque<std::pair<int, std::string>>> inboxes;
    std::vector<bool> woken;
    std::map<int, hororing::Status> failures;  // by announcing rank
  };

  QueueTransport(std::shared_ptr<World> world, int rank) : world_(std::move(world)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return world_->size; }
  const char* name() const override { return "queue"; }

  Request Send(int peer, const void* data, size_t bytes) override {
    return Begin(WireTo(rank_, peer), &Wire::sends, const_cast<void*>(data), bytes);
  }
  Request Receive(int peer, void* data, size_t bytes) override {
    if (bytes > 0) std::memset(data, 0xCD, bytes);
    return Begin(WireTo(peer, rank_), &Wire::receives, data, bytes);
  }
  hororing::Status Wait(Request request, hororing::TimeNs deadline) override {
    std::unique_lock<std::mutex> lock(world_->mutex);
    const auto found = open_.find(request.slot);
    if (found == open_.end()) {
      hororing_test::Fail(__FILE__, __LINE__, "wait for a request that is not open");
      return hororing::Status(hororing::Code::kInternal, "no such request");
    }
    const TransferPtr transfer = found->second;
    open_.erase(found);
    const auto ended = [&] { return transfer->done || !broken_.ok() || FailedPeer() >= 0; };
    if (deadline == hororing::kForever) {
      world_->changed.wait(lock, ended);
    } else {
      const auto until =
          std::chrono::steady_clock::now() + std::chrono::nanoseconds(deadline - hororing::NowNs());
      if (!world_->changed.wait_until(lock, until, ended)) {
        broken_ = hororing::Status(hororing::Code::kTransport, "queue: deadline");
      }
    }
    if (broken_.ok() && transfer->done) return hororing::Status::Ok();
    if (broken_.ok()) {
      broken_ = world_->failures.at(FailedPeer());
    }
    Withdraw(transfer);
    return broken_;
  }

  bool Done(Request request) override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    const auto found = open_.find(request.slot);
    if (found == open_.end()) return true;  // Wait reports it
    return found->second->done || !broken_.ok() || FailedPeer() >= 0;
  }

  void Post(int peer, std::string message) override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    world_->inboxes[static_cast<size_t>(peer)].emplace_back(rank_, std::move(message));
    world_->changed.notify_all();
  }
  bool Poll(int* peer, std::string* message) override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    auto& inbox = world_->inboxes[static_cast<size_t>(rank_)];
    if (inbox.empty()) return false;
    *peer = inbox.front().first;
    *message = std::move(inbox.front().second);
    inbox.pop_front();
    return true;
  }
  void Sleep(hororing::TimeNs deadline) override {
    std::unique_lock<std::mutex> lock(world_->mutex);
    const size_t self = static_cast<size_t>(rank_);
    const auto ready = [&] { return world_->woken[self] || !world_->inboxes[self].empty(); };
    if (deadline == hororing::kForever) {
      world_->changed.wait(lock, ready);
    } else {
      world_->changed.wait_until(
          lock,
          std::chrono::steady_clock::now() + std::chrono::nanoseconds(deadline - hororing::NowNs()),
          ready);
    }
    world_->woken[self] = false;
  }
  void Wake() override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    world_->woken[static_cast<size_t>(rank_)] = true;
    world_->changed.notify_all();
  }
  hororing::Status CheckPeers() override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    const int failed = FailedPeer();
    if (failed < 0) return hororing::Status::Ok();
    return world_->failures.at(failed);
  }
  void AnnounceFailure(const hororing::Status& why) override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    world_->failures.emplace(rank_, hororing::Announced(why, rank_));
    world_->changed.notify_all();
  }
  bool Flush(hororing::TimeNs) override { return true; }  // Post has delivered already

 private:
  Wire& WireTo(int source, int destination) {
    return world_->wires[static_cast<size_t>(source * world_->size + destination)];
  }

  Request Begin(Wire& wire, std::deque<TransferPtr> Wire::* side, void* data, size_t bytes) {
    std::lock_guard<std::mutex> lock(world_->mutex);
    auto transfer = std::make_shared<Transfer>();
    transfer->data = data;
    transfer->bytes = bytes;
    open_[++last_slot_] = transfer;
    if (broken_.ok()) (wire.*side).push_back(transfer);
    while (!wire.cut && !wire.sends.empty() && !wire.receives.empty()) {
      Transfer& from = *wire.sends.front();
      Transfer& to = *wire.receives.front();
      if (from.bytes != to.bytes) {
        hororing_test::Fail(__FILE__, __LINE__,
                            "a message of " + std::to_string(from.bytes) + " bytes meets one of " +
                                std::to_string(to.bytes));
      }
      const size_t both = from.bytes < to.bytes ? from.bytes : to.bytes;
      if (both > 0) std::memcpy(to.data, from.data, both);
      from.done = to.done = true;
      wire.sends.pop_front();
      wire.receives.pop_front();
      world_->changed.notify_all();
    }
    return Request{last_slot_};
  }

  // REQUIRES: the mutex. The lowest rank other than this one that has announced a failure.
  int FailedPeer() const {
    for (const auto& failure : world_->failures) {
      if (failure.first != rank_) return failure.first;
    }
    return -1;
  }
  // REQUIRES: the mutex. Afterwards nothing touches the buffer.
  void Withdraw(const TransferPtr& transfer) {
    for (Wire& wire : world_->wires) {
      for (auto* side : {&wire.sends, &wire.receives}) {
        for (auto at = side->begin(); at != side->end(); ++at) {
          if (*at != transfer) continue;
          side->erase(at);
          wire.cut = true;
          return;
        }
      }
    }
  }

  const std::shared_ptr<World> world_;
  const int rank_;
  std::map<uint64_t, TransferPtr> open_;
  uint64_t last_slot_ = 0;  // slot 0 is not used
  hororing::Status broken_;
};

class CheckedTransport final : public hororing::Transport {
 public:
  explicit CheckedTransport(std::unique_ptr<hororing::Transport> inner)
      : inner_(std::move(inner)) {}
  ~CheckedTransport() override { CHECK_EQ(open_.size(), 0u); }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const char* name() const override { return inner_->name(); }

  Request Send(int peer, const void* data, size_t bytes) override {
    sent_to_.push_back(peer);
    return Open(peer, inner_->Send(peer, data, bytes));
  }
  Request Receive(int peer, void* data, size_t bytes) override {
    return Open(peer, inner_->Receive(peer, data, bytes));
  }
  hororing::Status Wait(Request request, hororing::TimeNs deadline) override {
    const auto found = open_.find(request.slot);
    CHECK(found != open_.end());
    if (found == open_.end()) return hororing::Status(hororing::Code::kInternal, "waited twice");
    const Request inner = found->second;
    open_.erase(found);
    return inner_->Wait(inner, deadline);
  }
  bool Done(Request request) override {
    const auto found = open_.find(request.slot);
    CHECK(found != open_.end());
    return found == open_.end() || inner_->Done(found->second);
  }
  void Post(int peer, std::string message) override { inner_->Post(peer, std::move(message)); }
  bool Poll(int* peer, std::string* message) override { return inner_->Poll(peer, message); }
  void Sleep(hororing::TimeNs deadline) override { inner_->Sleep(deadline); }
  void Wake() override { inner_->Wake(); }
  hororing::Status CheckPeers() override { return inner_->CheckPeers(); }
  void AnnounceFailure(const hororing::Status& why) override { inner_->AnnounceFailure(why); }
  bool Flush(hororing::TimeNs deadline) override { return inner_->Flush(deadline); }

  size_t open() const { return open_.size(); }
  size_t operations() const { return last_; }
  const std::vector<int>& sent_to() const { return sent_to_; }  // the peers of all sends

 private:
  Request Open(int peer, Request inner) {
    CHECK(peer >= 0 && peer < size() && peer != rank());
    open_[++last_] = inner;
    return Request{last_};
  }

  const std::unique_ptr<hororing::Transport> inner_;
  std::map<uint64_t, Request> open_;
  uint64_t last_ = 0;
  std::vector<int> sent_to_;
};

}  // namespace hororing_test
