// Rung 2: engines that tune, with ranks as threads. Results must be the same as without tuning. A
// request that is held forever fails in Wait.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "hosts_engine_world.h"

using namespace hororing_test;

namespace {

EngineConfig Tuned() {
  EngineConfig config;
  config.tune.emplace();
  config.tune->steps_per_sample = 1;
  return config;
}

void Compute(TimeNs duration) {
  const TimeNs end = NowNs() + duration;
  while (NowNs() < end) std::this_thread::yield();
}

float Value(size_t tensor, int step, int rank) {
  return static_cast<float>(tensor + 1) * static_cast<float>(rank + 1) + static_cast<float>(step);
}

// Runs a step of the tensors `names` among `ranks`, and checks every sum.
void TakeStep(Player& player, const std::vector<std::string>& names, int step, TimeNs pause,
              int32_t process_set, const std::vector<int>& ranks) {
  std::vector<std::vector<float>> data;
  for (size_t i = 0; i < names.size(); ++i) {
    data.emplace_back(20 * i * i + 1, Value(i, step, player.rank));
  }
  std::vector<int64_t> handles(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    if (pause > 0) Compute(pause);
    CHECK_OK(player.Submit(names[i], data[i], ReduceOp::kSum, &handles[i], false, process_set));
  }
  for (size_t i = 0; i < names.size(); ++i) {
    CHECK_OK(player.Wait(handles[i]));
    float expected = 0;
    for (int rank : ranks) expected += Value(i, step, rank);
    CHECK_EQ(data[i].back(), expected);
  }
}

std::vector<int> All(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

std::vector<std::string> Layers(size_t count) {
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) names.push_back("layer" + std::to_string(i));
  return names;
}

}  // namespace

TEST(sums_are_the_same_with_tuning_and_without) {
  for (const int size : {1, 2, 3, 5}) {
    for (const EngineConfig& config : {Tuned(), EngineConfig()}) {
      Play(size, config, [](Player& player) {
        std::mt19937 random(hororing_test::Seed());  // the same on all ranks
        for (int step = 0; step < 60; ++step) {
          std::vector<std::string> names = Layers(10);
          if (random() % 8 == 0) names.resize(1 + random() % 10);
          if (random() % 8 == 0) names.push_back("more");
          TakeStep(player, names, step, step % 3 == 0 ? 20 * kMicrosecond : 0, kWorldSet,
                   All(player.size));
        }
      });
    }
  }
}

// The tuner tries cycle times, and all ranks end with the same one.
TEST(all_ranks_try_the_same_and_settle_on_it) {
  std::string log = std::string(P_tmpdir) + "/hororing_tuned." + std::to_string(getpid());
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2}, Hosts{0, 0}}) {
    EngineConfig config = Tuned();
    config.tune->warmup_samples = 1;
    config.tune->tune_fusion = false;
    config.tune_log = log;
    std::array<std::atomic<TimeNs>, 4> cycle_times{};
    PlayOn(hosts, config, [&](Player& player) {
      // Rank 0 tells the others when its log has the line "best".
      float over = 0;
      for (int step = 0; step < 400 && over == 0; ++step) {
        for (const size_t elements : {size_t{100}, size_t{100000}, size_t{1200000}}) {
          std::vector<float> data(elements, static_cast<float>(player.rank + step));
          CHECK_OK(player.Allreduce("t" + std::to_string(elements), data));
          float expected = 0;
          for (int rank = 0; rank < player.size; ++rank)
            expected += static_cast<float>(rank + step);
          CHECK_EQ(data.front(), expected);
          CHECK_EQ(data.back(), expected);
        }
        std::vector<float> told = {0};
        if (player.rank == 0) {
          std::ifstream lines(log);
          for (std::string line; std::getline(lines, line);) {
            if (Contains(line, ",best,")) told[0] = 1;
          }
        }
        CHECK_OK(player.Allreduce("over", told));
        over = told[0];
      }
      CHECK_EQ(over, 1.0f);
      cycle_times[static_cast<size_t>(player.rank)] = player.engine->stats().cycle_time_ns.load();
    });
    for (size_t rank = 1; rank < hosts.size(); ++rank)
      CHECK_EQ(cycle_times[rank].load(), cycle_times[0].load());
    std::ifstream lines(log);
    std::string all((std::istreambuf_iterator<char>(lines)), std::istreambuf_iterator<char>());
    CHECK(Contains(all, ",round 1,"));
    std::remove(log.c_str());
  }
}

TEST(sets_and_joined_ranks_do_as_without_tuning) {
  Play(3, Tuned(), [](Player& player) {
    for (int round = 0; round < 3; ++round) {
      int64_t id = 0, removed = 0, last = 0;
      CHECK_OK(player.AddSet({0, 2}, &id));
      for (int step = 0; step < 15; ++step) {
        TakeStep(player, Layers(6), step, 30 * kMicrosecond, kWorldSet, All(3));
        if (player.rank == 1) continue;
        TakeStep(player, {"a", "b", "c"}, step, 30 * kMicrosecond, static_cast<int32_t>(id),
                 {0, 2});
      }
      // Rank 1 has fewer batches.
      for (int step = 0; step < 8 && player.rank != 1; ++step) {
        TakeStep(player, Layers(6), step, 30 * kMicrosecond, kWorldSet, {0, 2});
      }
      CHECK_OK(player.Join(&last));
      CHECK_OK(player.RemoveSet(id, &removed));
      CHECK_EQ(removed, int64_t{1});
    }
  });
}
