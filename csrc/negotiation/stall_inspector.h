// StallInspector: finds requests that some ranks have made and others have not made for too long.
// Pure: time is an argument, texts are the result.
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
  bool patient = false;  // a join, which may take any time
};

// Since when a rank has reported, again and again, that one of its callers is blocked. Cleared when
// a request of the rank is decided.
class Blocked {
 public:
  void OnReport(bool blocked, TimeNs now) {
    if (!blocked || now > heard_until_ns_) since_ns_ = now;
    last_ns_ = now;
    heard_until_ns_ = blocked ? After(now, 3 * kInterval) : 0;
  }
  // For how long so far; 0 if it no longer reports so.
  TimeNs Lasts(TimeNs now) const { return now <= heard_until_ns_ ? last_ns_ - since_ns_ : 0; }
  // Time between two such reports.
  static constexpr TimeNs kInterval = kSecond;

 private:
  TimeNs since_ns_ = 0, last_ns_ = 0, heard_until_ns_ = 0;
};

class StallInspector {
 public:
  struct Options {
    TimeNs warning_ns = kForever;
    TimeNs shutdown_ns = kForever;
    TimeNs deadlock_ns = kForever;  // for Blocked::Lasts
  };
  explicit StallInspector(const Options& options) : options_(options) {}

  struct Finding {
    std::string warning;            // empty: nothing new
    Status abort;                   // kStalled: fail the job
    std::map<int, TimeNs> missing;  // ranks that others wait for, and since when
    // With a warning: the next request that is expected from each missing rank.
    std::map<int, std::string> expected;
  };
  // Call every interval_ns() while anything waits. Warns about each request after the warning time,
  // then at intervals that double, so that a long validation phase does not flood the log.
  // `stuck`, per rank: it has joined, or its callers have been blocked for the deadlock time. If
  // only such ranks wait for one another, that is a deadlock, which fails the job, too.
  Finding Inspect(const std::vector<Waiting>& waiting, std::vector<char> stuck, TimeNs now);

  // The number of ranks that are asked for their status.
  static constexpr size_t kMostAsked = 4;
  // The part of a warning that quotes what each of the ranks in `expected` said it is doing, if it
  // answered.
  static std::string StatusText(const std::map<int, std::string>& expected,
                                const std::map<int, std::string>& said,
                                const std::function<std::string(int)>& host_of);

  TimeNs interval_ns() const;

 private:
  // A title repeats in every step; `since_ns` tells its requests apart.
  struct Known {
    TimeNs since_ns, next_warning_ns;
  };

  const Options options_;
  std::unordered_map<std::string, Known> known_;  // by title
};

}  // namespace hororing
