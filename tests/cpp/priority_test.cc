// Rung 1: allreduces that are ready at the same time go by priority, and only where these
// differ is anything other than without them.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "negotiation/codec.h"
#include "negotiation/response_cache.h"
#include "simulated_world.h"

using namespace hororing_test;

namespace {

using World = SimulatedWorld;
constexpr int64_t kMiB = 1 << 20;
constexpr CostLine kNetwork{1e-3, 1e-8};  // 10 ms for a MiB

Coordinator::Options Options(bool plan = false) {
  Coordinator::Options options;
  options.size = 2;
  options.cache_capacity = 1000;
  options.queue.fusion_bytes = 64 << 20;
  options.queue.hold_ns = kMillisecond;
  options.queue.plan = plan;
  return options;
}

Submission Tensor(TimeNs at, const std::string& name, int32_t priority, int64_t bytes = kMiB) {
  return {at, name, bytes, "", kWorldSet, priority};
}

std::vector<std::string> Order(const std::vector<std::vector<std::string>>& batches) {
  std::vector<std::string> order;
  for (const auto& batch : batches) order.insert(order.end(), batch.begin(), batch.end());
  return order;
}

}  // namespace

TEST(what_is_ready_goes_by_priority_one_batch_at_a_time) {
  World world(Options(), kNetwork);
  world.Play(3, {Tensor(0, "last", 1), Tensor(kMillisecond, "middle", 2),
                 Tensor(2 * kMillisecond, "first", 3)});
  // The first that comes goes: nobody knows what else will come.
  CHECK(world.batches == (std::vector<Names>{{"last"}, {"first"}, {"middle"}}));
}

TEST(what_comes_during_a_batch_overtakes_what_is_left) {
  World world(Options(), kNetwork);
  world.Play(3, {Tensor(0, "d", 1), Tensor(kMillisecond, "c", 2), Tensor(kMillisecond, "b", 3),
                 Tensor(15 * kMillisecond, "a", 4)});
  CHECK(world.batches == (std::vector<Names>{{"d"}, {"b"}, {"a"}, {"c"}}));
}

TEST(small_tensors_of_different_priorities_share_a_batch) {
  World world(Options(), kNetwork);
  std::vector<Submission> step = {Tensor(0, "head", 0)};
  for (int i = 1; i <= 10; ++i) {
    step.push_back(Tensor(kMillisecond, std::to_string(i), i, kMiB / 5));
  }
  world.Play(3, step);
  CHECK(world.batches ==
        (std::vector<Names>{{"head"}, {"10", "9", "8", "7", "6"}, {"5", "4", "3", "2", "1"}}));
}

TEST(a_tensor_is_never_cut_and_a_low_threshold_counts) {
  Coordinator::Options options = Options();
  options.queue.fusion_bytes = 1000;
  World world(options, kNetwork);
  world.Play(3, {Tensor(0, "head", 0, 5000), Tensor(kMillisecond, "large", 3, 5000),
                 Tensor(kMillisecond, "b", 2, 600), Tensor(kMillisecond, "c", 1, 600)});
  CHECK(world.batches == (std::vector<Names>{{"head"}, {"large"}, {"b"}, {"c"}}));
}

TEST(where_all_priorities_are_equal_nothing_is_other_than_without) {
  std::mt19937 random(hororing_test::Seed());
  for (const bool plan : {false, true}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<Submission> step;
      TimeNs at = 0;
      for (int i = 0; i < 30; ++i) {
        at += static_cast<TimeNs>(random() % 3000) * kMicrosecond;
        step.push_back(Tensor(at, "t" + std::to_string(i), 0, 1 + random() % (3 * kMiB)));
      }
      World without(Options(plan), kNetwork);
      World equal(Options(plan), kNetwork);
      const TimeNs usual = without.Play(15, step);
      for (Submission& each : step) each.priority = -7;
      CHECK_EQ(equal.Play(15, step), usual);
      CHECK(equal.batches == without.batches);
      // More than what goes at once where something may overtake.
      CHECK(std::any_of(without.batches.begin(), without.batches.end(),
                        [](const Names& batch) { return batch.size() > 3; }));
    }
  }
}

// All ranks cut it at the threshold, alike: no more messages than one.
TEST(where_all_priorities_are_equal_one_agreement_has_it_all) {
  Coordinator::Options options = Options();
  options.queue.fusion_bytes = 1000;
  Coordinator coordinator(options);
  for (int32_t i = 0; i < 5; ++i) {
    Request request = Allreduce(std::to_string(i), 600);
    request.priority = 3;
    for (int rank = 0; rank < 2; ++rank) coordinator.Receive(rank, Fresh(request), kSecond);
  }
  CHECK_EQ(coordinator.Decide(kSecond)->decisions.size(), size_t{5});
}

TEST(equal_priorities_keep_the_order_of_becoming_ready) {
  World world(Options(), kNetwork);
  world.Play(3,
             {Tensor(0, "head", 0), Tensor(kMillisecond, "a", 1), Tensor(2 * kMillisecond, "b", 2),
              Tensor(3 * kMillisecond, "c", 1), Tensor(4 * kMillisecond, "d", 2)});
  CHECK(Order(world.batches) == (Names{"head", "b", "d", "a", "c"}));
}

