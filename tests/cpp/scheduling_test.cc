// Rung 1: how the coordinator learns steps, holds tensors for their buckets, lets go of them, and
// tunes; on a clock that is a number, over a network that is a formula.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "negotiation/coordinator.h"
#include "schedule/cost_model.h"

using namespace hororing;

namespace {

using Names = std::vector<std::string>;

Request Allreduce(const std::string& name, int64_t bytes, int32_t process_set = kWorldSet) {
  Request request;
  request.name = name;
  request.process_set = process_set;
  request.tensors = {{DataType::kUint8, {bytes}}};
  return request;
}

Report Fresh(const Request& request) {
  Report report;
  report.fresh = {request};
  return report;
}

struct Submission {
  TimeNs at = 0;  // from the begin of the step, or from the end of `after`
  std::string name;
  int64_t bytes = 1000;
  std::string after{};  // a tensor that the caller waits for before it submits this one
  int32_t process_set = kWorldSet;
};

// Ranks, coordinator and network. Batches run one after another; nothing is received meanwhile,
// as in the loop.
class World {
 public:
  World(const Coordinator::Options& options, CostLine network)
      : cost(network), size_(options.size), coordinator(options) {}

  // One step: all ranks submit the same, rank r `skew` * r later. Returns when the last batch
  // was done, from the begin of the step.
  TimeNs Play(std::vector<Submission> waiting, TimeNs skew = 0) {
    batches.clear();
    const TimeNs begin = now;
    std::map<std::string, TimeNs> done;
    std::map<std::string, int> reported;  // by how many ranks
    const size_t all = waiting.size();
    const TimeNs patience = now + 3600 * kSecond;
    while (done.size() < all && now < patience) {
      TimeNs next = kForever;
      for (const Submission& each : waiting) {
        TimeNs at = begin + each.at;
        if (!each.after.empty()) {
          if (done.count(each.after) == 0) continue;
          at = done[each.after] + each.at;
        }
        int& ranks = reported[each.name];
        for (; ranks < members(each.process_set) && at + skew * ranks <= now; ++ranks) {
          Send(each, ranks, now - at - skew * ranks);
        }
        if (ranks < members(each.process_set)) next = std::min(next, at + skew * ranks);
      }
      std::vector<Agreement> agreed;
      while (auto agreement = coordinator.Decide(now)) agreed.push_back(std::move(*agreement));
      for (const Agreement& agreement : agreed) Run(agreement, waiting, &done);
      if (agreed.empty()) now = std::min(next, coordinator.NextDeadline());
    }
    CHECK(done.size() == all);
    return now - begin;
  }

  // Steps that follow one another as a training loop's do.
  TimeNs Play(int steps, const std::vector<Submission>& submissions) {
    TimeNs last = 0;
    for (int i = 0; i < steps; ++i) {
      last = Play(submissions);
      now += kMillisecond;
    }
    return last;
  }

  std::vector<Names> batches;  // of the latest step, as they were agreed
  CostLine cost;
  TimeNs now = kSecond;

 private:
  int members(int32_t process_set) const { return process_set == kWorldSet ? size_ : 2; }

  void Send(const Submission& each, int rank, TimeNs age) {
    const auto id = ids_.find(each.name);
    Report report;
    if (id != ids_.end()) {
      report.cached = {id->second};
      report.ages_us = {age / kMicrosecond};
    } else {
      report.fresh = {Allreduce(each.name, each.bytes, each.process_set)};
    }
    coordinator.Receive(rank, report, now);
  }

