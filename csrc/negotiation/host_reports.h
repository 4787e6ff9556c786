// HostReports: combines what the ranks of a host report into one message to the coordinator. Lives
// on the first rank of every host but rank 0's.
//
// What concerns all ranks is decided when all have reported it, so nothing is lost where a report
// waits for the other ranks of the host to say the same. It must arrive in the end, so that stalls
// are seen. What is held goes on as one message
//
//   as soon as every rank of the host has reported some request of it, which rank 0 can use now;
//   as soon as every rank has something held: it says no more until it is answered;
//   at once, where rank 0 may wait for nothing else: a request of another process set, a rank that
//   leaves, everything while a rank of the host has joined;
//   `hold_ns` after the first of it, at the latest.
//
// What each rank has said stays apart, so that the coordinator knows all ranks as without us; what
// several say alike travels once.
//
// Sans-IO: time is an argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "negotiation/messages.h"

namespace hororing {

class HostReports {
 public:
  // `ranks`: of this host.
  HostReports(std::vector<int> ranks, TimeNs hold_ns);
  void set_hold(TimeNs hold_ns) { hold_ns_ = hold_ns; }

  // `of_world`: every request in it concerns all ranks. REQUIRES: `rank` is one of this host.
  void Receive(int rank, const Report& report, bool of_world, TimeNs now);
  // Of what is decided no rank reports more. REQUIRES: every agreement that reaches this host, in
  // order with the reports.
  void Decided(const Agreement& agreement);
  // The message, if it is time for one.
  std::optional<std::string> Take(TimeNs now);
  // When Take has something to do although no report comes; kForever: never.
  TimeNs NextDeadline() const;

 private:
  template <typename Id>
  void Count(std::unordered_map<Id, size_t>& requests, const Id& id);

  const std::vector<int> ranks_;
  TimeNs hold_ns_;
  std::vector<std::optional<Report>> held_;  // by place among `ranks`
  size_t held_count_ = 0;                    // of those that there are
  TimeNs since_ns_ = 0;                      // when the first of them came
  bool goes_ = false;                        // at once
  // By how many ranks requests have been reported, while that is not all of them.
  std::unordered_map<uint64_t, size_t> cached_;
  std::unordered_map<std::string, size_t> fresh_;
  std::string join_;  // by its key; empty: no rank of this host has joined
};

}  // namespace hororing
