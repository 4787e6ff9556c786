// Mailbox: how callers wake the loop, and all that they pass to it except requests
// (engine/tensor_table.h): the number of waiting callers, timeline commands and the stop flag.
//
// Thread-safe. "Loop:" marks functions that only the loop calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "transport/transport.h"

namespace hororing {

class Mailbox {
 public:
  // Ends the loop's current or next sleep. Never blocks.
  void Wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (transport_ != nullptr) transport_->Wake();
  }
  // Wakes the loop if anything has happened since `epoch`. REQUIRES: callers may run the loop.
  void WakeIfAny(uint32_t epoch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (transport_ != nullptr && transport_->eventcount()->Epoch() != epoch) transport_->Wake();
  }
  // A caller has added requests to the table. The loop clears `poll_by` before it scans the table;
  // a caller adds to the table before it reads `poll_by`. So the loop sees the request, or the
  // caller sees kForever and wakes it. `rung_`: the loop was woken and has not scanned since.
  void NotifySubmitted() {
    if (poll_by.load() == kForever && !rung_.load() && !rung_.exchange(true)) Wake();
  }
  // A caller waits for a request in the table: wakes a loop that has promised to poll.
  void RequestReport() {
    if (poll_by.load() != kForever) Wake();
  }
  // The same for a caller that polls and does not count as waiting.
  void RequestReportForPoll() {
    polled_ = true;
    RequestReport();
  }
  // Loop: it is about to scan the table.
  void BeginScan() { rung_ = false; }
  // Loop: it is about to take everything from the table.
  void ClearPollRequest() { polled_ = false; }
  // Loop: whether submitted requests must be reported now.
  bool IsUrgent() const { return waiting.load() != 0 || polled_.load() || stopping_.load(); }

  // Asks all ranks to stop. The first reason is kept.
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
    std::optional<std::string> path;  // timeline to start; none: stop it
    bool mark_cycles = false;
    bool begun = false;  // only for the loop
    std::promise<Status> outcome = {};
  };
  // Replaces the previous command, whose caller has given up.
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
  // Loop: the unanswered command, or null.
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
  // Called after the loop's end: answers all commands with `why`.
  void Close(const Status& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = why;
    if (commanded_.exchange(false)) command_->outcome.set_value(why);
  }
  // The status given to Close; Ok before it.
  Status closed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

  // Loop: the transport through which it is woken. Null: the loop has ended.
  void Attach(Transport* transport) {
    std::lock_guard<std::mutex> lock(mutex_);
    transport_ = transport;
    RevokeIfAttached();
  }
  // Ends every wait of the loop with `why`; rank -1 means this one. The first call wins.
  void Revoke(const Status& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!revoked_) revoked_ = why;
    RevokeIfAttached();
  }
  bool revoked() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return revoked_.has_value();
  }
  // REQUIRES: the loop was abandoned outside of the transport. No other thread may call MPI, so
  // over MPI the peers notice only when this process ends, or at their deadline.
  void TellPeers(const Status& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (transport_ != nullptr && transport_->eventcount() != nullptr)
      transport_->AnnounceFailure(why);
  }

  // When the loop's thread will scan the table without being woken; kForever: see NotifySubmitted.
  std::atomic<TimeNs> poll_by{kForever};
  // Callers that are blocked until their own requests complete (reported at once), or any request.
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
  Transport* transport_ = nullptr;    // GUARDED_BY(mutex_), which also keeps it alive
  std::optional<Status> revoked_;     // GUARDED_BY(mutex_)
};

}  // namespace hororing
