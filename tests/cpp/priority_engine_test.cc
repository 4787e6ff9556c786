// Rung 2: allreduces of many priorities through whole engines.
#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine_world.h"

using namespace hororing_test;

// Engines that take over from one another: nothing of a backlog is forgotten, results are right,
// and after a change of priorities a report is a number again.
TEST(a_backlog_of_many_priorities_is_carried_out_whoever_waits) {
  for (const int size : {1, 2, 3, 5}) {
    Play(size, {}, [](Player& player) {
      constexpr size_t kTensors = 12;
      constexpr size_t kElements = 100000;  // 0.4 MB
      std::mt19937 random(7);               // all ranks alike, but for the order
      std::mt19937 own(static_cast<unsigned>(player.rank));
      std::vector<std::vector<float>> data(kTensors);
      std::vector<int32_t> before;
      for (int round = 0; round < 12; ++round) {
        std::vector<int32_t> priorities;
        for (size_t i = 0; i < kTensors; ++i) {
          priorities.push_back(round < 4 ? 0 : static_cast<int32_t>(round / 4 * i % 7));
        }
        std::vector<size_t> order(kTensors);
        for (size_t i = 0; i < kTensors; ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), own);
        std::vector<int64_t> handles(kTensors);
        const int64_t missed_before = player.engine->stats().cache_misses;
        for (const size_t i : order) {
          const std::string name = "t" + std::to_string(i);
          data[i].assign(kElements, static_cast<float>(player.rank + 1));
          int64_t shape = 0;
          OneTensor again = Player::Again(name, data[i], ReduceOp::kSum, &shape);
          again.priority = priorities[i];
          if (player.engine->SubmitAgain(&again, 1, false, &handles[i]) == 1) continue;
          auto entry = Player::Entry(name, data[i], ReduceOp::kSum);
          entry->request.priority = priorities[i];
          CHECK_OK(player.engine->Submit(std::move(entry), false, &handles[i]));
        }
        std::shuffle(order.begin(), order.end(), random);
        const auto sum = static_cast<float>(player.size * (player.size + 1) / 2);
        for (const size_t i : order) {
          CHECK_OK(player.Wait(handles[i]));
          CHECK(data[i] == std::vector<float>(kElements, sum));
        }
        const int64_t missed = player.engine->stats().cache_misses - missed_before;
        int64_t changed = static_cast<int64_t>(round == 0 ? kTensors : 0);
        for (size_t i = 0; i < before.size(); ++i) changed += priorities[i] != before[i];
        CHECK_EQ(missed, changed);
        before = priorities;
      }
    });
  }
}
