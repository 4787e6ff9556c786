// Loop: how it handles a negotiation without progress. The engine of a computing rank still
// answers; a rank without signs of life is stopped, or its network is cut.
#include <algorithm>
#include <string>

#include "base/log.h"
#include "base/recorder.h"
#include "engine/loop.h"
#include "negotiation/codec.h"

namespace hororing {
namespace {

// Answers usually arrive sooner.
constexpr TimeNs kReplyGrace = kSecond / 2;
// A rank that is asked for its status also waits for its main thread.
constexpr TimeNs kStatusTimeout = 2 * kSecond;

}  // namespace

// Runs with the periodic checks. Rank 0 checks its own missing ranks in Loop::Decide.
void Loop::CheckForReply(TimeNs now) {
  const bool waits = left_ || shared_.stats.submitted.load() != shared_.stats.completed.load();
  if (!waits || applied_ != answered_) {
    answered_ = applied_;
    waits_since_ns_ = now;
  }
  if (now - waits_since_ns_ < kReplyGrace) return;
  const bool due = shared_.config.stall.deadlock_ns != kForever && now >= next_blocked_ns_;
  if (due && mailbox_.waiting.load() + mailbox_.awaiting_any.load() > 0) {
    next_blocked_ns_ = After(now, Blocked::kInterval);
    Report report;
    report.applied = applied_;
    report.blocked = true;
    SendReport(report, now);
  }
  if (coordinator_) return;
  CheckLiveness({{parent_rank(), waits_since_ns_}, {0, waits_since_ns_}}, now);
}

// `awaited`: the ranks that this rank waits for, and since when. Silence counts only from the
// beginning of the wait.
void Loop::CheckLiveness(const std::map<int, TimeNs>& awaited, TimeNs now) {
  int rank = -1;
  TimeNs silence = 0;
  for (const auto& [each, since] : awaited) {
    if (each == topology_.rank || now - since < kReplyGrace) continue;
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

// The warning waits for the answers, so that it is a single log record.
void Loop::AskForStatus(const StallInspector::Finding& stall, TimeNs now) {
  if (asked_) Warn(true);
  asked_ = {stall, After(now, kStatusTimeout), {}};
  size_t asked = 0;
  for (const auto& [rank, title] : stall.expected) {
    if (asked++ == StallInspector::kMaxAsked) break;
    if (rank == topology_.rank) {
      asked_->texts[rank] = DescribeActivity(kReplyGrace);
    } else {
      Post(rank, EncodeStatus(""));
    }
  }
}

void Loop::OnStatusMessage(int rank, const std::string& text) {
  if (text.empty()) return Post(rank, EncodeStatus(DescribeActivity(kReplyGrace)));
  if (asked_) asked_->texts[rank] = text;
}

// Logs the warning once all ranks that were asked have answered, or at once if `now`.
void Loop::Warn(bool now) {
  const StallInspector::Finding& stall = asked_->stall;
  const size_t asked = std::min(stall.expected.size(), StallInspector::kMaxAsked);
  if (!now && asked_->texts.size() < asked) return;
  const auto host = [this](int rank) {
    return topology_.hosts[static_cast<size_t>(topology_.host_of[static_cast<size_t>(rank)])];
  };
  Log(LogLevel::kWarning,
      "stall: " + stall.warning + StallInspector::StatusText(stall.expected, asked_->texts, host));
  asked_.reset();
}

}  // namespace hororing
