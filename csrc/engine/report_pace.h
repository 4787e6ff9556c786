// ReportPace: how soon the loop looks again at what callers submit, while nobody waits for it.
//
// Whoever submits many requests one by one would wake the loop for each of them, and each would be
// a message to rank 0 that wakes it, too: a hundred times the cost of the request. So once requests
// follow one another closely, the loop lets some come together between two reports. The first of
// them, those that come now and then, and those that somebody waits for are reported at once.
//
// Pure: time is an argument.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/clock.h"

namespace hororing {

class ReportPace {
 public:
  // `count` requests had been submitted since the last report, and are reported at `now`.
  void Reported(size_t count, TimeNs now) {
    const bool closely = now - last_ns_ <= static_cast<TimeNs>(count) * kClosely;
    interval_ns_ = closely ? std::clamp(2 * interval_ns_, kShortest, kLongest) : 0;
    last_ns_ = now;
  }
  // Until then the loop may leave alone what is submitted; in the past: it may not.
  TimeNs next_look_ns() const { return interval_ns_ == 0 ? 0 : last_ns_ + interval_ns_; }

 private:
  // Between requests of a burst, on average: a framework's call for one takes a microsecond or
  // three, and computes nothing worth the name before the next.
  static constexpr TimeNs kClosely = 8 * kMicrosecond;
  // From the time that a message takes through two sleeping loops to a fraction of the time for
  // which the coordinator holds a burst (hold_ns).
  static constexpr TimeNs kShortest = 50 * kMicrosecond, kLongest = 200 * kMicrosecond;

  TimeNs interval_ns_ = 0;
  TimeNs last_ns_ = 0;
};

}  // namespace hororing
