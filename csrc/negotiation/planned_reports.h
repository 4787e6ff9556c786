// PlannedReports: what a rank knows of the coordinator's plan (HORORING_FUSION=plan). The tensors
// of a bucket are of no use to the coordinator one by one, so the rank reports them when it has
// them all: a bucket, which is a batch, costs it one report. What does not come, the others wait
// for no longer than the plan says.
//
// Pure: time is an argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "negotiation/messages.h"

namespace hororing {

class PlannedReports {
 public:
  PlannedReports() = default;
  PlannedReports(PlannedReports&&) = default;  // places keep pointing to their buckets
  PlannedReports& operator=(PlannedReports&&) = default;

  // The plan of a process set, instead of the one before; no buckets: there is none. What was added
  // and not reported has to be added again.
  void Learn(int32_t process_set, const std::vector<PlannedBucket>& buckets);
  bool any() const { return !places_.empty(); }

  // Tensor `id` (0: it is not cached) was submitted at `when`, and is not reported yet.
  void Add(uint64_t id, TimeNs when);
  // Everything that was added has been reported.
  void Reported();

  // When what was added is to be reported for the sake of its buckets: 0 where one is complete,
  // kForever where none has any of it.
  TimeNs due() const { return due_ns_; }
  // What of it is in no bucket.
  struct Others {
    size_t count = 0;
    TimeNs first_ns = 0;  // where there are any: when the first was submitted
  };
  const Others& others() const { return others_; }

 private:
  struct Bucket {
    size_t size = 0, here = 0;
    TimeNs wait_ns = 0;
    int64_t round = 1;    // of its tensors; no two ranks, nor buckets, need count alike
    TimeNs first_ns = 0;  // of the round: when its first tensor was submitted
  };
  struct Place {
    int32_t process_set = 0;
    Bucket* bucket = nullptr;
    int64_t round = 0;  // in which the tensor came last
  };

  std::map<int32_t, std::vector<Bucket>> buckets_;  // by process set
  std::unordered_map<uint64_t, Place> places_;      // of tensors
  TimeNs due_ns_ = kForever;
  Others others_;
};

}  // namespace hororing
