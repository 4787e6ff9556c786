// Engine: what callers do while they wait. They run the loop if they may (ADR 12). Otherwise they
// make sure that its thread is awake, sleep, and check now and then that it is not stuck.
#include <algorithm>
#include <chrono>
#include <functional>

#include "base/recorder.h"
#include "engine/engine.h"
#include "engine/loop.h"

namespace hororing {
// How long a caller sleeps before it checks the loop.
constexpr TimeNs kCheckInterval = 500 * kMillisecond;

// Blocks until `wait` returns another state than kPending, after sleeping at most that long.
template <typename WaitFn>
HandleState Engine::WaitUntil(const WaitFn& wait, TimeNs timeout_ns) {
  HandleState state = HandleState::kPending;
  const auto settled = [&](TimeNs most) {
    if (state == HandleState::kPending) state = wait(most);
    return state != HandleState::kPending;
  };
  if (settled(0)) return state;
  ++shared_.mailbox.waiting;
  const TimeNs begin = NowNs(), deadline = After(begin, timeout_ns);
  ProgressUntil([&] { return settled(0); }, deadline);
  while (!settled(std::min(deadline - NowNs(), kCheckInterval))) {
    CheckLoop();
    if (NowNs() >= deadline) break;
  }
  --shared_.mailbox.waiting;
  Add(Total::kBlockedNs, NowNs() - begin);
  return state;
}

HandleState Engine::Wait(int64_t handle, TimeNs timeout_ns, Status* status) {
  HandleTable& handles = *shared_.handles;
  return WaitUntil([&](TimeNs most) { return handles.Wait(handle, most, status); }, timeout_ns);
}

HandleState Engine::WaitMany(const int64_t* handles, size_t count, TimeNs timeout_ns, bool* all_ok,
                             std::vector<std::shared_ptr<const DeviceEvent>>* done_events) {
  HandleTable& table = *shared_.handles;
  return WaitUntil(
      [&](TimeNs most) { return table.WaitMany(handles, count, most, all_ok, done_events); },
      timeout_ns);
}

int64_t Engine::NextCompletion(int64_t seen, TimeNs timeout_ns) {
  ++shared_.mailbox.awaiting_any;
  const int64_t completions = shared_.handles->NextCompletion(seen, timeout_ns);
  --shared_.mailbox.awaiting_any;
  return completions;
}

HandleState Engine::Poll(int64_t handle) {
  const HandleState state = shared_.handles->Poll(handle);
  if (state != HandleState::kPending) return state;
  CheckLoop();
  if (shared_.tensors.submitted().count != 0) shared_.mailbox.RequestReportForPoll();
  return state;
}

// Waits for a result of the loop's thread, and checks the loop meanwhile. False: no result in time.
template <typename Future>
bool Engine::Await(const Future& future, TimeNs timeout_ns) {
  const TimeNs deadline = After(NowNs(), timeout_ns);
  for (;;) {
    const std::chrono::nanoseconds most(abandoned() ? 0
                                                    : std::min(deadline - NowNs(), kCheckInterval));
    if (future.wait_for(most) == std::future_status::ready) return true;
    if (abandoned() || NowNs() >= deadline) return false;
    CheckLoop();
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

// Runs the loop, unless another thread does or callers may not run it.
void Engine::ProgressUntil(const std::function<bool()>& done, TimeNs deadline) {
  Mailbox& mailbox = shared_.mailbox;
  // A device may have come into use since Submit, which then has not woken the loop.
  if (!shared_.CallersMayProgress())
    return shared_.transport_allows_callers ? mailbox.Wake() : mailbox.RequestReport();
  std::unique_lock<std::mutex> progress(progress_mutex_, std::try_to_lock);
  if (progress.owns_lock() && loop_ != nullptr && loop_->CallersMayRun()) {
    const Loop::Handoff handoff = loop_->ProgressUntil(done, deadline);
    progress.unlock();
    // After unlock: before, the thread would wake up in vain.
    handoff.wake ? mailbox.Wake() : mailbox.WakeIfAny(handoff.epoch);
  } else {
    if (progress.owns_lock()) progress.unlock();
    mailbox.Wake();  // the other thread may have missed a request that was submitted without Wake
  }
}

}  // namespace hororing
