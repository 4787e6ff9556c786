// StallInspector: finds requests that some ranks have made and others have been missing for too
// long. Pure: takes the time as an argument and returns texts.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace hororing {

// A request that waits for some rank.
struct Waiting {
  std::string name;
  std::string title;           // Request::Title
  TimeNs since_ns = 0;         // first report
  std::vector<int> submitted;  // ranks, ascending
  std::vector<int> missing;
  bool never_stalls = false;  // a join, which may take any time
};

// Since when a rank has kept reporting a blocked caller. Cleared when a request of it is decided.
class Blocked {
 public:
  void OnReport(bool blocked, TimeNs now) {
    if (!blocked || now > expires_ns_) since_ns_ = now;
    last_ns_ = now;
    expires_ns_ = blocked ? After(now, 3 * kInterval) : 0;
  }
  // How long the rank has been blocked; -kForever if it does not report so, or no longer.
  TimeNs Elapsed(TimeNs now) const { return now <= expires_ns_ ? last_ns_ - since_ns_ : -kForever; }
  static constexpr TimeNs kInterval = kSecond;  // Time between two such reports.

 private:
  TimeNs since_ns_ = 0, last_ns_ = 0, expires_ns_ = 0;
};

class StallInspector {
 public:
  struct Options {
    TimeNs warning_ns = kForever;
    TimeNs shutdown_ns = kForever;
    TimeNs deadlock_ns = kForever;  // for Blocked::Elapsed
  };
  explicit StallInspector(const Options& options);

  struct Finding {
    std::string warning;            // empty: nothing new
    Status abort;                   // kStalled: fail the job
    std::map<int, TimeNs> missing;  // ranks that others wait for, and since when
    // With a warning: the next request that is expected from each missing rank.
    std::map<int, std::string> expected;
  };
  // Call every `interval_ns` while anything waits. Warns about each request after the warning time,
  // then at doubling intervals: a long validation phase does not flood the log. `stuck`, per rank:
  // it has joined, or its callers have been blocked for the deadlock time. If only such ranks wait
  // for one another, that is a deadlock, which fails the job, too. If it will be so within another
  // warning time (`soon`), there is no warning: the failure says it.
  Finding Inspect(const std::vector<Waiting>& waiting, const std::vector<char>& stuck,
                  const std::vector<char>& soon, TimeNs now);

  // The largest number of ranks that are asked for their status.
  static constexpr size_t kMaxAsked = 4;
  // The part of a warning that quotes the ranks in `expected` that have said what they are doing.
  static std::string StatusText(const std::map<int, std::string>& expected,
                                const std::map<int, std::string>& said,
                                const std::function<std::string(int)>& host_of);

  const TimeNs interval_ns;

 private:
  // A title occurs in every step; `since_ns` tells its requests apart.
  struct Known {
    TimeNs since_ns, next_warning_ns;
  };

  const Options options_;
  std::unordered_map<std::string, Known> known_;  // by title
};

}  // namespace hororing
