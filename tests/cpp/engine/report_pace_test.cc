// When requests are reported: those of a batch together, awaited ones at once.
#include "engine/report_pace.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_world.h"

namespace hororing_test {
namespace {

constexpr TimeNs kCycleTime = 8 * kMillisecond;

TEST(the_first_requests_wait_a_moment_and_as_long_as_they_are_a_burst) {
  const ReportPace pace(kCycleTime);
  const TimeNs first = kSecond, moment = first + kMillisecond;
  CHECK_EQ(pace.Due(first, 1, first), moment);
  CHECK_EQ(pace.Due(first, 1, moment), moment);
  CHECK_EQ(pace.Due(first, 300, moment), first + kCycleTime);
  CHECK_EQ(pace.Due(first, 2, moment), moment);
  CHECK_EQ(pace.Due(first, 100000, first + kCycleTime), first + kCycleTime);
}

TEST(reports_are_a_while_apart) {
  ReportPace pace(kCycleTime);
  pace.OnLocalReport(kSecond);
  CHECK(!pace.unanswered());
  CHECK_EQ(pace.Due(kSecond + 1, 1, kSecond + 1), kSecond + kCycleTime);
  const TimeNs later = 2 * kSecond;
  CHECK_EQ(pace.Due(later, 1, later), later + kMillisecond);
}

TEST(who_has_reported_is_silent_until_it_is_answered) {
  ReportPace pace(kCycleTime);
  pace.set_cycle_time(5 * kCycleTime);  // other ranks may wait for the next report
  pace.OnReportSent(kSecond);
  CHECK(pace.unanswered());
  const TimeNs end = kSecond + ReportPace::kUnansweredCycles * kCycleTime;
  CHECK_EQ(pace.Due(kSecond + 1, 1, kSecond + 1), end);
  CHECK_EQ(pace.Due(kSecond + 1, 1000, kSecond + kCycleTime), end);
  pace.OnAnswer();
  CHECK(!pace.unanswered());
  CHECK_EQ(pace.Due(kSecond + 1, 1, kSecond + 1), kSecond + 5 * kCycleTime);
}

// Tensors come too slowly for a burst, on a rank that is ahead of the other, in step, or behind.
TEST(the_reports_of_a_batch_do_not_grow_with_its_tensors) {
  constexpr int kTensors = 200, kRounds = 4;
  EngineConfig config;
  config.cycle_time_ns = 4 * kMillisecond;  // a rank waits eight times as long for an answer
  for (const int late : {-1, 0, 1}) {
    Play(2, config, [&](Player& player) {
      std::vector<std::vector<float>> data(kTensors, std::vector<float>(1, 1.0f));
      std::vector<int64_t> handles(kTensors);
      const Stats& stats = player.engine->stats();
      int64_t sent = 0, batches = 0;
      TimeNs begin = 0;
      for (int round = 0; round <= kRounds; ++round) {
        if (round == 1) sent = stats.control_messages_sent;
        if (round == 1) batches = stats.batches;
        if (round == 1) begin = NowNs();
        if (player.rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        for (int i = 0; i < kTensors; ++i) {
          const size_t place = static_cast<size_t>(i);
          CHECK_OK(player.Submit(std::to_string(i), data[place], ReduceOp::kSum, &handles[place]));
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        for (const int64_t handle : handles) CHECK_OK(player.Wait(handle));
      }
      // On a busy machine the sleeps are long, and answers late.
      const int64_t cycles = (NowNs() - begin) / config.cycle_time_ns;
      // A caller that waits causes a report at once, even without an answer to the last one.
      CHECK(stats.control_messages_sent - sent <= stats.batches - batches + kRounds + cycles / 8);
      CHECK(stats.batches - batches < 2 * cycles + 4 * kRounds);
    });
  }
}

// It waits neither for the cycle time nor for an answer.
TEST(what_somebody_waits_or_polls_for_is_reported_at_once) {
  EngineConfig config;
  config.cycle_time_ns = 10 * kTestTimeout;
  Play(2, config, [](Player& player) {
    std::vector<float> early(1, 1.0f), late(1, 1.0f);
    int64_t first = 0, second = 0;
    if (player.rank == 0) {
      // Waits for both reports of the other rank.
      const Stats& stats = player.engine->stats();
      const TimeNs deadline = After(NowNs(), kTestTimeout / 4);
      while (stats.control_messages_received < 2 && NowNs() < deadline) sched_yield();
      CHECK_EQ(stats.control_messages_received.load(), int64_t{2});
    }
    CHECK_OK(player.Submit("early", early, ReduceOp::kSum, &first));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK_EQ(player.engine->stats().control_messages_sent.load(), int64_t{0});
    CHECK(player.engine->Poll(first) == HandleState::kPending);
    const TimeNs soon = After(NowNs(), kTestTimeout / 4);
    while (player.engine->stats().control_messages_sent == 0 && NowNs() < soon) sched_yield();
    CHECK_OK(player.Submit("late", late, ReduceOp::kSum, &second));
    CHECK_OK(player.Wait(second));
    CHECK_OK(player.Wait(first));
  });
}

TEST(a_burst_that_nobody_waits_for_is_reduced) {
  constexpr size_t kCount = 500;
  Play(3, {}, [](Player& player) {
    std::vector<std::vector<float>> data(kCount, std::vector<float>(1, 1.0f));
    std::vector<int64_t> handles(kCount);
    for (int round = 0; round < 3; ++round) {
      for (size_t i = 0; i < kCount; ++i) {
        CHECK_OK(player.Submit(std::to_string(i), data[i], ReduceOp::kSum, &handles[i]));
      }
      const TimeNs deadline = After(NowNs(), kTestTimeout);
      for (const int64_t handle : handles) {
        while (player.handles->Poll(handle) == HandleState::kPending && NowNs() < deadline)
          sched_yield();
        CHECK(player.handles->Poll(handle) == HandleState::kDone);
        player.handles->Release(handle);
      }
    }
    CHECK_EQ(data[kCount - 1][0], 27.0f);
  });
}

}  // namespace
}  // namespace hororing_test
