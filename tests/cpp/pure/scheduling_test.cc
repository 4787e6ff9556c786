// Rung 1: how the coordinator learns steps, holds tensors for their buckets, lets go of them, and
// tunes; on a clock that is a number, over a network that is a formula.
#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "simulated_world.h"

using namespace hororing_test;

namespace {

using World = SimulatedWorld;

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

// What a bucket was planned for costs a rank one report, early ranks and late ones.
TEST(a_bucket_costs_every_rank_one_report) {
  World together(Planning(3), kSlowNetwork), apart(Planning(3), kSlowNetwork);
  together.buckets_together = true;
  const std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  for (World* world : {&together, &apart}) {
    for (int i = 0; i < kEnough; ++i) {
      world->Play(step, 300 * kMicrosecond);
      world->now += kMillisecond;
    }
    CHECK(world->batches == world->coordinator.Plan());
  }
  const std::vector<Names> plan = together.coordinator.Plan();
  CHECK(plan == apart.coordinator.Plan());
  CHECK(plan.size() > 1 && plan.size() < step.size());
  for (const int reports : apart.reports) CHECK_EQ(reports, static_cast<int>(step.size()));
  for (const int reports : together.reports) CHECK_EQ(reports, static_cast<int>(plan.size()));
  CHECK_EQ(together.Play(step, 300 * kMicrosecond), apart.Play(step, 300 * kMicrosecond));
  CHECK_EQ(together.coordinator.queue().counts().departures, int64_t{0});
}

// The rest of its bucket is reported in time for the coordinator, which gives it up then.
TEST(a_tensor_that_does_not_come_keeps_the_others_for_no_longer_than_planned) {
  World world(Planning(), kSlowNetwork);
  world.buckets_together = true;
  std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  const TimeNs usual = world.Play(kEnough, step);
  CHECK(!world.coordinator.Plan().empty());
  step.erase(step.begin() + 7);
  CHECK(world.Play(1, step) <= usual + 20 * kMillisecond);
  world.Play(2 * kEnough, step);
  size_t planned = 0;
  for (const Names& bucket : world.coordinator.Plan()) planned += bucket.size();
  CHECK_EQ(planned, step.size());
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
  world.Play(kEnough, Layers(20, kMillisecond, 100000));
  world.cost = CostLine{1e-4, 1e-9};
  std::vector<Submission> step = {{0, "a", 100000}};
  for (const char* name : {"b", "c", "d", "e"}) {
    step.push_back({10 * kMicrosecond, name, 100000, step.back().name});
  }
  const TimeNs usual = world.Play(3, step);
  for (int i = 0; i < 100; ++i) CHECK_EQ(world.Play(1, step), usual);
}

// The same, where costs have been misjudged, so that a bucket of both seems right.
TEST(after_waits_in_vain_a_tensor_begins_a_bucket) {
  StepPlanner planner(1 << 20, kMillisecond);
  for (const int64_t bytes : {100, 100000}) planner.Ran(bytes, 0.5);
  Step step;
  step.tensors = {{1, 100, 0}, {2, 100, kMillisecond}};
  step.end_ns = 2 * kMillisecond;
  const auto learn = [&](int steps) {
    for (int i = 0; i < steps; ++i) planner.Learn(step);
  };
  learn(5);
  CHECK(planner.plan() == (StepPlanner::Buckets{{1, 2}}));
  for (int i = 0; i < 3; ++i) {
    CHECK(planner.BucketOf(1) == size_t{0});
    CHECK(!planner.Complete(0));
    planner.GiveUp(0);
    CHECK(!planner.BucketOf(2).has_value());  // the step has departed
    learn(1);
  }
  CHECK(planner.plan().empty());
  learn(5);
  CHECK(planner.plan() == (StepPlanner::Buckets{{1}, {2}}));
  CHECK_EQ(planner.departures(), int64_t{3});
}

TEST(an_urgent_request_takes_along_what_is_held) {
  World world(Planning(), kSlowNetwork);
  const std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  world.Play(kEnough, step);
  const Names second = world.coordinator.Plan()[1];
  CHECK(second.size() > 1);
  world.Submit(second[0]);
  CHECK(!world.coordinator.Decide(world.now).has_value());
  world.Call(Collective::kBarrier);
  const auto agreement = world.coordinator.Decide(world.now);
  CHECK(agreement.has_value());
  CHECK_EQ(agreement->decisions.size(), size_t{2});
  CHECK_EQ(agreement->decisions[1].details().name, std::string(Name(Collective::kBarrier)));
  CHECK_EQ(world.coordinator.queue().counts().departures, int64_t{0});
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

TEST(a_plan_is_made_anew_when_costs_change_by_more_than_a_tenth) {
  World world(Planning(), kSlowNetwork);
  const std::vector<Submission> step = Layers(20, kMillisecond, 100000);
  world.Play(kEnough, step);
  const std::vector<Names> before = world.coordinator.Plan();
  world.cost = CostLine{4e-3 * 1.05, 1e-8 * 1.05};
  world.Play(2 * kEnough, step);
  CHECK_EQ(world.coordinator.queue().counts().plans, int64_t{1});
  world.cost = CostLine{1e-3, 1e-8};  // less latency: smaller buckets
  world.Play(2 * kEnough, step);
  CHECK_EQ(world.coordinator.queue().counts().plans, int64_t{2});
  CHECK(world.coordinator.Plan().size() > before.size());
  CHECK(world.batches == world.coordinator.Plan());
  // As the costs were, so are the buckets.
  world.cost = kSlowNetwork;
  world.Play(2 * kEnough, step);
  CHECK_EQ(world.coordinator.queue().counts().plans, int64_t{3});
  CHECK(world.coordinator.Plan() == before);
}

TEST(costs_that_were_measured_for_the_first_time_have_not_changed) {
  CostModel before;
  before.Add(1000, 1.0);
  before.Add(100000, 2.0);
  CostModel now = before;
  const auto moved = [&](int64_t bytes, std::vector<double> seconds) {
    now.BeginWindow();
    for (const double each : seconds) now.Add(bytes, each);
    return now.Moved(&before, 5);
  };
  CHECK_NEAR(moved(1000, {1.2, 1.2, 1.2, 1.2, 9.0}), 0.2, 1e-9);
  CHECK_NEAR(moved(1000, {1.0, 1.1, 1.2, 1.3, 1.4}), 0.0, 1e-9);  // they differ as much
  CHECK_NEAR(moved(1000, {5, 5, 5, 5}), 0.0, 1e-9);               // too few
  CHECK_NEAR(moved(10 << 20, {7, 7, 7, 7, 7}), 0.0, 1e-9);
  CHECK_NEAR(moved(10 << 20, {8.4, 8.4, 8.4, 8.4, 8.4}), 0.2, 1e-9);
}

// Between two windows nothing has changed for the model: it was wrong about buckets of this size.
TEST(a_plan_that_is_slower_than_none_is_given_up) {
  StepPlanner planner(1 << 20, kMillisecond);
  for (const int64_t bytes : {100, 100000}) planner.Ran(bytes, 0.5);
  Step step;
  step.tensors = {{1, 100, 0}, {2, 100, kMillisecond}};
  const auto learn = [&](TimeNs exposed, double bucket_s) {
    step.end_ns = kMillisecond + exposed;
    for (int i = 0; i < 5; ++i) {
      planner.Ran(200, bucket_s);
      planner.Learn(step);
    }
  };
  learn(kMillisecond, 0.5);
  CHECK(planner.plan() == (StepPlanner::Buckets{{1, 2}}));
  learn(2 * kMillisecond, 0.5);
  CHECK(planner.plan().empty());
  learn(kMillisecond, 0.5);
  CHECK(planner.plan().empty());
  CHECK_EQ(planner.plans(), int64_t{1});
  // With other costs it is tried again.
  learn(kMillisecond, 0.7);
  learn(kMillisecond, 0.7);
  CHECK_EQ(planner.plans(), int64_t{2});
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
  world.ranks = 2;
  for (int i = 0; i < 3; ++i) {
    world.Play(step);
    CHECK(world.batches == world.coordinator.Plan());
  }
}

TEST(process_sets_have_plans_of_their_own_and_take_them_along_when_they_go) {
  World world(Planning(3), kSlowNetwork);
  Request add;
  add.kind = Collective::kAddProcessSet;
  add.name = "add";
  add.ranks = {0, 1};
  for (int rank : {0, 1, 2}) world.coordinator.Receive(rank, Fresh(add), world.now);
  const int32_t set =
      static_cast<int32_t>(world.coordinator.Decide(world.now)->decisions[0].details().rows[0]);
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
  const Names held = world.coordinator.Plan().back();
  CHECK(held.size() > 1);
  world.Submit(held[0], set);
  CHECK(!world.coordinator.Decide(world.now).has_value());
  world.Call(Collective::kRemoveProcessSet, set);
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
  for (int i = 0; i < 20; ++i) part.push_back({kMicrosecond, "new" + std::to_string(i), 5});
  part.push_back({kMillisecond, large->back(), 100000});
  world.Play(part);
  CHECK(world.batches.size() > 1);
  world.Play(3, Layers(20, kMillisecond, 100000));
}

TEST(only_whole_steps_tell_what_the_next_one_will_be_like) {
  StepWatch watch;
  const auto step = [&](bool second_is_ready) {
    watch.Announced(1, 100);
    watch.Announced(2, 90);
    watch.Ready(1, 10, 120);
    if (second_is_ready) watch.Ready(2, 20, 150);
    watch.Ran(30, 200);
    return *watch.Announced(1, 300);
  };
  const Step whole = step(true);
  CHECK(whole.whole);
  CHECK_EQ(whole.begin_ns, TimeNs{90});
  CHECK_EQ(whole.tensors[1].ready_ns, TimeNs{60});
  CHECK_EQ(whole.end_ns, TimeNs{200});
  watch = StepWatch();
  CHECK(!step(false).whole);
  watch = StepWatch();
  watch.Announced(0, 100);  // not cached
  CHECK(!step(true).whole);
  watch = StepWatch();
  watch.Announced(1, 0);
  watch.Ready(3, 10, 0);  // reported in the step before
  CHECK(!watch.Announced(1, 300)->whole);
}

TEST(tuning_settles_on_the_fastest_threshold_and_writes_down_how) {
  Coordinator::Options options = Planning();
  options.queue.plan = false;
  options.queue.tune = Tuner::Options{};
  options.queue.tune->steps_per_sample = 2;
  // What does not fit into the cache costs far more than its latency.
  World world(options, [](int64_t bytes) {
    return 1e-4 + (bytes > 8 << 20 ? 1e-8 : 1e-9) * static_cast<double>(bytes);
  });
  const std::vector<Submission> step = Layers(64, 0, 1 << 20);
  std::vector<std::string> log;
  for (int i = 0; i < 400 && !world.coordinator.queue().tuner()->done(); ++i) {
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

// A process that is not scheduled for a while, or a packet that is sent again.
TEST(one_slow_step_does_not_decide_between_two) {
  Tuner::Options options;
  options.initial = {512 << 10, 0};  // an eighth of it is the least
  options.warmup_samples = 0;
  options.steps_per_sample = 1;
  for (int slow = 0; slow < 6; ++slow) {
    Tuner tuner(options);
    int steps = 0;
    while (!tuner.done() && steps < 100) {
      const bool small = tuner.setting().fusion_bytes == 64 << 10;  // twice as fast
      Step step;
      step.bytes = 1000;
      step.end_ns = (small ? 1000 : 2000) + (steps++ == slow ? 10000 : 0);
      tuner.Learn(step);
    }
    CHECK_EQ(steps, 6);
    CHECK_EQ(tuner.setting().fusion_bytes, int64_t{64} << 10);
  }
}

TEST(all_ranks_hear_of_what_is_tried_before_the_step_that_tries_it) {
  Coordinator::Options options = Planning();
  options.queue.plan = false;
  options.queue.tune.emplace();
  options.queue.tune->tune_fusion = false;
  options.queue.tune->warmup_samples = options.queue.tune->steps_per_sample = 1;
  World world(options, kSlowNetwork);
  const std::vector<Submission> step = Layers(3, 0, 1 << 20);
  const Tuner& tuner = *world.coordinator.queue().tuner();
  int changes = 0;
  for (int i = 0; i < 100 && !tuner.done(); ++i) {
    const TimeNs before = world.hold;
    world.Play(1, step);
    changes += world.hold == before ? 0 : 1;
    CHECK_EQ(world.hold, world.tried);  // by the batches of this step
  }
  CHECK(tuner.done());
  CHECK(changes > 5);
  world.Play(3, step);
  CHECK_EQ(world.hold, tuner.setting().hold_ns);
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
