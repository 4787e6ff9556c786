// Loop, third part: when negotiation does not go on. A rank that is busy answers nevertheless,
// since its engine is not; one that gives no sign of life is stopped, or behind a cut network.
#include <algorithm>
#include <string>

#include "base/log.h"
#include "engine/loop.h"

namespace hororing {
namespace {

// Answers come sooner, mostly.
constexpr TimeNs kMoment = kSecond / 2;

}  // namespace

// With the housekeeping. That rank 0 itself waits for somebody, it knows and says.
void Loop::LookAtAnswers(TimeNs now) {
  const bool waits = left_ || engine_.stats_.submitted.load() != engine_.stats_.completed.load();
  if (!waits || applied_ != answered_) {
    answered_ = applied_;
    waits_since_ns_ = now;
  }
  if (now - waits_since_ns_ < kMoment) return;
  const bool says = engine_.config_.stall.deadlock_ns != kForever && now >= next_blocked_ns_;
  if (says && engine_.waiting_.load() + engine_.awaiting_next_.load() > 0) {
    next_blocked_ns_ = After(now, Blocked::kInterval);
    struct Report report;
    report.applied = applied_;
    report.blocked = true;
    Tell(report, now);
  }
  if (coordinator_) return;
  LookForSigns({{superior(), waits_since_ns_}, {0, waits_since_ns_}}, now);
}

// Of ranks that are waited for, and since when. It is part of the limit how long that is: nobody
// was in the way before.
void Loop::LookForSigns(const std::map<int, TimeNs>& awaited, TimeNs now) {
  int rank = -1;
  TimeNs silence = 0;
  for (const auto& [each, since] : awaited) {
    if (each == topology_.rank || now - since < kMoment) continue;
    const TimeNs lasts = std::min(transport_.Silence(each), now - since);
    if (lasts <= silence) continue;
    silence = lasts;
    rank = each;
  }
  if (silence < warned_silence_ns_) warned_silence_ns_ = 0;
  const StallInspector::Options& stall = engine_.config_.stall;
  const bool stalled = stall.shutdown_ns < engine_.config_.timeout_ns;
  const TimeNs limit = stalled ? stall.shutdown_ns : engine_.config_.timeout_ns;
  const bool over = silence >= limit;
  if (!over && silence < std::max(stall.warning_ns, 2 * warned_silence_ns_)) return;
  const size_t host = static_cast<size_t>(topology_.host_of[static_cast<size_t>(rank)]);
  const std::string text = "rank " + std::to_string(rank) + " on host " + topology_.hosts[host] +
                           (rank == 0 ? ", which coordinates," : "") +
                           " has given no sign of life for " + Seconds(over ? limit : silence) +
                           "; its process may be stopped, or the network cut";
  if (over) {
    const std::string knob = stalled ? "STALL_SHUTDOWN_S" : "TIMEOUT_S";
    return End(Status(stalled ? Code::kStalled : Code::kTransport,
                      text + " (HORORING_" + knob + " sets the limit)", rank));
  }
  warned_silence_ns_ = silence;
  const std::string waits = engine_.tensors_.Titles({"NEGOTIATE"});
  Log(LogLevel::kWarning, "stall: " + (waits.empty() ? "" : waits + " (NEGOTIATE): ") + text);
}

}  // namespace hororing
