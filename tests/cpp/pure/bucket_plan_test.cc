// Rung 1: the bucket plan and the cost model it rests on.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "schedule/bucket_plan.h"
#include "schedule/cost_model.h"

using namespace hororing;

namespace {

constexpr int64_t kNoLimit = int64_t{1} << 60;

std::vector<PlanItem> RandomItems(std::mt19937& random, size_t count) {
  std::vector<PlanItem> items;
  double ready_s = 0;
  for (size_t i = 0; i < count; ++i) {
    if (random() % 4 != 0) ready_s += static_cast<double>(random() % 1000) * 1e-6;
    items.push_back({ready_s, static_cast<int64_t>(random() % 4000000)});
  }
  return items;
}

BucketCost RandomCost(std::mt19937& random) {
  const double alpha = static_cast<double>(random() % 4000) * 1e-6;
  const double beta = static_cast<double>(random() % 1000) * 1e-12;
  if (random() % 2 == 0) return CostLine{alpha, beta};
  // Another algorithm from some size on, and a jump there.
  const int64_t knee = static_cast<int64_t>(random() % 4000000);
  return [=](int64_t bytes) {
    return alpha + beta * static_cast<double>(bytes) + (bytes > knee ? 1e-3 : 0);
  };
}

bool Fits(const std::vector<PlanItem>& items, const std::vector<size_t>& ends, int64_t limit) {
  size_t begin = 0;
  for (const size_t end : ends) {
    int64_t bytes = 0;
    for (size_t i = begin; i < end; ++i) bytes += items[i].bytes;
    if (end - begin > 1 && bytes > limit) return false;
    begin = end;
  }
  return true;
}

// Of all 2^(n-1) plans.
double BestEnd(const std::vector<PlanItem>& items, const BucketCost& cost, int64_t limit) {
  double best = 1e300;
  const size_t n = items.size();
  for (unsigned cuts = 0; cuts < 1u << (n - 1); ++cuts) {
    std::vector<size_t> ends;
    for (size_t i = 1; i < n; ++i) {
      if ((cuts >> (i - 1) & 1u) != 0) ends.push_back(i);
    }
    ends.push_back(n);
    if (Fits(items, ends, limit)) best = std::min(best, PlanEnd(items, ends, cost));
  }
  return best;
}

// Buckets closed by size alone, the first one small: what DistributedDataParallel does.
std::vector<size_t> BySize(const std::vector<PlanItem>& items, int64_t first, int64_t rest) {
  std::vector<size_t> ends;
  int64_t bytes = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    bytes += items[i].bytes;
    if (bytes >= (ends.empty() ? first : rest) || i + 1 == items.size()) {
      ends.push_back(i + 1);
      bytes = 0;
    }
  }
  return ends;
}

}  // namespace

TEST(no_plan_of_random_steps_ends_earlier) {
  std::mt19937 random(hororing_test::Seed());
  for (int round = 0; round < 400; ++round) {
    const std::vector<PlanItem> items = RandomItems(random, 1 + random() % 10);
    const BucketCost cost = RandomCost(random);
    const int64_t limit = random() % 3 == 0 ? static_cast<int64_t>(random() % 9000000) : kNoLimit;
    const std::vector<size_t> ends = PlanBuckets(items, cost, limit);
    CHECK_EQ(ends.back(), items.size());
    CHECK(std::is_sorted(ends.begin(), ends.end()));
    CHECK(Fits(items, ends, limit));
    CHECK_NEAR(PlanEnd(items, ends, cost), BestEnd(items, cost, limit), 1e-12);
  }
}

TEST(an_empty_step_has_an_empty_plan) { CHECK(PlanBuckets({}, CostLine{}, kNoLimit).empty()); }

// All ready at once: one latency is better than two, however many there are.
TEST(what_is_ready_at_once_goes_in_one_bucket) {
  const std::vector<PlanItem> items(100, PlanItem{0.5, 1000});
  CHECK(PlanBuckets(items, CostLine{1e-3, 1e-9}, kNoLimit) == std::vector<size_t>{100});
  CHECK(PlanBuckets(items, CostLine{0, 1e-9}, kNoLimit) == std::vector<size_t>{100});
}

// Latency free of charge: waiting for another tensor gains nothing.
TEST(without_latency_every_tensor_goes_as_it_comes) {
  std::vector<PlanItem> items;
  for (int i = 0; i < 10; ++i) items.push_back({i * 1.0, 1000});
  CHECK_EQ(PlanBuckets(items, CostLine{0, 1e-6}, kNoLimit).size(), size_t{10});
}

// Two equal tensors, the second d later: apart they end at max(T, d) + T, together at d + T(2M).
// With d < T that is 2a + 2bM against d + a + 2bM: together if d < a.
TEST(the_second_of_two_is_waited_for_if_it_comes_within_the_latency) {
  const CostLine cost{1e-3, 1e-9};
  const auto buckets = [&](double gap_s) {
    return PlanBuckets({{0, 1000000}, {gap_s, 1000000}}, cost, kNoLimit).size();
  };
  CHECK_EQ(buckets(0.9e-3), size_t{1});
  CHECK_EQ(buckets(1.1e-3), size_t{2});
}