  void Run(const Agreement& agreement, const std::vector<Submission>& submitted,
           std::map<std::string, TimeNs>* done) {
    batches.emplace_back();
    int64_t bytes = 0;
    int32_t process_set = kWorldSet;
    for (const Decision& decision : agreement.decisions) {
      if (!decision.name.empty() && decision.cache_id != 0) {
        ids_[decision.name] = decision.cache_id;
        names_[decision.cache_id] = decision.name;
      }
      const std::string name = decision.name.empty() ? names_[decision.cache_id] : decision.name;
      batches.back().push_back(name);
      for (const Submission& each : submitted) {
        if (each.name != name) continue;
        bytes += each.bytes;
        process_set = each.process_set;
      }
    }
    const TimeNs begin = now;
    now += static_cast<TimeNs>(cost(bytes) * 1e9);
    coordinator.Ran(process_set, bytes, begin, now);
    for (const std::string& name : batches.back()) (*done)[name] = now;
  }

  const int size_;
  std::map<std::string, uint64_t> ids_;
  std::map<uint64_t, std::string> names_;

 public:
  Coordinator coordinator;
};

Coordinator::Options Planning(int size = 2) {
  Coordinator::Options options;
  options.size = size;
  options.cache_capacity = 1000;
  options.queue.fusion_bytes = 64 << 20;
  options.queue.hold_ns = kMillisecond;
  options.queue.plan = true;
  return options;
}

// `count` tensors, one each `gap`.
std::vector<Submission> Layers(int count, TimeNs gap, int64_t bytes = 1000) {
  std::vector<Submission> layers;
  for (int i = 0; i < count; ++i) layers.push_back({i * gap, "layer" + std::to_string(i), bytes});
  return layers;
}

constexpr CostLine kSlowNetwork{4e-3, 1e-8};
constexpr int kEnough = 12;  // steps to cache, to recognise and to learn

}  // namespace

TEST(after_a_few_steps_batches_are_the_buckets_of_the_plan) {
  World world(Planning(), kSlowNetwork);
  const std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  CHECK(world.coordinator.Plan().empty());
  world.Play(kEnough, step);
  const std::vector<Names> plan = world.coordinator.Plan();
  CHECK(plan.size() > 1 && plan.size() < step.size());
  CHECK(world.batches == plan);
  CHECK_EQ(world.coordinator.queue().counts().plans, int64_t{1});
  CHECK_EQ(world.coordinator.queue().counts().departures, int64_t{0});
}

TEST(without_the_knob_nothing_is_planned) {
  Coordinator::Options options = Planning();
  options.queue.plan = false;
  World world(options, kSlowNetwork);
  world.Play(30, Layers(20, kMillisecond));
  CHECK(world.coordinator.Plan().empty());
  CHECK_EQ(world.coordinator.queue().counts().version, int64_t{0});
}

TEST(planned_steps_end_no_later_than_unplanned_ones) {
  std::mt19937 random(hororing_test::Seed());
  double gain = 0;
  for (int round = 0; round < 30; ++round) {
    const CostLine cost{static_cast<double>(random() % 8000) * 1e-6,
                        static_cast<double>(random() % 100) * 1e-10};
    std::vector<Submission> step;
    TimeNs at = 0;
    for (int i = 0; i < 40; ++i) {
      at += static_cast<TimeNs>(random() % 2000) * kMicrosecond;
      step.push_back({at, "t" + std::to_string(i), static_cast<int64_t>(random() % 500000)});
    }
    Coordinator::Options options = Planning();
    World planned(options, cost);
    options.queue.plan = false;
    World ready(options, cost);
    const double with = static_cast<double>(planned.Play(2 * kEnough, step));
    const double without = static_cast<double>(ready.Play(2 * kEnough, step));
    const double exposed = without - static_cast<double>(at);
    // What the judgement of a plan tolerates.
    CHECK(with <= without + 0.1 * exposed + 60e3);
    gain += (without - with) / exposed / 30;
  }
  std::printf("  exposed communication: %.0f %% less\n", 100 * gain);
  CHECK(gain > 0);
}

