// StepPlanner: learns when the tensors of a step become ready and what batches cost, plans the
// buckets, and says which tensor waits for which bucket. One per process set, on rank 0.
//
//   learning  --a few equal steps, batches of two sizes-->  planned
//   planned   --slower than without, as measured-->         rejected
//   planned, rejected  --ready times or costs change by a tenth, or other tensors-->  learning
//
// A step departs from its plan when a bucket is not complete in time: it is given up, and the rest
// of the step goes as without a plan. Three such steps in a row end the plan.
//
// Pure: time is an argument. See docs/scheduling.md.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "schedule/cost_model.h"
#include "schedule/step_watch.h"

namespace hororing {

class StepPlanner {
 public:
  // Ids in order of readiness.
  using Buckets = std::vector<std::vector<uint64_t>>;

  // limit_bytes: the most in a bucket. patience_ns: how much later than planned a bucket may
  // be complete, beyond a quarter of the step and a message.
  StepPlanner(int64_t limit_bytes, TimeNs patience_ns);

  // A step is over: learns from it, and prepares for the next one.
  void Learn(const Step& step);
  void Ran(int64_t bytes, double seconds) { costs_.Add(bytes, seconds); }
  void set_limit_bytes(int64_t limit_bytes) { limit_bytes_ = limit_bytes; }

  // The bucket that `id`, ready now, waits for; nothing: it need not wait.
  std::optional<size_t> BucketOf(uint64_t id);
  bool Complete(size_t bucket) const { return missing_[bucket].empty(); }
  // Until when `bucket` may be waited for, in a step that began at `begin_ns`; `idle_ns`: since
  // when reports can arrive, which they cannot while a batch is under way.
  TimeNs Deadline(size_t bucket, TimeNs begin_ns, TimeNs idle_ns) const;
  // How long, from the first tensor of `bucket` that a rank has on, it may wait for the rest.
  TimeNs Wait(size_t bucket) const;
  // The step departs, since `bucket` was not complete.
  void GiveUp(size_t bucket);

  const Buckets& plan() const { return plan_; }
  int64_t version() const { return version_; }  // grows whenever the plan changes
  int64_t plans() const { return plans_; }
  int64_t departures() const { return departures_; }

 private:
  enum class State { kLearning, kPlanned, kRejected };

  struct Seen {  // of a tensor, in the window
    int64_t bytes = 0;
    std::vector<TimeNs> ready_ns;
    TimeNs median_ns() const;
    TimeNs spread_ns() const;
  };
  std::map<uint64_t, Seen> Window() const;
  bool Changed(const std::map<uint64_t, Seen>& window) const;
  bool CostsMoved();
  TimeNs ExposedTime() const;
  void Plan(const std::map<uint64_t, Seen>& window);
  void Drop(State state);
  void BeginWindow();

  int64_t limit_bytes_;
  const TimeNs patience_ns_;
  CostModel costs_;
  CostModel planned_costs_;  // that the plan rests on
  State state_ = State::kLearning;
  std::deque<Step> steps_;          // the latest; equal in their tensors
  TimeNs exposed_ns_ = 0;           // without a plan
  bool judged_ = false;             // whether the plan was compared with that
  std::map<uint64_t, int> missed_;  // how often a bucket was given up for want of a tensor

  Buckets plan_;
  TimeNs latency_ns_ = 0;                  // of a batch, as the costs tell
  std::vector<TimeNs> complete_ns_;        // when each bucket should be, from the step's begin
  std::map<uint64_t, TimeNs> planned_ns_;  // ready times that the plan rests on
  std::unordered_map<uint64_t, size_t> bucket_of_;
  int64_t version_ = 0, plans_ = 0, departures_ = 0;

  // Of the step under way.
  std::vector<std::set<uint64_t>> missing_;  // by bucket
  bool departed_ = false;
  int departed_in_a_row_ = 0;
};

}  // namespace hororing
