// LongWait: a wait for peers in the data plane that lasts. It finds out who of them gives no sign
// of life, warns of them in time, and makes the error at the deadline.
//
// Loop thread only.
#pragma once

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "base/status.h"
#include "transport/transport.h"

namespace hororing {

class LongWait {
 public:
  explicit LongWait(TimeNs begin_ns) : since_ns_(begin_ns), next_ns_(After(begin_ns, kFirstLook)) {}

  // Something has moved since the last look, though not what is waited for.
  void Moved() { moved_ = true; }
  // A few times a second, for little. lagging() lists the ranks that are waited for, "1, 3".
  template <typename Lagging>
  void Look(Transport& transport, TimeNs now, const Lagging& lagging) {
    if (now < next_ns_) return;
    if (moved_) {
      *this = LongWait(now);
    } else {
      Attend(transport, now, lagging());
    }
  }
  // The deadline has come: kTransport, and the rank that is to blame.
  Status GiveUp(Transport& transport, const std::string& lagging);

 private:
  static constexpr TimeNs kFirstLook = 250 * kMillisecond;

  void Attend(Transport& transport, TimeNs now, const std::string& lagging);
  std::string Culprits(Transport& transport, TimeNs age, const std::string& lagging) const;

  TimeNs since_ns_;  // without progress
  TimeNs next_ns_;   // when Attend has something to do
  TimeNs warned_ns_ = 0;
  bool moved_ = false;
};

}  // namespace hororing
