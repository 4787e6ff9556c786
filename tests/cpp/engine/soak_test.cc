// Whole jobs that mix everything at random: repeated and changed requests, groups, process sets,
// joins, mismatches of one rank, abandoned waits, two threads, the timeline on and off; with small
// caches, on one host and on several. All results are right, and nothing hangs.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_world.h"
#include "hosts_engine_world.h"

namespace hororing_test {
namespace {

constexpr size_t kNames = 7;
constexpr int kRounds = 60;

// The random choices of a round, which all ranks share.
struct Plan {
  Plan(std::minstd_rand& shared, int size) {
    const auto draw = [&](unsigned of) { return static_cast<int>(shared() % of); };
    const auto ranks = static_cast<unsigned>(size);
    with_set = draw(4) == 0;
    joins = !with_set && draw(5) == 0;
    left_out = draw(ranks);  // the rank outside the set, or the one that joins
    wrong = draw(4) == 0 && !joins ? draw(ranks) : -1;
    timeline = draw(6) == 0;
    first_value = draw(100);
    for (size_t i = 0; i < kNames; ++i) {
      kinds[i] = draw(8);
      if (joins && kinds[i] == kGather) kinds[i] = kSum;  // which a joined rank cannot take part in
      in_set[i] = with_set && draw(2) == 0;
      elements[i] = draw(5) == 0 ? 700 : 3;
    }
  }
  bool TakesPart(size_t i, int rank) const { return rank != left_out || !(joins || in_set[i]); }
  // Only the first tensor may have one element too many, on one rank.
  bool IsWrong(size_t i, int rank) const { return i == 0 && rank == wrong; }
  // What a rank submits as a tensor, or as the second one of a group.
  std::vector<float> Values(size_t i, int rank, int second = 0) const {
    std::vector<float> values(elements[i] + (IsWrong(i, rank) ? 1 : 0));
    for (size_t at = 0; at < values.size(); ++at) {
      const int value = first_value + (rank + 1) * (second + 1) + static_cast<int>(3 * i + at % 5);
      values[at] = static_cast<float>(value);
    }
    return values;
  }