// What follows it, such as the end of the job, must find done what came before it.
TEST(what_is_urgent_takes_everything_along) {
  Coordinator coordinator(Options());
  const auto submit = [&](const Request& request) {
    for (int rank = 0; rank < 2; ++rank) coordinator.Receive(rank, Fresh(request), kSecond);
  };
  for (int32_t i = 0; i < 5; ++i) {
    Request request = Allreduce(std::to_string(i), 3 * kMiB);
    request.priority = i;
    submit(request);
  }
  Request barrier;
  barrier.kind = Collective::kBarrier;
  barrier.name = "barrier";
  submit(barrier);
  const auto agreement = coordinator.Decide(kSecond);
  CHECK(agreement.has_value());
  CHECK_EQ(agreement->decisions.size(), size_t{6});
  CHECK_EQ(agreement->decisions.back().details().name, std::string("barrier"));
  CHECK(!coordinator.queue().may_be_overtaken());
  CHECK(!coordinator.Decide(kSecond).has_value());
}

// While something is left, it is due at once: whoever runs the loop must not sleep over it.
TEST(what_is_left_is_due_now) {
  Coordinator coordinator(Options());
  for (int32_t i = 0; i < 3; ++i) {
    Request request = Allreduce(std::to_string(i), 3 * kMiB);
    request.priority = i;
    for (int rank = 0; rank < 2; ++rank) coordinator.Receive(rank, Fresh(request), kSecond);
  }
  for (const char* name : {"2", "1", "0"}) {
    CHECK(coordinator.NextDeadline() <= kSecond + kMillisecond);
    const auto agreement = coordinator.Decide(kSecond);
    CHECK(agreement.has_value());
    CHECK_EQ(agreement->decisions.size(), size_t{1});
    CHECK_EQ(agreement->decisions[0].details().name, std::string(name));
    const bool left = std::string(name) != "0";
    CHECK_EQ(coordinator.queue().may_be_overtaken(), left);
    CHECK(coordinator.NextDeadline() == (left ? 0 : kForever));
  }
}

TEST(buckets_that_are_complete_go_by_priority_and_whole) {
  World world(Options(/*plan=*/true), CostLine{20e-3, 1e-8});
  std::vector<Submission> step;
  for (int i = 0; i < 24; ++i) {
    // Three bursts; each has tensors of high and of low priority, the last one the highest.
    step.push_back(Tensor((i / 8) * 15 * kMillisecond + i * kMicrosecond, std::to_string(i),
                          i % 8 * 10 + i / 8, kMiB / 4));
  }
  world.Play(15, step);
  std::vector<std::vector<std::string>> plan = world.coordinator.Plan();
  CHECK(plan.size() >= 2);
  // All of them at once.
  for (Submission& each : step) each.at = 0;
  world.Play(step);
  const auto highest = [&](const std::vector<std::string>& bucket) {
    int32_t priority = 0;
    for (const std::string& name : bucket) {
      priority = std::max(priority, step[static_cast<size_t>(std::stoi(name))].priority);
    }
    return priority;
  };
  std::sort(plan.begin(), plan.end(),
            [&](const auto& a, const auto& b) { return highest(a) > highest(b); });
  CHECK_EQ(world.batches.size(), plan.size());
  for (size_t i = 0; i < plan.size(); ++i) {
    std::sort(world.batches[i].begin(), world.batches[i].end());
    std::sort(plan[i].begin(), plan[i].end());
    CHECK(world.batches[i] == plan[i]);
  }
}

// Whatever the others think: all ranks carry out one order.
TEST(the_priority_of_the_first_rank_counts_and_ranks_need_not_agree) {
  Coordinator coordinator(Options());
  const auto submit = [&](const std::string& name, int32_t first, int32_t second) {
    Request request = Allreduce(name, 3 * kMiB);
    request.priority = second;
    coordinator.Receive(1, Fresh(request), kSecond);
    request.priority = first;
    coordinator.Receive(0, Fresh(request), kSecond);
  };
  submit("low", 1, 9);
  submit("high", 2, 8);
  const auto agreement = coordinator.Decide(kSecond);
  CHECK_EQ(agreement->decisions.size(), size_t{1});
  CHECK_EQ(agreement->decisions[0].details().name, std::string("high"));
}

TEST(a_priority_is_part_of_what_a_rank_knows_by_an_id) {
  ResponseCache cache;
  Request request = Allreduce("a", 5);
  request.priority = 3;
  cache.Define(7, request, {});
  CHECK_EQ(cache.Find(request), uint64_t{7});
  request.priority = 4;
  CHECK_EQ(cache.Find(request), uint64_t{0});

  Report report = Fresh(request), decoded;
  report.fresh[0].priority = -123456;
  CHECK(Decode(Encode(report), &decoded));
  CHECK_EQ(decoded.fresh[0].priority, -123456);
}
