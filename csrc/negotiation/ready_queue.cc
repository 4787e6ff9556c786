#include "negotiation/ready_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hororing {
namespace {

// What goes at once where something of a higher priority may come while it is under way. Half a
// batch of this is what that waits for on average; each batch costs a latency.
constexpr int64_t kOvertakableBytes = 1 << 20;

}  // namespace

ReadyQueue::ReadyQueue(const Options& options)
    : options_(options),
      fusion_bytes_(options.fusion_bytes),
      hold_ns_(options.hold_ns),
      tuning_(options.tuning) {
  if (!options.tune) return;
  Tuner::Options tune = *options.tune;
  tune.initial = {options.fusion_bytes, options.hold_ns, options.tuning};
  tuner_.emplace(tune);
}

ReadyQueue::Steps* ReadyQueue::StepsOf(int32_t process_set) {
  if (!options_.plan && !tuner_) return nullptr;
  Steps& steps = steps_[process_set];
  if (options_.plan && steps.planner == nullptr) {
    steps.planner = std::make_unique<StepPlanner>(fusion_bytes_, options_.hold_ns);
  }
  return &steps;
}

void ReadyQueue::Announced(int32_t process_set, uint64_t id, TimeNs when) {
  ++expected_[process_set];
  Steps* steps = StepsOf(process_set);
  if (steps == nullptr) return;
  const std::optional<Step> over = steps->watch.Announced(id, when);
  if (over) Learn(process_set, *steps, *over);
}

void ReadyQueue::Learn(int32_t process_set, Steps& steps, const Step& step) {
  Release(steps, step.end_ns);
  if (tuner_ && !tuner_->done()) {
    if (process_set != kWorldSet) return;
    tuner_->Learn(step);
    fusion_bytes_ = tuner_->setting().fusion_bytes;
    hold_ns_ = tuner_->setting().hold_ns;
    if (!(tuner_->setting().tuning == tuning_)) {
      Decision tune;
      tune.kind = Decision::Kind::kTune;
      tune.set_details().tuning = tuning_ = tuner_->setting().tuning;
      PushUrgent(std::move(tune), step.end_ns);
    }
  } else if (steps.planner != nullptr) {
    steps.planner->set_limit_bytes(fusion_bytes_);
    steps.planner->Learn(step);
  }
}

void ReadyQueue::Withdrawn(int32_t process_set) {
  const auto expected = expected_.find(process_set);
  if (--expected->second == 0) expected_.erase(expected);
}

void ReadyQueue::Add(Item item, TimeNs now) {
  if (ready_.empty()) ready_since_ns_ = now;
  ready_bytes_ += item.bytes;
  ready_.push_back(std::move(item));
}

// What waits for buckets goes by the rule of "ready" from now on.
void ReadyQueue::Release(Steps& steps, TimeNs now) {
  for (auto& [bucket, items] : steps.held) {
    held_ -= items.size();
    for (Item& item : items) Add(std::move(item), now);
  }
  steps.held.clear();
}

void ReadyQueue::PushUrgent(Decision decision, TimeNs now) {
  for (auto& [process_set, steps] : steps_) Release(steps, now);
  Item item;
  item.decision = std::move(decision);
  item.urgent = true;
  Add(std::move(item), now);
  go_ = true;
}

void ReadyQueue::PushAllreduce(Decision decision, const Ready& ready, TimeNs now) {
  Item item;
  item.decision = std::move(decision);
  item.bytes = ready.bytes;
  item.priority = ready.priority;
  Steps* steps = StepsOf(item.decision.process_set);
  if (steps == nullptr) return Add(std::move(item), now);
  steps->watch.Ready(ready.id, ready.bytes, ready.when);
  if (steps->planner == nullptr) return Add(std::move(item), now);
  const std::optional<size_t> bucket = steps->planner->BucketOf(ready.id);
  if (!bucket) return Add(std::move(item), now);
  std::vector<Item>& held = steps->held[*bucket];
  held.push_back(std::move(item));
  ++held_;
  if (!steps->planner->Complete(*bucket)) return;
  held_ -= held.size();
  int32_t priority = held[0].priority;
  for (const Item& each : held) priority = std::max(priority, each.priority);
  ++buckets_;
  for (Item& each : held) {
    each.priority = priority;
    each.bucket = buckets_;
    Add(std::move(each), now);
  }
  steps->held.erase(*bucket);
  go_ = true;
}