TEST(a_tensor_that_does_not_come_is_waited_for_a_little_and_then_no_more) {
  World world(Planning(), kSlowNetwork);
  std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  const TimeNs usual = world.Play(kEnough, step);
  CHECK(!world.coordinator.Plan().empty());
  step.erase(step.begin() + 7);
  // Nothing depends on it: the rest comes to an end, soon.
  const TimeNs first = world.Play(1, step);
  CHECK(first <= usual + 20 * kMillisecond);
  CHECK_EQ(world.coordinator.queue().counts().departures, int64_t{1});
  // If it never comes again, the others get a plan without it.
  world.Play(2 * kEnough, step);
  size_t planned = 0;
  for (const Names& bucket : world.coordinator.Plan()) planned += bucket.size();
  CHECK_EQ(planned, step.size());
}

TEST(a_step_that_was_slow_once_departs_once) {
  World world(Planning(), kSlowNetwork);
  std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  world.Play(kEnough, step);
  const std::vector<Names> plan = world.coordinator.Plan();
  std::vector<Submission> slow = step;
  for (Submission& each : slow) each.at *= 10;
  world.Play(1, slow);
  CHECK_EQ(world.coordinator.queue().counts().departures, int64_t{1});
  world.Play(2, step);
  CHECK_EQ(world.coordinator.queue().counts().departures, int64_t{1});
  CHECK(world.coordinator.Plan() == plan);
  CHECK(world.batches == plan);
}

TEST(a_tensor_that_is_in_no_bucket_goes_as_without_a_plan) {
  World world(Planning(), kSlowNetwork);
  std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  world.Play(kEnough, step);
  const std::vector<Names> plan = world.coordinator.Plan();
  step.push_back({25 * kMillisecond, "metric", 8, "layer19"});
  world.Play(3, step);
  CHECK(world.coordinator.Plan() == plan);
  CHECK(world.batches.back() == Names{"metric"});
  CHECK_EQ(world.coordinator.queue().counts().departures, int64_t{0});
}

// The caller waits for each before it submits the next: a bucket of several would wait in vain.
TEST(what_a_caller_waits_for_is_not_held_back_for_what_it_submits_next) {
  World world(Planning(), kSlowNetwork);
  std::vector<Submission> step = {{0, "a", 1000}};
  for (const char* name : {"b", "c", "d", "e"}) {
    step.push_back({10 * kMicrosecond, name, 200000, step.back().name});
  }
  const TimeNs usual = world.Play(3, step);
  for (int i = 0; i < 60; ++i) {
    const TimeNs took = world.Play(1, step);
    CHECK(took <= usual + usual / 2 + 2 * kMillisecond);
  }
  CHECK_NEAR(world.Play(1, step), usual, kMillisecond);
}

TEST(an_urgent_request_takes_along_what_is_held) {
  World world(Planning(), kSlowNetwork);
  const std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  world.Play(kEnough, step);
  const Names second = world.coordinator.Plan()[1];
  CHECK(second.size() > 1);
  for (int rank : {0, 1}) {
    world.coordinator.Receive(rank, Fresh(Allreduce(second[0], 100000)), world.now);
  }
  CHECK(!world.coordinator.Decide(world.now + 10 * kMillisecond).has_value() ||
        !world.coordinator.Plan().empty());
  Request barrier;
  barrier.kind = Collective::kBarrier;
  barrier.name = "barrier";
  for (int rank : {0, 1}) world.coordinator.Receive(rank, Fresh(barrier), world.now);
  const auto agreement = world.coordinator.Decide(world.now);
  CHECK(agreement.has_value());
  CHECK_EQ(agreement->decisions.back().name, std::string("barrier"));
}

TEST(a_plan_is_made_anew_when_ready_times_change_by_more_than_a_tenth) {
  World world(Planning(), kSlowNetwork);
  world.Play(kEnough, Layers(20, kMillisecond, 100000));
  world.Play(kEnough, Layers(20, kMillisecond * 105 / 100, 100000));
  CHECK_EQ(world.coordinator.queue().counts().plans, int64_t{1});
  world.Play(2 * kEnough, Layers(20, kMillisecond * 115 / 100, 100000));
  CHECK_EQ(world.coordinator.queue().counts().plans, int64_t{2});
  world.Play(3 * kEnough, Layers(20, 2 * kMillisecond, 100000));
  CHECK_EQ(world.coordinator.queue().counts().plans, int64_t{3});
}

