// HostReports: combines what the ranks of a host report into one message to the coordinator. Lives
// on the first rank of every host but rank 0's.
//
// A tensor is decided when all ranks have reported it, so nothing is lost where a report waits for
// those of the same tensor by the other ranks of the host; but what is reported must arrive in the
// end, so that stalls are seen. So reports go on as soon as, of all tensors in them, every rank has
// reported that did so the last time (the first time: that reported the latest new tensor of the
// process set before, or else every rank of the host), or every rank has reported something and
// says no more until it is answered, and `hold_ns` after the first of them at the latest. Process
// sets and ranks that have joined thereby need no care: a wrong guess costs a message or that time
// once.
//
// What each rank has said stays apart, so that the coordinator knows all ranks as without us; what
// several say alike travels once.
//
// Sans-IO: time is an argument.
#pragma once

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

  // REQUIRES: `rank` is one of them.
  void Receive(int rank, const Report& report, TimeNs now);
  // The message, if it is time for one.
  std::optional<std::string> Take(TimeNs now);
  // When Take has something to do although no report comes; kForever: never.
  TimeNs NextDeadline() const;

 private:
  // What has been reported under one id or name.
  struct Tensor {
    std::vector<char> reported;  // by place, since all `usual` had
    std::vector<char> usual;
    size_t missing = 0;  // of `usual`
    bool held = false;   // a report of it is held, and some of `usual` are missing
  };
  // Of one rank, what was not sent yet.
  struct Held {
    bool any = false;
    Report report;
  };

  void Count(Tensor& tensor, size_t place, const Tensor* like);
  bool MoreIsExpected(TimeNs now) const;

  const std::vector<int> ranks_;
  TimeNs hold_ns_;
  std::vector<Held> held_;  // by place among `ranks`
  std::unordered_map<uint64_t, Tensor> cached_;
  std::unordered_map<std::string, Tensor> fresh_;
  std::unordered_map<int32_t, std::string> latest_;  // of fresh_, by process set
  std::vector<Tensor*> incomplete_;                  // those that are held
  size_t waiting_for_ = 0;                           // how many of them are
  size_t held_count_ = 0;                            // ranks of which something is held
  bool urgent_ = false;
  TimeNs since_ns_ = 0;  // of the oldest that is held
};

}  // namespace hororing
