// HostReports: combines the reports of a host's ranks, on its first; not on the coordinator's host.
//
// A request of all ranks is decided when all have reported it, so a report may wait until the other
// ranks of the host report the same. It must arrive eventually, so that stalls are noticed. Held
// reports are sent as one message
//
//   as soon as every rank of the host has reported one of their requests, which rank 0 can use now;
//   as soon as a report of every rank is held: a rank reports no more until it is answered;
//   at once, if rank 0 may be waiting for nothing else: a request of another process set, a rank
//   that leaves, everything while a rank of the host has joined; `longest_ns` after the first of
//   them, at the latest.
//
// The message lists the ranks of each report, so nothing is lost; identical reports are sent once.
//
// Sans-IO: time is an argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "negotiation/messages.h"

namespace hororing {

class HostReports {
 public:
  HostReports(std::vector<int> ranks, TimeNs longest_ns);  // `ranks`: those of this host.

  // `concerns_all`: every request in it concerns all ranks. REQUIRES: `rank` is on this host.
  void Receive(int rank, const Report& report, bool concerns_all, TimeNs now);
  // Ranks do not report a decided request again. REQUIRES: called for every agreement that reaches
  // this host, in order with the reports.
  void Decided(const Agreement& agreement);
  std::optional<std::string> Take(TimeNs now);  // Returns the message, if one is due.
  // When Take has something to do without a new report; kForever: never.
  TimeNs NextDeadline() const { return held_count_ > 0 ? After(since_ns_, longest_ns_) : kForever; }

 private:
  template <typename Id>
  void Count(std::unordered_map<Id, size_t>& requests, const Id& id);

  const std::vector<int> ranks_;
  const TimeNs longest_ns_;
  std::vector<std::optional<Report>> held_;  // by index among `ranks`
  size_t held_count_ = 0;                    // how many are held
  TimeNs since_ns_ = 0;                      // when the first of them arrived
  bool send_now_ = false;                    // send at once
  // The number of ranks that have reported a request, until all have.
  std::unordered_map<uint64_t, size_t> cached_;
  std::unordered_map<std::string, size_t> fresh_;
  std::string join_;  // by its key; empty: no rank of this host has joined
};

}  // namespace hororing
