// Engine: what callers do while they wait. They run the loop where they may (ADR 12), and otherwise
// sleep, look after it now and then, and see that its thread is awake.
#include <algorithm>
#include <chrono>
#include <functional>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/loop.h"

namespace hororing {
namespace {

// How long a caller sleeps before it looks after the loop.
TimeNs NextLook(TimeNs deadline) {
  constexpr TimeNs kLookInterval = 500 * kMillisecond;
  return std::clamp<TimeNs>(deadline - NowNs(), 0, kLookInterval);
}

}  // namespace

// For a caller that is blocked until done(). `look`, which looks whether it is, sleeps so long.
template <typename Done, typename Look>
HandleTable::Look Engine::WaitUntil(const Done& done, const Look& look, TimeNs timeout_ns) {
  ++shared_.mailbox.waiting;
  const TimeNs deadline = After(NowNs(), timeout_ns);
  ProgressUntil(std::ref(done), deadline);
  HandleTable::Look seen = look(NextLook(deadline));
  while (seen == HandleTable::Look::kPending) {
    LookAtLoop();
    if (NowNs() >= deadline) break;
    seen = look(NextLook(deadline));
  }
  --shared_.mailbox.waiting;
  return seen;
}

HandleTable::Look Engine::Wait(int64_t handle, TimeNs timeout_ns, Status* status) {
  HandleTable& handles = *shared_.handles;
  return WaitUntil([&] { return handles.Poll(handle) != HandleTable::Look::kPending; },
                   [&](TimeNs most) { return handles.Wait(handle, most, status); }, timeout_ns);
}

HandleTable::Look Engine::WaitMany(const int64_t* handles, size_t count, TimeNs timeout_ns,
                                   bool* all_ok,
                                   std::vector<std::shared_ptr<const DeviceEvent>>* done_events) {
  HandleTable& table = *shared_.handles;
  size_t left = count;
  const auto done = [&] {
    while (left > 0 && table.Poll(handles[left - 1]) != HandleTable::Look::kPending) --left;
    return left == 0;
  };
  return WaitUntil(
      done, [&](TimeNs most) { return table.WaitMany(handles, count, most, all_ok, done_events); },
      timeout_ns);
}

int64_t Engine::NextCompletion(int64_t seen, TimeNs timeout_ns) {
  ++shared_.mailbox.awaiting_any;
  const int64_t completions = shared_.handles->NextCompletion(seen, timeout_ns);
  --shared_.mailbox.awaiting_any;
  return completions;
}

HandleTable::Look Engine::Poll(int64_t handle) {
  const HandleTable::Look look = shared_.handles->Poll(handle);
  if (look != HandleTable::Look::kPending) return look;
  LookAtLoop();
  if (shared_.tensors.submitted().count != 0) shared_.mailbox.Polled();
  return look;
}

// Waits for the thread, at most so long, and looks after the loop meanwhile. False: in vain.
template <typename T>
bool Engine::Await(const std::future<T>& future, TimeNs timeout_ns) {
  const TimeNs deadline = After(NowNs(), timeout_ns);
  for (;;) {
    const std::chrono::nanoseconds most(abandoned() ? 0 : NextLook(deadline));
    if (future.wait_for(most) == std::future_status::ready) return true;
    if (abandoned() || NowNs() >= deadline) return false;
    LookAtLoop();
  }
}

bool Engine::Shutdown(const std::string& reason, TimeNs timeout_ns) {
  shared_.mailbox.Stop(reason);
  return Await(ended_, timeout_ns);
}

bool Engine::Abort(const std::string& reason, TimeNs timeout_ns) {
  Revoke(Status(Code::kPeerLost, reason));
  return Await(ended_, timeout_ns);
}

Status Engine::RunCommand(Mailbox::Command command, TimeNs timeout_ns) {
  std::lock_guard<std::mutex> one_at_a_time(command_mutex_);
  std::future<Status> outcome = shared_.mailbox.Post(std::move(command));
  if (Await(outcome, timeout_ns)) return outcome.get();
  return Status(Code::kStalled, "timeline: the other ranks did not send their last events");
}

// Runs the loop, unless somebody else does or it is not for callers to run.
void Engine::ProgressUntil(const std::function<bool()>& done, TimeNs deadline) {
  if (done()) return;
  Mailbox& mailbox = shared_.mailbox;
  // A device may have come into use since Submit, which then woke nobody.
  if (!shared_.CallersMayProgress())
    return shared_.transport_lets_callers ? mailbox.Wake() : mailbox.ReportNow();
  std::unique_lock<std::mutex> progress(progress_mutex_, std::try_to_lock);
  if (progress.owns_lock() && loop_ != nullptr && loop_->drivable()) {
    const Loop::Left left = loop_->ProgressUntil(done, deadline);
    progress.unlock();
    // Only now: what happens before the lock is free wakes a thread that cannot take it.
    left.wake ? mailbox.Wake() : mailbox.WakeIfAny(left.epoch);
  } else {
    if (progress.owns_lock()) progress.unlock();
    mailbox.Wake();  // a request that was submitted without may have been overlooked
  }
}

}  // namespace hororing
