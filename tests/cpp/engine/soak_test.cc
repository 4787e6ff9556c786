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
  explicit Plan(std::minstd_rand& shared, int size) {
    const auto draw = [&](unsigned of) { return static_cast<int>(shared() % of); };
    const auto ranks = static_cast<unsigned>(size);
    in_set = draw(4) == 0;
    joins = !in_set && draw(5) == 0;
    left_out = draw(ranks);  // the rank outside the set, or the one that joins
    wrong = draw(4) == 0 && !joins ? draw(ranks) : -1;
    timeline = draw(6) == 0;
    for (size_t i = 0; i < kNames; ++i) {
      kinds[i] = draw(8);
      elements[i] = draw(5) == 0 ? 700 : 3;
    }
  }
  bool in_set, joins, timeline;
  int left_out, wrong;
  std::array<int, kNames> kinds;  // 0: a group, 1: an all-gather, 2: averages; else a sum
  std::array<size_t, kNames> elements;
};

struct Try {
  std::vector<float> data, more;
  int64_t handle = 0;
};

void Send(Player& player, const Plan& plan, size_t i, int32_t set, Try* each) {
  const std::string name = "t" + std::to_string(i);
  // Only the first tensor may be wrong, on one rank.
  const bool wrong = i == 0 && player.rank == plan.wrong;
  const int kind = plan.joins && plan.kinds[i] == 1 ? 3 : plan.kinds[i];
  each->data.assign(plan.elements[i] + (wrong ? 1 : 0), static_cast<float>(player.rank + 1));
  each->more = each->data;
  auto entry = Player::Entry(name, each->data, ReduceOp::kSum, set);
  if (kind == 0) {
    entry->views.push_back(entry->views[0]);
    entry->views[1].input = entry->views[1].output = each->more.data();
    entry->request.tensors.push_back(entry->request.tensors[0]);
  } else if (kind == 1) {
    entry->request.kind = Collective::kAllgather;
  } else {
    const ReduceOp op = kind == 2 ? ReduceOp::kAverage : ReduceOp::kSum;
    CHECK_OK(player.Submit(name, each->data, op, &each->handle, false, set));
    return;
  }
  CHECK_OK(player.Submit(std::move(entry), false, &each->handle));
}

void Look(Player& player, const Plan& plan, size_t i, Try& each) {
  const Status status = player.Wait(each.handle);
  const int kind = plan.joins && plan.kinds[i] == 1 ? 3 : plan.kinds[i];
  const bool member = !plan.in_set || plan.wrong != plan.left_out;
  if (i == 0 && plan.wrong >= 0 && member && kind != 1) {
    CHECK(status.code() == Code::kMismatch);
    return;
  }
  CHECK_OK(status);
  if (kind == 1) return;
  float sum = 0;
  int count = 0;
  for (int rank = 0; rank < player.size; ++rank) {
    if ((plan.in_set || plan.joins) && rank == plan.left_out) continue;
    sum += static_cast<float>(rank + 1);
    ++count;
  }
  if (kind == 2) sum /= static_cast<float>(plan.joins ? player.size : count);
  for (const float value : each.data) CHECK_NEAR(value, sum, 1e-5);
  for (const float value : each.more) {
    if (kind == 0) CHECK_NEAR(value, sum, 1e-5);
  }
}

void Soak(Player& player) {
  const unsigned seed = Seed();
  std::minstd_rand shared(seed), own(seed + 1 + static_cast<unsigned>(player.rank));
  std::vector<std::array<Try, kNames>> rounds(kRounds);
  std::vector<Try> lost(kRounds);
  bool timeline = false;
  const std::string path = std::string(P_tmpdir) + "/hororing_soak." + std::to_string(getpid());
  for (auto& tries : rounds) {
    const Plan plan(shared, player.size);
    int64_t set = kWorldSet;
    if (plan.in_set) {
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
    const bool takes_part = !(plan.in_set || plan.joins) || player.rank != plan.left_out;
    if (takes_part) {
      std::array<size_t, kNames> order;
      for (size_t i = 0; i < kNames; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), own);
      const auto half = [&](size_t begin, size_t end) {
        for (size_t at = begin; at < end; ++at) {
          Send(player, plan, order[at], static_cast<int32_t>(set), &tries[order[at]]);
        }
        for (size_t at = begin; at < end; ++at) Look(player, plan, order[at], tries[order[at]]);
      };
      const size_t cut = own() % (kNames + 1);
      std::thread second(half, cut, kNames);
      half(0, cut);
      second.join();
      // Some ranks do not wait for this one.
      Try& last = lost[static_cast<size_t>(&tries - rounds.data())];
      last.data.assign(3, 1.0f);
      const std::string name = "lost" + std::to_string(&tries - rounds.data());
      CHECK_OK(player.Submit(name, last.data, ReduceOp::kSum, &last.handle, false,
                             static_cast<int32_t>(set)));
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
    if (plan.in_set) CHECK_OK(player.RemoveSet(set, &removed));
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
  return config;
}

TEST(everything_in_turn_on_one_host) {
  for (int capacity : {0, 4, 100}) Play(3, Config(capacity), Soak);
}

TEST(everything_in_turn_on_several_hosts) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 1, 0, 1}}) {
    for (int capacity : {4, 100}) PlayOn(hosts, Config(capacity), Soak);
  }
}

}  // namespace
}  // namespace hororing_test
