// Engine: how callers, and a thread while a device is in use, notice that the loop never returns.
#include <algorithm>
#include <chrono>
#include <string>

#include "base/log.h"
#include "engine/engine.h"
#include "engine/loop.h"

namespace hororing {
// A call that should return at once never takes this long, however busy the machine is.
constexpr TimeNs kLongestCall = 30 * kSecond;
// The limit for a call during which a neighbour died, or the store said so: then it never returns.
constexpr TimeNs kLongestAfterDeath = 2 * kSecond;
constexpr TimeNs kWatchInterval = 500 * kMillisecond;

void Engine::CheckLoop() {
  const TimeNs lasts = calls_.Elapsed(NowNs());
  const TimeNs limit = std::min(shared_.config.timeout_ns, kLongestCall);
  // Once all requests have failed, callers wait only for the thread's end, and NCCL may take its
  // time to abort, even if a neighbour is dead.
  const bool ended = state() == State::kStopped || state() == State::kFailed;
  if (lasts < (ended ? limit : std::min(limit, kLongestAfterDeath))) return;
  int dead = 0;
  const int ranks = static_cast<int>(local_processes_.size());
  while (dead < ranks && !IsGone(local_processes_[static_cast<size_t>(dead)])) ++dead;
  if (dead == ranks && lasts < limit && !shared_.mailbox.revoked()) return;
  const CallWatch::Name name = calls_.Abandon();
  if (name.call == nullptr) return;

  // From here on, this thread acts as the loop's thread.
  const std::string in_batch = shared_.tensors.Titles({"REDUCE", "PLAN"});
  const std::string whose =
      name.library != nullptr ? name.library : "the transport '" + transport_name_ + "'";
  std::string text = std::string(name.call) + " of " + whose + " has not returned for " +
                     std::to_string(lasts / kSecond) + " s";
  if (!in_batch.empty()) text += ", in a batch of " + in_batch;
  const bool can_abort = name.waits_for_kernels && !ended;
  text += can_abort ? "; hororing aborts its GPU work"
                    : "; hororing has given it up, and this process can only end";
  if (ended) return Log(LogLevel::kError, text);
  if (can_abort) waits_for_kernels_ = loop_;
  Status why(Code::kTransport, text);
  if (dead < ranks) {
    const std::string who = "rank " + std::to_string(dead) + " (pid " +
                            std::to_string(local_processes_[static_cast<size_t>(dead)].pid) +
                            ") died";
    why = Status(Code::kPeerLost, who + ", and " + text, dead);
  }
  Log(LogLevel::kError, "communication has failed: " + why.message());
  if (name.library != nullptr) shared_.mailbox.TellPeers(why);
  Finish(why);
}

// Checks the loop while callers are in the driver, too. A launch waits there while the queue is
// full of work that waits for our kernels, and these may wait for a dead peer. Such a launch also
// keeps the loop out of the driver, so that it does not notice.
void Engine::WatchDevice() {
  while (!abandoned() || state() == State::kRunning) {
    const std::chrono::nanoseconds interval(kWatchInterval);
    if (ended_.wait_for(interval) == std::future_status::ready) return;
    CheckLoop();
  }
  Loop* const loop = waits_for_kernels_;
  if (loop == nullptr) return;
  loop->runner().Abort();
  calls_.AwaitParked();
  loop->runner().FreeBackends();
  free_.set_value();
}

bool Engine::AwaitFreed(TimeNs timeout_ns) const {
  return waits_for_kernels_ != nullptr &&
         freed_.wait_for(std::chrono::nanoseconds(timeout_ns)) == std::future_status::ready;
}

}  // namespace hororing
