#include "schedule/step_planner.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "schedule/bucket_plan.h"

namespace hororing {
namespace {

constexpr size_t kWindow = 5;     // steps that medians are taken over
constexpr int kLostPatience = 3;  // departures in a row that end a plan
constexpr int kInVain = 2;        // waits in a row for one tensor: nothing waits for it again
constexpr double kChange = 0.1;   // of ready times or costs, that makes a plan outdated
// A plan must not be slower than none by more than measurements differ.
constexpr double kSlower = 1.1;
constexpr TimeNs kNoticeable = 50 * kMicrosecond;

double Seconds(TimeNs time) { return static_cast<double>(time) * 1e-9; }

TimeNs Median(std::vector<TimeNs> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::set<uint64_t> Ids(const Step& step) {
  std::set<uint64_t> ids;
  for (const Step::Tensor& tensor : step.tensors) ids.insert(tensor.id);
  return ids;
}

}  // namespace

StepPlanner::StepPlanner(int64_t limit_bytes, TimeNs patience_ns)
    : limit_bytes_(limit_bytes), patience_ns_(patience_ns) {}

TimeNs StepPlanner::Seen::median_ns() const { return Median(ready_ns); }

// How far off a step may be.
TimeNs StepPlanner::Seen::spread_ns() const {
  const auto [least, most] = std::minmax_element(ready_ns.begin(), ready_ns.end());
  return (*most - *least) / 2;
}

void StepPlanner::Learn(const Step& step) {
  departed_in_a_row_ = departed_ ? departed_in_a_row_ + 1 : 0;
  const bool as_planned = !departed_;
  departed_ = false;
  missing_.clear();
  for (const auto& bucket : plan_) missing_.emplace_back(bucket.begin(), bucket.end());
  if (departed_in_a_row_ >= kLostPatience) return Drop(State::kLearning);
  // What is not as the others says nothing about them.
  if (!step.whole || !as_planned || step.tensors.empty()) return;
  if (!steps_.empty() && Ids(steps_.back()) != Ids(step)) BeginWindow();
  steps_.push_back(step);
  if (steps_.size() > kWindow) steps_.pop_front();
  if (steps_.size() < kWindow) return;

  const std::map<uint64_t, Seen> window = Window();
  if (state_ == State::kLearning) {
    if (costs_.sizes() < 2) return;  // no rate yet
    exposed_ns_ = ExposedTime();
    Plan(window);
  } else if (Changed(window)) {
    Drop(State::kLearning);
  } else if (CostsMoved()) {
    // What is exposed without a plan is another time now, too.
    costs_.KeepWindow();
    Drop(State::kLearning);
  } else if (state_ == State::kPlanned && !judged_) {
    judged_ = true;
    const double limit = kSlower * static_cast<double>(exposed_ns_) + kNoticeable;
    if (static_cast<double>(ExposedTime()) > limit) return Drop(State::kRejected);
  }
  BeginWindow();  // they do not overlap: what is an accident in one is not seen in five
}

void StepPlanner::BeginWindow() {
  steps_.clear();
  costs_.BeginWindow();
}

std::map<uint64_t, StepPlanner::Seen> StepPlanner::Window() const {
  std::map<uint64_t, Seen> window;
  for (const Step& step : steps_) {
    for (const Step::Tensor& tensor : step.tensors) {
      window[tensor.id].bytes = tensor.bytes;
      window[tensor.id].ready_ns.push_back(tensor.ready_ns);
    }
  }
  return window;
}

// How long communication goes on after the last tensor is ready.
TimeNs StepPlanner::ExposedTime() const {
  std::vector<TimeNs> exposed;
  for (const Step& step : steps_) {
    TimeNs last = 0;
    for (const Step::Tensor& tensor : step.tensors) last = std::max(last, tensor.ready_ns);
    exposed.push_back(step.end_ns - step.begin_ns - last);
  }
  return Median(exposed);
}

bool StepPlanner::Changed(const std::map<uint64_t, Seen>& window) const {
  if (window.size() != planned_ns_.size()) return true;
  // Of all together, and beyond what steps differ among themselves.
  TimeNs before = 0, change = 0;
  for (const auto& [id, planned] : planned_ns_) {
    const auto now = window.find(id);
    if (now == window.end()) return true;
    before += planned;
    const TimeNs moved = std::abs(now->second.median_ns() - planned);
    change += std::max<TimeNs>(0, moved - now->second.spread_ns());
  }
  const TimeNs tensors = static_cast<TimeNs>(planned_ns_.size());
  return change > kNoticeable * tensors &&
         static_cast<double>(change) > kChange * static_cast<double>(before);
}

// What a batch takes, since the plan was made.
bool StepPlanner::CostsMoved() { return costs_.Moved(&planned_costs_, kWindow) > kChange; }

void StepPlanner::Plan(const std::map<uint64_t, Seen>& window) {
  std::vector<std::pair<TimeNs, uint64_t>> order;
  for (const auto& [id, seen] : window) order.emplace_back(seen.median_ns(), id);
  std::sort(order.begin(), order.end());
  std::vector<PlanItem> items;
  for (const auto& [ready_ns, id] : order) {
    const auto missed = missed_.find(id);
    const bool starts = missed != missed_.end() && missed->second >= kInVain;
    items.push_back({Seconds(ready_ns), window.at(id).bytes, starts});
  }
  planned_costs_ = costs_;
  const CostTable table = costs_.Table();
  const CostLine line = FitLine(table);
  const auto cost = [&](int64_t bytes) { return Interpolate(table, line, bytes); };

  Drop(State::kPlanned);
  latency_ns_ = static_cast<TimeNs>(line.alpha_s * 1e9);
  size_t begin = 0;
  for (const size_t end : PlanBuckets(items, cost, limit_bytes_)) {
    plan_.emplace_back();
    for (size_t i = begin; i < end; ++i) {
      plan_.back().push_back(order[i].second);
      bucket_of_[order[i].second] = plan_.size() - 1;
      planned_ns_[order[i].second] = order[i].first;
    }
    complete_ns_.push_back(order[end - 1].first);
    missing_.emplace_back(plan_.back().begin(), plan_.back().end());
    begin = end;
  }
  ++plans_;
}

// Without a plan from now on. What it rested on is kept while that is to be recognised.
void StepPlanner::Drop(State state) {
  if (state != State::kRejected) planned_ns_.clear();
  state_ = state;
  BeginWindow();
  plan_.clear();
  complete_ns_.clear();
  bucket_of_.clear();
  missing_.clear();
  judged_ = false;
  departed_in_a_row_ = 0;
  ++version_;
}

std::optional<size_t> StepPlanner::BucketOf(uint64_t id) {
  if (departed_) return std::nullopt;
  const auto bucket = bucket_of_.find(id);
  if (bucket == bucket_of_.end() || missing_[bucket->second].erase(id) == 0) return std::nullopt;
  return bucket->second;
}

TimeNs StepPlanner::Deadline(size_t bucket, TimeNs begin_ns, TimeNs idle_ns) const {
  const TimeNs step_ns = complete_ns_.back();
  const TimeNs planned = After(begin_ns, complete_ns_[bucket] + step_ns / 4);
  return After(std::max(planned, idle_ns), patience_ns_ + latency_ns_);
}

// Until the deadline of a step in which that tensor comes as planned.
TimeNs StepPlanner::Wait(size_t bucket) const {
  return Deadline(bucket, 0, 0) - planned_ns_.at(plan_[bucket].front());
}

void StepPlanner::GiveUp(size_t bucket) {
  departed_ = true;
  ++departures_;
  if (departed_in_a_row_ == 0) return;  // a step that was slow once says nothing
  for (const uint64_t id : plan_[bucket]) {
    if (missing_[bucket].count(id) == 0) continue;
    ++missed_[id];  // the first one that was waited for
    break;
  }
}

}  // namespace hororing
