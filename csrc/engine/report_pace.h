// ReportPace: when the loop reports submitted requests while no caller waits.
//
// A message per request would cost a hundred times the request, and be useless: a request is
// decided only when all ranks have reported it. So a rank collects requests, reports them, and
// waits for an answer before it reports again. A batch costs it one report, whatever the number of
// tensors (ADR 34). The first requests after a pause wait only briefly: they may begin a burst.
//
// Pure: time is an argument.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/clock.h"

namespace hororing {

class ReportPace {
 public:
  // `cycle_time_ns`: the time from one report to the next.
  explicit ReportPace(TimeNs cycle_time_ns)
      : answer_limit_ns_(kUnansweredCycles * cycle_time_ns), cycle_time_ns_(cycle_time_ns) {}
  // Does not change how long a rank waits for an answer.
  void set_cycle_time(TimeNs cycle_time_ns) { cycle_time_ns_ = cycle_time_ns; }

  // Returns when to report `count` requests, the first of which was submitted at `first`.
  TimeNs Due(TimeNs first, size_t count, TimeNs now) const {
    if (unanswered()) return unanswered_until_ns_;
    const bool burst = count > 1 && now - first <= static_cast<TimeNs>(count) * kBurstGap;
    return std::max(next_ns_,
                    After(first, burst ? cycle_time_ns_ : cycle_time_ns_ / kFirstWaitDivisor));
  }

  // Rank 0 passed its report to the coordinator directly.
  void OnLocalReport(TimeNs now) { next_ns_ = After(now, cycle_time_ns_); }
  // This rank sent a report to its parent.
  void OnReportSent(TimeNs now) {
    OnLocalReport(now);
    unanswered_until_ns_ = After(now, answer_limit_ns_);
  }
  // An agreement has arrived.
  void OnAnswer() { unanswered_until_ns_ = 0; }
  bool unanswered() const { return unanswered_until_ns_ != 0; }

  // A rank without an answer reports again after this many of the constructor's cycle times: the
  // other ranks may need what it has not reported yet.
  static constexpr TimeNs kUnansweredCycles = 8;

 private:
  // The first requests wait for the cycle time divided by this.
  static constexpr TimeNs kFirstWaitDivisor = 8;
  // The average time between requests of a burst: a call of a framework takes one to three
  // microseconds, and it computes little before the next one.
  static constexpr TimeNs kBurstGap = 8 * kMicrosecond;

  const TimeNs answer_limit_ns_;
  TimeNs cycle_time_ns_;
  TimeNs next_ns_ = 0;
  TimeNs unanswered_until_ns_ = 0;  // 0: answered
};

}  // namespace hororing
