// LongWait: a long wait for peers in the data plane. It finds out which of them give no sign of
// life, logs warnings, and creates the error at the deadline.
//
// Only for the thread that runs the loop.
#pragma once

#include <vector>

#include "transport/transport.h"

namespace hororing {

class LongWait {
 public:
  explicit LongWait(TimeNs begin_ns)
      : since_ns_(begin_ns), next_ns_(After(begin_ns, kFirstCheck)), progressed_ns_(begin_ns) {}

  // Data has moved, but the wait is not over.
  void NoteProgress(TimeNs now) { progressed_ns_ = now; }
  // The time of the latest progress, or of the beginning.
  TimeNs progressed_ns() const { return progressed_ns_; }
  // Call it a few times a second; it is cheap. lagging() lists the ranks that the wait is for.
  template <typename Lagging>
  void Check(Transport& transport, TimeNs now, const Lagging& lagging) {
    if (now < next_ns_) return;
    if (progressed_ns_ > since_ns_) {
      *this = LongWait(progressed_ns_);
    } else {
      HandleDelay(transport, now, lagging());
    }
  }
  // Call it at the deadline. Returns kTransport with the rank to blame.
  Status GiveUp(Transport& transport, const std::vector<int>& lagging);

 private:
  static constexpr TimeNs kFirstCheck = 250 * kMillisecond;

  void HandleDelay(Transport& transport, TimeNs now, const std::vector<int>& lagging);
  std::vector<int> LatePeers(Transport& transport, TimeNs age,
                             const std::vector<int>& lagging) const;

  TimeNs since_ns_;  // without progress
  TimeNs next_ns_;   // when HandleDelay has something to do
  TimeNs warned_ns_ = 0;
  TimeNs progressed_ns_;
};

}  // namespace hororing
