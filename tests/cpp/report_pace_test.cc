// When requests are reported: bursts together, the more of a step together, what somebody waits for
// at once.
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

using Look = HandleTable::Look;

TEST(the_first_requests_are_reported_at_once_and_a_burst_in_few_reports) {
  ReportPace pace;
  TimeNs now = kSecond;
  pace.Reported(1, now);
  CHECK(pace.next_look_ns() <= now);  // it may be the only one
  // One each two microseconds, for two milliseconds.
  int reports = 0;
  for (const TimeNs end = now + 2 * kMillisecond; now < end; ++reports) {
    const TimeNs next = std::max(now + 2 * kMicrosecond, pace.next_look_ns());
    pace.Reported(static_cast<size_t>((next - now) / (2 * kMicrosecond)), next);
    now = next;
    CHECK(pace.next_look_ns() - now <= 200 * kMicrosecond);
  }
  CHECK(reports < 20);
  // Nothing more came while the loop slept; what comes then is a first one.
  now = pace.next_look_ns() + kMillisecond;
  pace.Reported(1, now);
  CHECK(pace.next_look_ns() <= now);
}

TEST(requests_that_come_now_and_then_are_reported_at_once) {
  ReportPace pace;
  for (TimeNs now = kSecond; now < 2 * kSecond; now += 30 * kMicrosecond) {
    pace.Reported(1, now);
    CHECK(pace.next_look_ns() <= now);
  }
}

TEST(after_a_report_more_may_come_together_until_it_is_answered) {
  constexpr TimeNs kHold = kMillisecond;
  ReportPace pace;
  CHECK(!pace.unanswered());
  pace.Told(kSecond, kHold);
  CHECK(pace.unanswered());
  CHECK_EQ(pace.unanswered_until_ns(), kSecond + kHold / 2);  // while it is held there
  pace.Told(2 * kSecond, kHold);
  CHECK_EQ(pace.unanswered_until_ns(), 2 * kSecond + kHold);
  pace.Answered();
  CHECK(!pace.unanswered());
}

// Tensors that come too slowly for a burst, on a rank that is behind the other, ahead of it, and
// with it.
TEST(the_reports_of_a_batch_do_not_grow_with_its_tensors) {
  constexpr int kTensors = 200, kRounds = 4;
  EngineConfig config;
  config.hold_ns = 20 * kMillisecond;
  for (const int late : {-1, 0, 1}) {
    Play(2, config, [late](Player& player) {
      std::vector<std::vector<float>> data(kTensors, std::vector<float>(1, 1.0f));
      std::vector<int64_t> handles(kTensors);
      const Stats& stats = player.engine->stats();
      int64_t sent = 0, batches = 0;
      for (int round = 0; round <= kRounds; ++round) {
        if (round == 1) sent = stats.control_messages_sent;
        if (round == 1) batches = stats.batches;
        if (player.rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        for (int i = 0; i < kTensors; ++i) {
          const size_t place = static_cast<size_t>(i);
          CHECK_OK(player.Submit(std::to_string(i), data[place], ReduceOp::kSum, &handles[place]));
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        for (const int64_t handle : handles) CHECK_OK(player.Wait(handle));
      }
      // One more while the coordinator holds a batch, and one for who waits in the end.
      CHECK(stats.control_messages_sent - sent <= 2 * (stats.batches - batches) + 2 * kRounds);
    });
  }
}

TEST(what_somebody_waits_for_is_reported_although_an_answer_is_due) {
  EngineConfig config;
  config.hold_ns = kPatience;
  Play(2, config, [](Player& player) {
    std::vector<float> early(1, 1.0f), late(1, 1.0f);
    int64_t first = 0, second = 0;
    if (player.rank == 0) {
      // Not before the other rank has told of both, or the test has taken too long.
      const Stats& stats = player.engine->stats();
      const TimeNs deadline = After(NowNs(), kPatience / 4);
      while (stats.control_messages_received < 2 && NowNs() < deadline) sched_yield();
      CHECK_EQ(stats.control_messages_received.load(), int64_t{2});
    }
    CHECK_OK(player.Submit("early", early, ReduceOp::kSum, &first));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
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
      const TimeNs deadline = After(NowNs(), kPatience);
      for (const int64_t handle : handles) {
        while (player.handles->Poll(handle) == Look::kPending && NowNs() < deadline) sched_yield();
        CHECK(player.handles->Poll(handle) == Look::kDone);
        player.handles->Release(handle);
      }
    }
    CHECK_EQ(data[kCount - 1][0], 27.0f);
  });
}

}  // namespace
}  // namespace hororing_test
