// Loop: what it does when negotiation makes no progress. The engine of a rank that computes still
// answers; a rank that gives no sign of life is stopped, or its network is cut.
#include <algorithm>
#include <string>

#include "base/log.h"
#include "base/recorder.h"
#include "engine/loop.h"
#include "negotiation/codec.h"

namespace hororing {
namespace {

// Answers usually come sooner.
constexpr TimeNs kMoment = kSecond / 2;
// A rank that is asked for its status also waits for its main thread.
constexpr TimeNs kAnswer = 2 * kSecond;

}  // namespace

// Runs with the periodic checks. Rank 0 checks its own missing ranks in Decide().
void Loop::CheckForReply(TimeNs now) {
  const bool waits = left_ || shared_.stats.submitted.load() != shared_.stats.completed.load();
  if (!waits || applied_ != answered_) {
    answered_ = applied_;
    waits_since_ns_ = now;
  }
  if (now - waits_since_ns_ < kMoment) return;
  const bool says = shared_.config.stall.deadlock_ns != kForever && now >= next_blocked_ns_;
  if (says && mailbox_.waiting.load() + mailbox_.awaiting_any.load() > 0) {
    next_blocked_ns_ = After(now, Blocked::kInterval);
    struct Report report;
    report.applied = applied_;
    report.blocked = true;
    Tell(report, now);
  }
  if (coordinator_) return;
  CheckLiveness({{parent_rank(), waits_since_ns_}, {0, waits_since_ns_}}, now);
}

// `awaited`: ranks that this rank waits for, and since when. Silence counts only from the time we
// started to wait for the rank.
void Loop::CheckLiveness(const std::map<int, TimeNs>& awaited, TimeNs now) {
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
  const StallInspector::Options& stall = shared_.config.stall;
  const bool stalled = stall.shutdown_ns < shared_.config.timeout_ns;
  const TimeNs limit = stalled ? stall.shutdown_ns : shared_.config.timeout_ns;
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
  const std::string waits = shared_.tensors.Titles({"NEGOTIATE"});
  Log(LogLevel::kWarning, "stall: " + (waits.empty() ? "" : waits + " (NEGOTIATE): ") + text);
}

// The warning waits for the answers, so that everything is one record of the log.
void Loop::AskForStatus(const StallInspector::Finding& stall, TimeNs now) {
  if (asked_) Warn(true);
  asked_ = {stall, After(now, kAnswer), {}};
  size_t asked = 0;
  for (const auto& [rank, title] : stall.expected) {
    if (asked++ == StallInspector::kMostAsked) break;
    if (rank == topology_.rank) {
      asked_->said[rank] = WhatIsDoneHere(kMoment);
    } else {
      Post(rank, EncodeDoing(""));
    }
  }
}

void Loop::OnStatusMessage(int rank, const std::string& text) {
  if (text.empty()) return Post(rank, EncodeDoing(WhatIsDoneHere(kMoment)));
  if (asked_) asked_->said[rank] = text;
}

// Logs the warning once all ranks that were asked have answered, or at once if `now`.
void Loop::Warn(bool now) {
  const StallInspector::Finding& stall = asked_->stall;
  const size_t asked = std::min(stall.expected.size(), StallInspector::kMostAsked);
  if (!now && asked_->said.size() < asked) return;
  const auto host = [this](int rank) {
    return topology_.hosts[static_cast<size_t>(topology_.host_of[static_cast<size_t>(rank)])];
  };
  Log(LogLevel::kWarning,
      "stall: " + stall.warning + StallInspector::StatusText(stall.expected, asked_->said, host));
  asked_.reset();
}

}  // namespace hororing