TEST(a_bucket_keeps_the_limit_unless_one_tensor_exceeds_it) {
  const std::vector<PlanItem> items = {{0, 60}, {0, 60}, {0, 500}, {0, 40}, {0, 60}};
  CHECK(PlanBuckets(items, CostLine{1, 0}, 120) == (std::vector<size_t>{2, 3, 5}));
  CHECK_EQ(PlanBuckets(items, CostLine{1, 0}, 0).size(), items.size());
}

TEST(a_plan_is_never_worse_than_the_usual_rules_under_its_model) {
  std::mt19937 random(hororing_test::Seed());
  for (int round = 0; round < 50; ++round) {
    const std::vector<PlanItem> items = RandomItems(random, 50 + random() % 150);
    const BucketCost cost = RandomCost(random);
    const double planned = PlanEnd(items, PlanBuckets(items, cost, kNoLimit), cost);
    CHECK(planned <= PlanEnd(items, BySize(items, 1, 1), cost) + 1e-12);  // each alone
    CHECK(planned <= PlanEnd(items, {items.size()}, cost) + 1e-12);
    CHECK(planned <= PlanEnd(items, BySize(items, 1 << 20, 25 << 20), cost) + 1e-12);
  }
}

TEST(a_thousand_tensors_are_planned_in_milliseconds) {
  std::mt19937 random(hororing_test::Seed());
  CostModel model;
  for (int64_t bytes = 1024; bytes < 1 << 30; bytes *= 2) {
    model.Add(bytes, 1e-3 + 1e-9 * static_cast<double>(bytes));
  }
  const CostTable table = model.Table();
  const CostLine line = FitLine(table);
  const BucketCost cost = [&](int64_t bytes) { return Interpolate(table, line, bytes); };
  for (const size_t count : {size_t{161}, size_t{1000}}) {
    const std::vector<PlanItem> items = RandomItems(random, count);
    const auto begin = std::chrono::steady_clock::now();
    PlanBuckets(items, cost, kNoLimit);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("  %zu tensors: %.2f ms\n", count, took.count() * 1e3);
    CHECK(took.count() < 2);  // under sanitizers, on a busy machine
  }
}

TEST(latency_and_rate_come_out_of_what_went_in) {
  CostModel model;
  for (int64_t bytes = 4096; bytes <= 64 << 20; bytes *= 4) {
    for (int i = 0; i < 5; ++i) model.Add(bytes, 2e-4 + 3e-9 * static_cast<double>(bytes));
  }
  const CostLine line = FitLine(model.Table());
  CHECK_NEAR(line.alpha_s, 2e-4, 1e-9);
  CHECK_NEAR(line.beta_s_per_byte, 3e-9, 1e-14);
}

TEST(a_few_slow_batches_change_nothing) {
  std::mt19937 random(hororing_test::Seed());
  CostModel model;
  for (int i = 0; i < 15; ++i) {
    for (int64_t bytes = 4096; bytes <= 64 << 20; bytes *= 4) {
      const double noise = 1 + static_cast<double>(random() % 100) * 1e-4;
      const bool late = i % 4 == 3;  // a fifth
      model.Add(bytes, (2e-4 + 3e-9 * static_cast<double>(bytes)) * noise + (late ? 1 : 0));
    }
  }
  const CostLine line = FitLine(model.Table());
  CHECK_NEAR(line.alpha_s, 2e-4, 1e-5);
  CHECK_NEAR(line.beta_s_per_byte, 3e-9, 1e-10);
}

TEST(what_a_line_cannot_say_is_not_negative) {
  const CostLine falling = FitLine({{1000, 2.0}, {2000, 1.0}});
  CHECK_EQ(falling.beta_s_per_byte, 0.0);
  CHECK(falling.alpha_s > 0);
  const CostLine steep = FitLine({{1000, 1.0}, {2000, 4.0}});
  CHECK_EQ(steep.alpha_s, 0.0);
  CHECK(steep.beta_s_per_byte > 0);
  CHECK_EQ(FitLine({{1000, 2.0}}).alpha_s, 2.0);
  CHECK_EQ(FitLine({})(5), 0.0);
}

TEST(between_measured_sizes_the_cost_is_interpolated) {
  const CostTable table = {{1000, 1.0}, {2000, 2.0}, {4000, 10.0}};
  const CostLine beyond{0, 1e-3};
  CHECK_EQ(Interpolate(table, beyond, 1000), 1.0);
  CHECK_EQ(Interpolate(table, beyond, 1500), 1.5);
  CHECK_EQ(Interpolate(table, beyond, 3000), 6.0);
  CHECK_NEAR(Interpolate(table, beyond, 5000), 11.0, 1e-12);
  CHECK_NEAR(Interpolate(table, beyond, 500), 0.5, 1e-12);
  CHECK_EQ(Interpolate(table, CostLine{0, 1}, 500), 0.0);
}