TEST(other_tensors_get_another_plan) {
  World world(Planning(), kSlowNetwork);
  world.Play(kEnough, Layers(20, kMillisecond, 100000));
  std::vector<Submission> other = Layers(15, kMillisecond, 200000);
  for (Submission& each : other) each.name += ".of_another_model";
  world.Play(2 * kEnough, other);
  CHECK(world.batches == world.coordinator.Plan());
  CHECK_EQ(world.coordinator.Plan()[0][0], std::string("layer0.of_another_model"));
}

// The model was learned while the network was another one: the plan does not keep its promise.
TEST(a_plan_that_is_slower_than_none_was_is_given_up) {
  World world(Planning(), kSlowNetwork);
  const std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  while (world.coordinator.Plan().empty()) world.Play(1, step);
  world.cost = {4e-3, 3e-8};
  world.Play(6, step);
  CHECK(world.coordinator.Plan().empty());
  world.Play(3 * kEnough, step);
  CHECK_EQ(world.coordinator.queue().counts().plans, int64_t{1});
}

TEST(the_time_of_the_last_rank_counts) {
  World world(Planning(3), kSlowNetwork);
  const std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  for (int i = 0; i < kEnough; ++i) {
    world.Play(step, 300 * kMicrosecond);
    world.now += kMillisecond;
  }
  CHECK(world.batches == world.coordinator.Plan());
}

TEST(ranks_that_have_joined_are_not_waited_for) {
  World world(Planning(3), kSlowNetwork);
  const std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  world.Play(kEnough, step);
  Request join;
  join.kind = Collective::kJoin;
  join.name = "join";
  world.coordinator.Receive(2, Fresh(join), world.now);
  // Rank 2's reports are missing; its share of the world plays on with two ranks only.
  const std::vector<Names> plan = world.coordinator.Plan();
  Report report;
  for (const Names& bucket : plan) {
    for (const std::string& name : bucket) {
      for (int rank : {0, 1}) {
        world.coordinator.Receive(rank, Fresh(Allreduce(name, 100000)), world.now);
      }
    }
  }
  size_t decided = 0;
  while (const auto agreement = world.coordinator.Decide(world.now)) {
    decided += agreement->decisions.size();
  }
  CHECK_EQ(decided, step.size());
}

TEST(process_sets_have_plans_of_their_own_and_take_them_along_when_they_go) {
  World world(Planning(3), kSlowNetwork);
  Request add;
  add.kind = Collective::kAddProcessSet;
  add.name = "add";
  add.ranks = {0, 1};
  for (int rank : {0, 1, 2}) world.coordinator.Receive(rank, Fresh(add), world.now);
  const int32_t set =
      static_cast<int32_t>(world.coordinator.Decide(world.now)->decisions[0].rows[0]);
  std::vector<Submission> step = Layers(10, kMillisecond, 100000);
  for (int i = 0; i < 10; ++i) {
    step.push_back({(30 + i) * kMillisecond, "of_set" + std::to_string(i), 100000, "", set});
  }
  world.Play(2 * kEnough, step);
  std::set<std::string> planned;
  for (const Names& bucket : world.coordinator.Plan()) planned.insert(bucket.begin(), bucket.end());
  CHECK_EQ(planned.size(), step.size());

  // One of the set's tensors is held when the set goes: it is carried out before.
  const int64_t version = world.coordinator.queue().counts().version;
  for (int rank : {0, 1}) {
    world.coordinator.Receive(rank, Fresh(Allreduce("of_set0", 100000, set)), world.now);
  }
  Request remove = add;
  remove.kind = Collective::kRemoveProcessSet;
  remove.name = "remove";
  remove.ranks = {};
  remove.root = set;
  for (int rank : {0, 1, 2}) world.coordinator.Receive(rank, Fresh(remove), world.now);
  const auto agreement = world.coordinator.Decide(world.now);
  CHECK_EQ(agreement->decisions.size(), size_t{2});
  CHECK_EQ(agreement->decisions[0].process_set, set);
  CHECK(world.coordinator.queue().counts().version > version);
  for (const Names& bucket : world.coordinator.Plan()) {
    CHECK(bucket[0].compare(0, 5, "layer") == 0);
  }
  CHECK_EQ(world.coordinator.NextDeadline(), kForever);
}