  enum Kind : int { kGroup, kGather, kAverage, kSum };  // larger ones are sums, too
  bool with_set, joins, timeline;
  int left_out, wrong, first_value;
  std::array<int, kNames> kinds;
  std::array<bool, kNames> in_set;
  std::array<size_t, kNames> elements;
};

struct Submitted {
  std::vector<float> data, more;
  int64_t handle = 0;
};

void SubmitTensor(Player& player, const Plan& plan, size_t i, int32_t set, Submitted* each) {
  const std::string name = "t" + std::to_string(i);
  if (!plan.in_set[i]) set = kWorldSet;
  each->data = plan.Values(i, player.rank);
  each->more = plan.Values(i, player.rank, 1);
  const ReduceOp op = plan.kinds[i] == Plan::kAverage ? ReduceOp::kAverage : ReduceOp::kSum;
  auto entry = Player::Entry(name, each->data, op, set);
  if (plan.kinds[i] == Plan::kGroup) {
    entry->views.push_back(entry->views[0]);
    entry->views[1].input = entry->views[1].output = each->more.data();
    entry->request.tensors.push_back(entry->request.tensors[0]);
  } else if (plan.kinds[i] == Plan::kGather) {
    entry->request.kind = Collective::kAllgather;
    entry->views[0].output = nullptr;
  }
  CHECK_OK(player.Submit(std::move(entry), false, &each->handle));
}

void CheckGathered(Player& player, const Plan& plan, size_t i, int64_t handle) {
  ResultBuffer result;
  CHECK_OK(player.Take(handle, &result));
  std::vector<float> expected;
  for (int rank = 0; rank < player.size; ++rank) {
    if (!plan.TakesPart(i, rank)) continue;
    const std::vector<float> rows = plan.Values(i, rank);
    expected.insert(expected.end(), rows.begin(), rows.end());
  }
  const float* values = static_cast<const float*>(result.data());
  CHECK(result.rows() == static_cast<int64_t>(expected.size()) &&
        std::equal(expected.begin(), expected.end(), values));
}

void CheckResult(Player& player, const Plan& plan, size_t i, Submitted& each) {
  const int kind = plan.kinds[i];
  if (kind == Plan::kGather) return CheckGathered(player, plan, i, each.handle);
  const Status status = player.Wait(each.handle);
  if (i == 0 && plan.wrong >= 0 && plan.TakesPart(i, plan.wrong)) {
    CHECK(status.code() == Code::kMismatch);
    return;
  }
  CHECK_OK(status);
  for (const int second : {0, 1}) {
    if (second == 1 && kind != Plan::kGroup) continue;
    std::vector<float> expected(plan.elements[i], 0.0f);
    int count = 0;
    for (int rank = 0; rank < player.size; ++rank) {
      if (!plan.TakesPart(i, rank)) continue;
      const std::vector<float> values = plan.Values(i, rank, second);
      for (size_t at = 0; at < expected.size(); ++at) expected[at] += values[at];
      ++count;
    }
    const std::vector<float>& found = second == 0 ? each.data : each.more;
    // A joined rank counts in an average.
    const float divisor =
        kind == Plan::kAverage ? static_cast<float>(plan.joins ? player.size : count) : 1.0f;
    for (size_t at = 0; at < expected.size(); ++at) {
      CHECK_NEAR(found[at], expected[at] / divisor, 1e-4);
    }
  }
}

void Soak(Player& player) {
  const unsigned seed = Seed();
  std::minstd_rand shared(seed), own(seed + 1 + static_cast<unsigned>(player.rank));
  std::vector<std::array<Submitted, kNames>> rounds(kRounds);
  std::vector<Submitted> lost(kRounds);
  bool timeline = false;
  const std::string path = std::string(P_tmpdir) + "/hororing_soak." + std::to_string(getpid());
  for (auto& tries : rounds) {
    const Plan plan(shared, player.size);
    int64_t set = kWorldSet;
    if (plan.with_set) {
      std::vector<int32_t> ranks;
      for (int rank = 0; rank < player.size; ++rank) {
        if (rank != plan.left_out) ranks.push_back(rank);
      }
      CHECK_OK(player.AddSet(ranks, &set));
    }
    std::thread switching;
    if (plan.timeline && player.rank == 0) {
      timeline = !timeline;
      switching = std::thread([&player, &path, on = timeline] {
        CHECK_OK(on ? player.engine->StartTimeline(path, true)
                    : player.engine->StopTimeline(kTestTimeout));
      });
    }
    if (!plan.joins || player.rank != plan.left_out) {
      std::vector<size_t> order;
      for (size_t i = 0; i < kNames; ++i) {
        if (plan.TakesPart(i, player.rank)) order.push_back(i);
      }
      std::shuffle(order.begin(), order.end(), own);
      const auto half = [&](size_t begin, size_t end) {
        for (size_t at = begin; at < end; ++at) {
          SubmitTensor(player, plan, order[at], static_cast<int32_t>(set), &tries[order[at]]);
        }
        for (size_t at = begin; at < end; ++at)
          CheckResult(player, plan, order[at], tries[order[at]]);
      };
      const size_t cut = own() % (order.size() + 1);
      std::thread second(half, cut, order.size());
      half(0, cut);
      second.join();
      // Some ranks do not wait for this one.
      Submitted& last = lost[static_cast<size_t>(&tries - rounds.data())];
      last.data.assign(3, 1.0f);
      const std::string name = "lost" + std::to_string(&tries - rounds.data());
      CHECK_OK(player.Submit(name, last.data, ReduceOp::kSum, &last.handle));
      if (own() % 2 == 0) {
        CHECK(player.handles->Release(last.handle));
      } else {
        CHECK_OK(player.Wait(last.handle));
      }
    }
    if (plan.joins) {
      int64_t last = -1;
      CHECK_OK(player.Join(&last));
    }
    int64_t removed = 0;
    if (plan.with_set) CHECK_OK(player.RemoveSet(set, &removed));
    if (switching.joinable()) switching.join();
  }
  // After the barrier, the abandoned requests are complete.
  int64_t none = 0;
  CHECK_OK(player.Control(Collective::kBarrier, &none));
  std::remove(path.c_str());
}

EngineConfig Config(int capacity) {
  EngineConfig config;
  config.cache_capacity = capacity;
  config.fusion_bytes = 2048;
  config.verify = 5;
  return config;
}

TEST(everything_in_turn_on_one_host) {
  for (int capacity : {0, 4, 100}) Play(3, Config(capacity), Soak);
}

TEST(everything_in_turn_on_several_hosts) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 1, 0, 1}}) {
    for (int capacity : {4, 100}) PlayOn(hosts, Config(capacity), Soak);
  }
  for (const Hosts& hosts : {Hosts{0, 1, 2}, Hosts{0, 1, 1, 1}}) PlayOn(hosts, Config(6), Soak);
}

}  // namespace
}  // namespace hororing_test
