// ReportPace: when the loop reports what callers have submitted, while nobody waits for it.
//
// A message for each would cost a hundred times the request, and be of no use: what one rank says
// counts when all others have said the same. So a rank lets requests come together before it
// reports them, and says no more until it is answered: a batch costs it one report, whatever the
// number of tensors (ADR 34). The first after a silence wait only a moment, in which it shows
// whether they are a burst.
//
// Pure: time is an argument.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/clock.h"

namespace hororing {

class ReportPace {
 public:
  // `cycle_time_ns`: from one report to the next.
  explicit ReportPace(TimeNs cycle_time_ns) : cycle_time_ns_(cycle_time_ns) {}
  // From the next report on.
  void set_cycle_time(TimeNs cycle_time_ns) { cycle_time_ns_ = cycle_time_ns; }

  // When `count` requests, the first of which was submitted at `first`, are to be reported.
  TimeNs Due(TimeNs first, size_t count, TimeNs now) const {
    if (unanswered()) return unanswered_until_ns_;
    const bool burst = count > 1 && now - first <= static_cast<TimeNs>(count) * kClosely;
    return std::max(next_ns_, After(first, burst ? cycle_time_ns_ : cycle_time_ns_ / kMoment));
  }

  // What was there has been reported; not by a message, on rank 0.
  void Reported(TimeNs now) { next_ns_ = After(now, cycle_time_ns_); }
  // By a message.
  void Told(TimeNs now) {
    Reported(now);
    unanswered_until_ns_ = After(now, kPatience * cycle_time_ns_);
  }
  // An agreement has come.
  void Answered() { unanswered_until_ns_ = 0; }
  bool unanswered() const { return unanswered_until_ns_ != 0; }

  // In terms of cycle_time_ns. Others may not have what this rank has reported, but wait for what
  // it has not reported yet: silence must end without an answer.
  static constexpr TimeNs kPatience = 8;

 private:
  // Of cycle_time_ns, for the first requests.
  static constexpr TimeNs kMoment = 8;
  // Between requests of a burst, on average: a framework's call for one takes a microsecond or
  // three, and computes nothing worth the name before the next.
  static constexpr TimeNs kClosely = 8 * kMicrosecond;

  TimeNs cycle_time_ns_;
  TimeNs next_ns_ = 0;
  TimeNs unanswered_until_ns_ = 0;  // 0: answered
};

}  // namespace hororing