// Ranks forget an evicted id when they hear of it: not before what is held was carried out.
TEST(an_id_that_a_held_tensor_goes_by_is_not_evicted_before_it) {
  Coordinator::Options options = Planning();
  options.cache_capacity = 20;
  World world(options, kSlowNetwork);
  world.Play(kEnough, Layers(20, kMillisecond, 100000));
  const std::vector<Names> plan = world.coordinator.Plan();
  CHECK(!plan.empty());
  // All but the last of the first large bucket are ready, then something new takes a place.
  const auto large =
      std::find_if(plan.begin(), plan.end(), [](const Names& bucket) { return bucket.size() > 2; });
  CHECK(large != plan.end());
  std::vector<Submission> part;
  for (size_t i = 0; i + 1 < large->size(); ++i) part.push_back({0, (*large)[i], 100000});
  part.push_back({0, "new", 5});
  part.push_back({kMillisecond, large->back(), 100000});
  world.Play(part);
  world.Play(3, Layers(20, kMillisecond, 100000));
}

TEST(tuning_settles_on_the_fastest_threshold_and_writes_down_how) {
  Coordinator::Options options = Planning();
  options.queue.plan = false;
  options.queue.tune = Tuner::Options{};
  options.queue.tune->steps_per_sample = 2;
  World world(options, {1e-4, 0});
  // Sizes beyond the cache cost far more than their latency.
  const CostLine small{1e-5, 1e-9}, large{1e-5, 1e-8};
  const std::vector<Submission> step = Layers(64, 0, 1 << 20);
  std::vector<std::string> log;
  for (int i = 0; i < 400 && !world.coordinator.queue().tuner()->done(); ++i) {
    world.cost = world.coordinator.queue().fusion_bytes() > (8 << 20) ? large : small;
    world.Play(1, step);
    for (std::string& line : world.coordinator.queue().tuner()->TakeLog()) log.push_back(line);
  }
  CHECK(world.coordinator.queue().tuner()->done());
  CHECK_EQ(world.coordinator.queue().fusion_bytes(), int64_t{8} << 20);
  CHECK(log.front().find("fusion_bytes") != std::string::npos);
  CHECK(log.back().find(",best,8388608,") != std::string::npos);
  // 3 of warming up, then 9 candidates once, 5 twice, 3 four times, 2 eight times.
  CHECK_EQ(log.size(), size_t{1 + 3 + 9 + 10 + 12 + 16 + 1});
  world.Play(1, step);
  for (const Names& batch : world.batches) CHECK(batch.size() <= 8);
}

TEST(what_is_not_to_be_tuned_stays) {
  Tuner::Options options;
  options.initial = {1 << 20, kMillisecond};
  options.tune_fusion = options.tune_hold = false;
  CHECK(Tuner(options).done());
  options.tune_hold = true;
  options.warmup_samples = 0;
  options.steps_per_sample = 1;
  Tuner tuner(options);
  std::set<TimeNs> holds;
  for (TimeNs i = 0; !tuner.done() && i < 100; ++i) {
    CHECK_EQ(tuner.setting().fusion_bytes, int64_t{1} << 20);
    holds.insert(tuner.setting().hold_ns);
    Step step;
    step.bytes = 1000;
    step.end_ns = 1000 + tuner.setting().hold_ns;
    tuner.Learn(step);
  }
  CHECK(tuner.done());
  CHECK(holds == (std::set<TimeNs>{0, kMillisecond, 5 * kMillisecond}));
  CHECK_EQ(tuner.setting().hold_ns, TimeNs{0});
}
