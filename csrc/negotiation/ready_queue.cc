#include "negotiation/ready_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hororing {

ReadyQueue::ReadyQueue(const Options& options)
    : options_(options), fusion_bytes_(options.fusion_bytes), hold_ns_(options.hold_ns) {
  if (!options.tune) return;
  Tuner::Options tune = *options.tune;
  tune.initial = {options.fusion_bytes, options.hold_ns};
  tuner_.emplace(tune);
}

ReadyQueue::Steps* ReadyQueue::StepsOf(int32_t process_set) {
  if (!learns()) return nullptr;
  Steps& steps = steps_[process_set];
  if (options_.plan && steps.planner == nullptr) {
    steps.planner = std::make_unique<StepPlanner>(fusion_bytes_, options_.hold_ns);
  }
  return &steps;
}

void ReadyQueue::Announced(int32_t process_set, uint64_t id, TimeNs when) {
  Steps* steps = StepsOf(process_set);
  if (steps == nullptr) return;
  const std::optional<Step> over = steps->watch.Announced(id, when);
  if (over) Learn(process_set, *steps, *over);
}

void ReadyQueue::Learn(int32_t process_set, Steps& steps, const Step& step) {
  Release(steps);
  if (tuner_ && !tuner_->done()) {
    if (process_set != kWorldSet) return;
    tuner_->Learn(step);
    const Tuner::Setting& now = tuner_->setting();
    fusion_bytes_ = now.fusion_bytes;
    if (now.hold_ns != hold_ns_) {
      Decision tune;
      tune.kind = Decision::Kind::kTune;
      tune.set_details().hold_ns = hold_ns_ = now.hold_ns;
      PushUrgent(std::move(tune));
    }
  } else if (steps.planner != nullptr) {
    steps.planner->set_limit_bytes(fusion_bytes_);
    steps.planner->Learn(step);
    TellPlan(process_set, steps);
  }
}

// Ranks report what shares a bucket together.
void ReadyQueue::TellPlan(int32_t process_set, Steps& steps) {
  if (steps.told == steps.planner->version()) return;
  steps.told = steps.planner->version();
  Decision plan;
  plan.kind = Decision::Kind::kPlan;
  plan.process_set = process_set;
  std::vector<PlannedBucket>& buckets = plan.set_details().plan;
  for (size_t i = 0; i < steps.planner->plan().size(); ++i) {
    buckets.push_back({steps.planner->plan()[i], steps.planner->Wait(i)});
  }
  PushUrgent(std::move(plan));
}

void ReadyQueue::Add(Item item) { ready_.push_back(std::move(item)); }

// What waits for buckets goes by the rule of "ready" from now on.
void ReadyQueue::Release(Steps& steps) {
  for (auto& [bucket, items] : steps.held) {
    held_ -= items.size();
    for (Item& item : items) Add(std::move(item));
  }
  steps.held.clear();
}

void ReadyQueue::PushUrgent(Decision decision) {
  for (auto& [process_set, steps] : steps_) Release(steps);
  Item item;
  item.decision = std::move(decision);
  Add(std::move(item));
}

void ReadyQueue::PushAllreduce(Decision decision, const Ready& ready) {
  Item item;
  item.decision = std::move(decision);
  item.bytes = ready.bytes;
  Steps* steps = StepsOf(item.decision.process_set);
  if (steps == nullptr) return Add(std::move(item));
  steps->watch.Ready(ready.id, ready.bytes, ready.when);
  if (steps->planner == nullptr) return Add(std::move(item));
  const std::optional<size_t> bucket = steps->planner->BucketOf(ready.id);
  if (!bucket) return Add(std::move(item));
  std::vector<Item>& held = steps->held[*bucket];
  held.push_back(std::move(item));
  ++held_;
  if (!steps->planner->Complete(*bucket)) return;
  held_ -= held.size();
  for (Item& each : held) Add(std::move(each));
  steps->held.erase(*bucket);
}

void ReadyQueue::PushRun(int32_t process_set, IdRun run) {
  Item item;
  item.decision.process_set = process_set;
  item.decision.cache_id = run.first;
  item.decision.count = run.count;
  Add(std::move(item));
}

TimeNs ReadyQueue::Steps::deadline() const {
  if (held.empty()) return kForever;
  return planner->Deadline(held.begin()->first, watch.begin_ns(), watch.end_ns());
}

// How many of ready_ go now. REQUIRES: some do.
size_t ReadyQueue::CountToTake() const {
  // All of it, since batches are cut at the threshold later on, by all ranks alike; unless a lower
  // one is being tried, of which only this rank knows.
  if (fusion_bytes_ >= options_.fusion_bytes) return ready_.size();
  size_t count = 1;
  for (int64_t bytes = ready_[0].bytes; count < ready_.size(); ++count) {
    bytes += ready_[count].bytes;
    if (bytes > fusion_bytes_) break;
  }
  return count;
}

std::vector<Decision> ReadyQueue::Take(TimeNs now) {
  for (auto& [process_set, steps] : steps_) {
    if (now < steps.deadline()) continue;
    steps.planner->GiveUp(steps.held.begin()->first);
    Release(steps);
  }
  if (ready_.empty()) return {};
  const size_t count = CountToTake();
  std::vector<Decision> taken;
  taken.reserve(count);
  for (size_t i = 0; i < count; ++i) taken.push_back(std::move(ready_[i].decision));
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
  return taken;
}

TimeNs ReadyQueue::NextDeadline() const {
  TimeNs next = ready_.empty() ? kForever : 0;
  for (const auto& [process_set, steps] : steps_) next = std::min(next, steps.deadline());
  return next;
}

void ReadyQueue::Ran(int32_t process_set, int64_t bytes, TimeNs begin, TimeNs end) {
  const auto steps = steps_.find(process_set);
  if (steps == steps_.end()) return;
  steps->second.watch.Ran(bytes, end);
  if (steps->second.planner == nullptr) return;
  steps->second.planner->Ran(bytes, static_cast<double>(end - begin) * 1e-9);
}

void ReadyQueue::ForgetSet(int32_t process_set) {
  const auto steps = steps_.find(process_set);
  if (steps == steps_.end()) return;
  Release(steps->second);
  if (const StepPlanner* planner = steps->second.planner.get()) {
    forgotten_.version += planner->version() + 1;
    forgotten_.plans += planner->plans();
    forgotten_.departures += planner->departures();
  }
  steps_.erase(steps);
}

std::vector<StepPlanner::Buckets> ReadyQueue::Plans() const {
  std::vector<StepPlanner::Buckets> plans;
  for (const auto& [process_set, steps] : steps_) {
    if (steps.planner != nullptr && !steps.planner->plan().empty()) {
      plans.push_back(steps.planner->plan());
    }
  }
  return plans;
}

ReadyQueue::Counts ReadyQueue::counts() const {
  Counts counts = forgotten_;
  for (const auto& [process_set, steps] : steps_) {
    if (steps.planner == nullptr) continue;
    counts.version += steps.planner->version();
    counts.plans += steps.planner->plans();
    counts.departures += steps.planner->departures();
  }
  return counts;
}

}  // namespace hororing