// Whether nothing is on its way that what is ready could share a batch with.
bool ReadyQueue::BurstIsComplete() const {
  if (expected_.empty()) return true;
  return std::none_of(ready_.begin(), ready_.end(), [this](const Item& item) {
    return expected_.count(item.decision.process_set) != 0;
  });
}

TimeNs ReadyQueue::Steps::deadline() const {
  if (held.empty()) return kForever;
  return planner->Deadline(held.begin()->first, watch.begin_ns(), watch.end_ns());
}

// How many of ready_ go now, which it brings into order. REQUIRES: some do.
size_t ReadyQueue::CountToTake() {
  const bool urgent =
      std::any_of(ready_.begin(), ready_.end(), [](const Item& item) { return item.urgent; });
  const bool differ =
      !urgent && std::any_of(ready_.begin(), ready_.end(), [this](const Item& item) {
        return item.priority != ready_[0].priority;
      });
  if (differ) {
    std::stable_sort(ready_.begin(), ready_.end(),
                     [](const Item& a, const Item& b) { return a.priority > b.priority; });
  }
  // Otherwise all of it, since batches are cut at the threshold later on, by all ranks alike;
  // unless a lower one is being tried, of which only this rank knows.
  const bool cut = differ || fusion_bytes_ < options_.fusion_bytes;
  const int64_t limit = differ ? std::min(fusion_bytes_, kOvertakableBytes) : fusion_bytes_;
  size_t count = 1;
  for (int64_t bytes = ready_[0].bytes; count < ready_.size(); ++count) {
    const Item &item = ready_[count], &before = ready_[count - 1];
    bytes += item.bytes;
    const bool together = differ && item.bucket != 0 && item.bucket == before.bucket;
    if (cut && bytes > limit && !together) break;
  }
  may_be_overtaken_ = differ && count < ready_.size();
  return count;
}

std::vector<Decision> ReadyQueue::Take(TimeNs now) {
  may_be_overtaken_ = false;
  for (auto& [process_set, steps] : steps_) {
    if (now < steps.deadline()) continue;
    steps.planner->GiveUp(steps.held.begin()->first);
    Release(steps, now);
    go_ = true;
  }
  if (ready_.empty()) return {};
  const bool hold = !go_ && ready_bytes_ < fusion_bytes_ &&
                    now < After(ready_since_ns_, hold_ns_) && !BurstIsComplete();
  if (hold) return {};
  const size_t count = CountToTake();
  std::vector<Decision> taken;
  taken.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    ready_bytes_ -= ready_[i].bytes;
    taken.push_back(std::move(ready_[i].decision));
  }
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
  go_ = !ready_.empty();
  return taken;
}

TimeNs ReadyQueue::NextDeadline() const {
  TimeNs next = ready_.empty() ? kForever : go_ ? 0 : After(ready_since_ns_, hold_ns_);
  for (const auto& [process_set, steps] : steps_) next = std::min(next, steps.deadline());
  return next;
}

void ReadyQueue::Ran(int32_t process_set, int64_t bytes, TimeNs begin, TimeNs end) {
  const auto steps = steps_.find(process_set);
  if (steps == steps_.end()) return;
  steps->second.watch.Ran(bytes, end);
  if (tuner_ && process_set == kWorldSet) tuner_->Ran(bytes);
  if (steps->second.planner == nullptr) return;
  steps->second.planner->Ran(bytes, static_cast<double>(end - begin) * 1e-9);
}

void ReadyQueue::ForgetSet(int32_t process_set) {
  const auto steps = steps_.find(process_set);
  if (steps == steps_.end()) return;
  Release(steps->second, ready_since_ns_);
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
