// ReadyQueue: decisions on their way into an agreement. What goes now, what waits for others to
// share a batch with, and how long. The rules, each as in docs/scheduling.md:
//
//   ready  what all have reported goes: ranks let requests come together before they report them
//   plan   once the steps are known, an allreduce waits for the others of its bucket, of which
//          ranks hear by a decision (kPlan); a step that departs from the plan goes by the rule
//          above
//   tune   the threshold of batches is tried out and then kept, and so is the hold time, of which
//          ranks hear by a decision (kTune)
//
// Everything but allreduces goes at once, and takes with it whatever is there, so that the order
// of decisions is the order of calls. Nothing waits longer than NextDeadline says.
//
// Sans-IO, as the coordinator that owns it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "negotiation/messages.h"
#include "negotiation/stretches.h"
#include "schedule/step_planner.h"
#include "schedule/step_watch.h"
#include "schedule/tuner.h"

namespace hororing {

class ReadyQueue {
 public:
  struct Options {
    int64_t fusion_bytes = 0;
    TimeNs hold_ns = 0;  // for which ranks let requests come together; what a plan forgives
    bool plan = false;
    std::optional<Tuner::Options> tune;  // its initial setting is the one above
  };
  explicit ReadyQueue(const Options& options);

  // Some rank has reported an allreduce, submitted at `when`; `id` is 0 unless it is cached.
  void Announced(int32_t process_set, uint64_t id, TimeNs when);

  void PushUrgent(Decision decision);
  // What is known of an allreduce.
  struct Ready {
    uint64_t id = 0;  // 0 unless it is cached
    int64_t bytes = 0;
    TimeNs when = 0;  // the last rank submitted it
  };
  void PushAllreduce(Decision decision, const Ready& ready);
  // The same, of cached allreduces. REQUIRES: !learns().
  void PushRun(int32_t process_set, IdRun run);
  // Whether it matters when each allreduce was submitted.
  bool learns() const { return options_.plan || tuner_.has_value(); }
  // What goes into the next agreement; empty: nothing yet.
  std::vector<Decision> Take(TimeNs now);
  bool empty() const { return ready_.empty() && held_ == 0; }
  // When Take has something to give although nothing comes; kForever: never.
  TimeNs NextDeadline() const;

  // A batch of allreduces was carried out on this rank.
  void Ran(int32_t process_set, int64_t bytes, TimeNs begin, TimeNs end);
  // Its decisions are as those of any other set from now on.
  void ForgetSet(int32_t process_set);

  // The buckets of all sets that have a plan, and a number that grows when that changes.
  std::vector<StepPlanner::Buckets> Plans() const;
  struct Counts {
    int64_t version = 0, plans = 0, departures = 0;
  };
  Counts counts() const;
  Tuner* tuner() { return tuner_ ? &*tuner_ : nullptr; }
  int64_t fusion_bytes() const { return fusion_bytes_; }

 private:
  struct Item {
    Decision decision;
    int64_t bytes = 0;  // of a run: not asked for
  };
  // The steps of one process set, where something is learned of them.
  struct Steps {
    StepWatch watch;
    std::unique_ptr<StepPlanner> planner;        // null: no plans
    std::map<size_t, std::vector<Item>> held{};  // by bucket
    int64_t told = 0;                            // version of the plan that ranks have
    TimeNs deadline() const;                     // for the first of `held`; kForever: none
  };

  Steps* StepsOf(int32_t process_set);
  void Learn(int32_t process_set, Steps& steps, const Step& step);
  void TellPlan(int32_t process_set, Steps& steps);
  void Add(Item item);
  void Release(Steps& steps);
  size_t CountToTake() const;

  const Options options_;
  int64_t fusion_bytes_;
  TimeNs hold_ns_;
  std::optional<Tuner> tuner_;
  std::map<int32_t, Steps> steps_;  // by process set
  std::vector<Item> ready_;
  size_t held_ = 0;   // items in all of steps_
  Counts forgotten_;  // of sets that were removed
};

}  // namespace hororing
