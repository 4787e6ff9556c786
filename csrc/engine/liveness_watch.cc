#include "engine/liveness_watch.h"

#include <algorithm>

#include "base/log.h"
#include "base/recorder.h"
#include "negotiation/codec.h"

namespace hororing {
// Answers usually arrive sooner.
constexpr TimeNs kReplyGrace = kSecond / 2;
// A rank that is asked for its status also waits for its main thread.
constexpr TimeNs kStatusTimeout = 2 * kSecond;

bool LivenessWatch::WaitsLong(bool waits, uint64_t applied, TimeNs now) {
  if (!waits || applied != answered_) {
    answered_ = applied;
    waits_since_ns_ = now;
  }
  return now - waits_since_ns_ >= kReplyGrace;
}

bool LivenessWatch::MustReportBlocked(TimeNs now) {
  const bool due = shared_.config.stall.deadlock_ns != kForever && now >= next_blocked_ns_;
  if (!due || shared_.mailbox.waiting.load() + shared_.mailbox.awaiting_any.load() == 0) {
    return false;
  }
  next_blocked_ns_ = After(now, Blocked::kInterval);
  return true;
}

Status LivenessWatch::Check(const std::map<int, TimeNs>& awaited, TimeNs now) {
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
  if (!over && silence < std::max(stall.warning_ns, 2 * warned_silence_ns_)) return Status::Ok();
  const std::string text = "rank " + std::to_string(rank) + " on host " + HostOf(rank) +
                           (rank == 0 ? ", which coordinates," : "") +
                           " has given no sign of life for " + Seconds(over ? limit : silence) +
                           "; its process may be stopped, or the network cut";
  if (over) {
    const std::string knob = stalled ? "STALL_SHUTDOWN_S" : "TIMEOUT_S";
    return Status(stalled ? Code::kStalled : Code::kTransport,
                  text + " (HORORING_" + knob + " sets the limit)", rank);
  }
  warned_silence_ns_ = silence;
  const std::string waits = shared_.tensors.Titles({"NEGOTIATE"});
  Log(LogLevel::kWarning, "stall: " + (waits.empty() ? "" : waits + ": ") + text);
  return Status::Ok();
}

void LivenessWatch::Send(int rank, const std::string& text) {
  transport_.Post(rank, EncodeStatus(text));
  ++shared_.stats.control_messages_sent;
}

void LivenessWatch::Ask(const StallInspector::Finding& stall, TimeNs now) {
  Warn(now, /*at_once=*/true);
  asked_ = {stall, After(now, kStatusTimeout), {}};
  size_t asked = 0;
  for (const auto& [rank, title] : stall.expected) {
    if (asked++ == StallInspector::kMaxAsked) break;
    if (rank == topology_.rank) {
      asked_->texts[rank] = DescribeActivity(kReplyGrace);
    } else {
      Send(rank, "");
    }
  }
}

void LivenessWatch::OnStatusMessage(int rank, const std::string& text) {
  if (text.empty()) return Send(rank, DescribeActivity(kReplyGrace));
  if (asked_) asked_->texts[rank] = text;
}

void LivenessWatch::Warn(TimeNs now, bool at_once) {
  if (!asked_) return;
  const StallInspector::Finding& stall = asked_->stall;
  const size_t asked = std::min(stall.expected.size(), StallInspector::kMaxAsked);
  if (!at_once && now < asked_->deadline && asked_->texts.size() < asked) return;
  const auto host = [this](int rank) { return HostOf(rank); };
  Log(LogLevel::kWarning,
      "stall: " + stall.warning + StallInspector::StatusText(stall.expected, asked_->texts, host));
  asked_.reset();
}

}  // namespace hororing
