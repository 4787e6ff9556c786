// ReportPace: how soon the loop looks again at what callers submit, while nobody waits for it.
//
// Whoever submits many requests one by one would wake the loop for each of them, and each would be
// a message to rank 0 that wakes it, too: a hundred times the cost of the request. So once requests
// follow one another closely, the loop lets some come together between two reports. The first of
// them, those that come now and then, and those that somebody waits for are reported at once.
//
// And a rank that has reported something which is not agreed upon yet lets more come together for a
// while: either others are behind, and could not use what it would say, or the coordinator holds
// what it has for more to share a batch with (hold_ns). So how many reports a batch costs does not
// depend on the number of tensors.
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

  // A report has gone to another rank, by whoever runs the loop. The next one comes in time for
  // what is held there.
  void Told(TimeNs now, TimeNs hold_ns) {
    unanswered_until_ns_ = now + (unanswered() ? hold_ns : hold_ns / 2);
  }
  // An agreement has come.
  void Answered() { unanswered_until_ns_ = 0; }
  bool unanswered() const { return unanswered_until_ns_ != 0; }
  // While it is unanswered: when the next report may go all the same.
  TimeNs unanswered_until_ns() const { return unanswered_until_ns_; }

 private:
  // Between requests of a burst, on average: a framework's call for one takes a microsecond or
  // three, and computes nothing worth the name before the next.
  static constexpr TimeNs kClosely = 8 * kMicrosecond;
  // From the time that a message takes through two sleeping loops to a fraction of the time for
  // which the coordinator holds a burst (hold_ns).
  static constexpr TimeNs kShortest = 50 * kMicrosecond, kLongest = 200 * kMicrosecond;

  TimeNs interval_ns_ = 0;
  TimeNs last_ns_ = 0;
  TimeNs unanswered_until_ns_ = 0;
};

}  // namespace hororing
