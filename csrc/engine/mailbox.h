// Mailbox: what callers tell the loop besides their requests (engine/tensor_table.h): that they
// wait, a command, that it must end. And how they wake it.
//
// Thread-safe. "Loop:" marks what only the loop calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/status.h"
#include "transport/transport.h"

namespace hororing {

class Mailbox {
 public:
  // Ends the loop's sleep, or the next one. Never blocks.
  void Wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (transport_ != nullptr) transport_->Wake();
  }
  // If anything has happened since `epoch`. REQUIRES: callers may run the loop.
  void WakeIfAny(uint32_t epoch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (transport_ != nullptr && transport_->eventcount()->Epoch() != epoch) transport_->Wake();
  }
  // Requests are in the table. The loop, where it has promised to poll, either takes them after it
  // has withdrawn its promise, or we see that it has. Where somebody has rung since it looked last,
  // it looks again.
  void Submitted() {
    if (poll_by.load() == kForever && !rung_.load() && !rung_.exchange(true)) Wake();
  }
  // Somebody waits for what is in the table: the loop, where it has promised to poll, does it now.
  void ReportNow() {
    if (poll_by.load() != kForever) Wake();
  }
  // The same for one that polls, and does not count as waiting.
  void Polled() {
    polled_ = true;
    ReportNow();
  }
  // Loop: it is about to look at the table.
  void Looking() { rung_ = false; }
  // Loop: the table is about to be emptied.
  void Reporting() { polled_ = false; }
  // Loop: whether what is submitted must be reported now.
  bool IsUrgent() const { return waiting.load() != 0 || polled_.load() || stopping_.load(); }

  // All ranks are to end. The first reason counts.
  void Stop(const std::string& reason) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stop_reason_.empty()) stop_reason_ = reason;
    }
    stopping_ = true;
    Wake();
  }
  bool stopping() const { return stopping_.load(); }
  std::string stop_reason() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return stop_reason_;
  }

  struct Command {
    std::optional<std::string> path;  // of a timeline to start; none: stop it, with its last events
    bool mark_cycles = false;
    bool begun = false;  // the loop's
    std::promise<Status> outcome = {};
  };
  // In place of the one before, for which nobody waits any more.
  std::future<Status> Post(Command command) {
    std::future<Status> outcome = command.outcome.get_future();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      command_ = std::make_shared<Command>(std::move(command));
      commanded_ = closed_.ok();
      if (!closed_.ok()) command_->outcome.set_value(closed_);
    }
    Wake();
    return outcome;
  }
  // Loop: the command that is not answered yet; null: none.
  std::shared_ptr<Command> command() const {
    if (!commanded_.load()) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    return command_;
  }
  void Answer(const Command& command, const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (command_.get() != &command || !commanded_.exchange(false)) return;
    command_->outcome.set_value(status);
  }
  // Nobody serves commands any more: answers them all with `why`.
  void Close(const Status& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = why;
    if (commanded_.exchange(false)) command_->outcome.set_value(why);
  }
  // `why`; Ok before.
  Status closed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

  // Loop: over which it is woken. Null: it has ended.
  void Attach(Transport* transport) {
    std::lock_guard<std::mutex> lock(mutex_);
    transport_ = transport;
    RevokeIfAttached();
  }
  // Ends every wait of the loop, which fails with `why`; rank -1 means this one. The first call
  // counts.
  void Revoke(const Status& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!revoked_) revoked_ = why;
    RevokeIfAttached();
  }
  // REQUIRES: the loop was abandoned outside of the transport. Over MPI peers hear of it by the end
  // of this process, or at their deadline: to MPI no other thread may talk.
  void TellPeers(const Status& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (transport_ != nullptr && transport_->eventcount() != nullptr)
      transport_->AnnounceFailure(why);
  }

  // When the loop's thread looks at what is submitted, without being woken; kForever: it has not
  // promised to. The loop withdraws its promise before it looks.
  std::atomic<TimeNs> poll_by{kForever};
  // Callers that are blocked: until their requests are complete, which are reported at once; and
  // until any request is.
  std::atomic<int> waiting{0}, awaiting_any{0};

 private:
  void RevokeIfAttached() {  // REQUIRES: mutex_
    if (transport_ == nullptr || !revoked_) return;
    const int rank = revoked_->rank() < 0 ? transport_->rank() : revoked_->rank();
    transport_->Revoke(Status(revoked_->code(), revoked_->message(), rank));
  }

  std::atomic<bool> polled_{false}, rung_{false}, stopping_{false}, commanded_{false};
  mutable std::mutex mutex_;
  std::string stop_reason_;           // GUARDED_BY(mutex_)
  std::shared_ptr<Command> command_;  // GUARDED_BY(mutex_)
  Status closed_;                     // GUARDED_BY(mutex_)
  Transport* transport_ = nullptr;    // GUARDED_BY(mutex_), and so does not vanish meanwhile
  std::optional<Status> revoked_;     // GUARDED_BY(mutex_)
};

}  // namespace hororing
