// Rung 2: one engine per rank, in whole worlds.
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/sha256.h"
#include "check.h"
#include "collective/collectives.h"
#include "engine/handshake.h"
#include "engine_world.h"
#include "transport/bootstrap.h"

using namespace hororing;
using namespace hororing_test;

TEST(sums_are_right_in_every_world_size) {
  for (int size : {1, 2, 3, 5, 8}) {
    Play(size, {}, [](Player& player) {
      for (int step = 0; step < 20; ++step) {
        std::vector<float> data(static_cast<size_t>(step * 37), 0.0f);
        for (size_t i = 0; i < data.size(); ++i) {
          data[i] = static_cast<float>(player.rank + 1) * static_cast<float>(i % 11);
        }
        CHECK_OK(player.Allreduce("x", data));
        const float ranks = static_cast<float>(player.size * (player.size + 1) / 2);
        for (size_t i = 0; i < data.size(); ++i) {
          CHECK_EQ(data[i], ranks * static_cast<float>(i % 11));
        }
      }
    });
  }
}

TEST(tensors_submitted_in_random_orders_are_matched_by_name) {
  const unsigned seed = hororing_test::Seed();
  for (const int cache : {0, 3, 1024}) {
    for (const int64_t fusion : {int64_t{0}, int64_t{4096}, int64_t{64} << 20}) {
      EngineConfig config;
      config.cache_capacity = cache;
      config.fusion_bytes = fusion;
      Play(3, config, [&](Player& player) {
        std::mt19937 order(seed + static_cast<unsigned>(player.rank));
        constexpr size_t kTensors = 40;
        for (int step = 0; step < 5; ++step) {
          std::vector<std::vector<float>> data;
          std::vector<size_t> sequence(kTensors);
          std::iota(sequence.begin(), sequence.end(), size_t{0});
          std::shuffle(sequence.begin(), sequence.end(), order);
          for (size_t t = 0; t < kTensors; ++t) {
            data.emplace_back(t * 17 % 301, static_cast<float>(t + 1));
          }
          std::vector<int64_t> handles(kTensors);
          for (size_t t : sequence) {
            CHECK_OK(
                player.Submit("t" + std::to_string(t), data[t], ReduceOp::kAverage, &handles[t]));
          }
          for (size_t t : sequence) CHECK_OK(player.Wait(handles[t]));
          for (size_t t = 0; t < kTensors; ++t) {
            for (float value : data[t]) CHECK_EQ(value, static_cast<float>(t + 1));
          }
        }
      });
    }
  }
}

TEST(a_mismatch_fails_one_tensor_on_every_rank_and_the_job_goes_on) {
  Play(3, {}, [](Player& player) {
    std::vector<float> bad(player.rank == 1 ? 5u : 4u, 1.0f), good(4, 1.0f);
    int64_t good_handle = 0;
    CHECK_OK(player.Submit("good", good, ReduceOp::kSum, &good_handle));
    const Status status = player.Allreduce("bad", bad);
    CHECK(status.code() == Code::kMismatch);
    CHECK(Contains(status.message(), "'bad'"));
    CHECK(Contains(status.message(), "ranks 0,2: [4]; rank 1: [5]"));
    CHECK_OK(player.Wait(good_handle));
    CHECK_OK(player.Allreduce("bad", good));
    CHECK_EQ(good[0], 9.0f);
    // The name is cached by now; rank 1 changes its shape.
    CHECK(player.Allreduce("bad", bad).code() == Code::kMismatch);
  });
}

TEST(a_name_in_flight_is_refused_and_leaves_the_first_one_alone) {
  Play(2, {}, [](Player& player) {
    std::vector<float> first(4, 1.0f), second(4, 1.0f), done(1, 0.0f);
    int64_t handle = 0, unused = 0;
    if (player.rank == 0) {
      CHECK_OK(player.Submit("x", first, ReduceOp::kSum, &handle));
      const Status again = player.Submit("x", second, ReduceOp::kSum, &unused);
      CHECK(again.code() == Code::kDuplicateName);
      CHECK(Contains(again.message(), "'x'"));
    }
    CHECK_OK(player.Allreduce("both are here", done));
    if (player.rank == 1) CHECK_OK(player.Submit("x", first, ReduceOp::kSum, &handle));
    CHECK_OK(player.Wait(handle));
    CHECK_EQ(first[0], 2.0f);
  });
}

TEST(what_was_submitted_before_a_barrier_has_landed_after_it) {
  EngineConfig config;
  config.cycle_time_ns = kTestTimeout;
  Play(3, config, [](Player& player) {
    for (int step = 0; step < 10; ++step) {
      std::vector<float> data(300000, 1.0f), later(1, 1.0f);
      int64_t handle = 0, held_for = 0, none = 0;
      // `data` is held because of `later`, and released by the barrier.
      if (player.rank == 0) CHECK_OK(player.Submit("later", later, ReduceOp::kSum, &held_for));
      CHECK_OK(player.Submit("data", data, ReduceOp::kSum, &handle));
      CHECK_OK(player.Control(Collective::kBarrier, &none));
      CHECK_EQ(data.back(), 3.0f);
      CHECK(player.handles->Poll(handle) == HandleState::kDone);
      CHECK_OK(player.Wait(handle));
      if (player.rank != 0) CHECK_OK(player.Submit("later", later, ReduceOp::kSum, &held_for));
      CHECK_OK(player.Wait(held_for));
    }
  });
}

TEST(gathered_tensors_may_differ_in_rows) {
  Play(3, {}, [](Player& player) {
    for (int step = 0; step < 4; ++step) {
      std::vector<float> mine(static_cast<size_t>(player.rank * step),
                              static_cast<float>(player.rank));
      int64_t handle = 0;
      CHECK_OK(player.Gather("g", mine, &handle));
      ResultBuffer result;
      CHECK_OK(player.Take(handle, &result));
      CHECK_EQ(result.rows(), int64_t{3 * step});
      const float* values = static_cast<const float*>(result.data());
      for (int i = 0; i < 3 * step; ++i) CHECK_EQ(values[i], i < step ? 1.0f : 2.0f);
    }
  });
}

TEST(shutting_down_on_one_rank_fails_what_waits_on_the_others) {
  Play(3, {}, [](Player& player) {
    std::vector<float> data(4, 1.0f);
    CHECK_OK(player.Allreduce("together", data));
    if (player.rank == 2) {
      CHECK(player.engine->Shutdown("bye", kTestTimeout));
      return;
    }
    const Status status = player.Allreduce("alone", data);
    CHECK(status.code() == Code::kShutDown);
    CHECK(Contains(status.message(), "rank 2 has shut down"));
    CHECK_EQ(status.rank(), 2);
    CHECK(player.Allreduce("later", data).code() == Code::kShutDown);
    CHECK(player.engine->state() == Engine::State::kStopped);
  });
}

TEST(an_abort_reaches_the_peers_with_its_reason) {
  Play(3, {}, [](Player& player) {
    std::vector<float> data(4, 1.0f);
    CHECK_OK(player.Allreduce("together", data));
    if (player.rank == 1) {
      CHECK(player.engine->Abort("ValueError: bad data", kTestTimeout));
      return;
    }
    const Status status = player.Allreduce("alone", data);
    CHECK(status.code() == Code::kPeerLost);
    CHECK(Contains(status.message(), "ValueError: bad data"));
    CHECK_EQ(status.rank(), 1);
    CHECK(player.engine->state() == Engine::State::kFailed);
  });
}

TEST(a_stall_fails_the_job_after_the_shutdown_time) {
  EngineConfig config;
  // Also the limit of silence: on a busy machine, a thread may wait for long until it runs.
  config.stall.shutdown_ns = 4 * kSecond;
  Play(2, config, [](Player& player) {
    std::vector<float> data(4, 1.0f);
    if (player.rank == 0) {
      const Status status = player.Allreduce("only rank 0 has this", data);
      CHECK(status.code() == Code::kStalled);
      CHECK(Contains(status.message(), "submitted by rank 0, missing rank 1"));
      return;
    }
    for (Status status;;) {  // rank 1 gets the error, too
      status = player.Allreduce("tick", data);
      if (status.ok()) continue;
      CHECK(status.code() == Code::kStalled);
      break;
    }
  });
}

// 3 ranks, of which rank 1 has another value of a knob behind `before` in its fingerprint.
void CheckDifferentSettings(const std::string& before) {
  auto transports = MakeInprocWorld(3, 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      EngineConfig config;
      config.timeout_ns = kTestTimeout;
      config.fingerprint = before + "FUSION_BYTES=" + std::to_string(rank == 1 ? 1 : 2) + "\nX=x\n";
      const auto make_world = [&](World* world) {
        world->transport = std::move(transports[static_cast<size_t>(rank)]);
        world->topology = MakeTopology(rank, {"host", "host", "host"});
        return Status::Ok();
      };
      Player player;
      const std::string text = Start(config, make_world, &player).message();
      CHECK(Contains(text, "FUSION_BYTES: rank 1: 1; ranks 0,2: 2") ||
            Contains(text, "FUSION_BYTES: ranks 0,2: 2; rank 1: 1"));
      CHECK(!Contains(text, "SETS"));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(different_settings_are_refused_on_every_rank_with_the_knob_and_the_ranks) {
  CheckDifferentSettings("");
}

TEST(settings_behind_a_long_text_are_compared) {
  for (const size_t bytes : {480u, 4200u, 1u << 20}) {
    CheckDifferentSettings("SETS=" + std::string(bytes, ';') + "\n");
  }
}

TEST(rank_0_asks_one_rank_of_each_other_host_for_its_clock) {
  auto transports = MakeInprocWorld(5, 0);
  std::vector<std::thread> threads;
  for (const int rank : {0, 2, 4}) {  // 1 and 3 do nothing
    threads.emplace_back([&, rank] {
      const Topology topology = MakeTopology(rank, {"a", "a", "b", "b", "c"});
      std::vector<TimeNs> offsets;
      CHECK_OK(MeasureClocks(*transports[static_cast<size_t>(rank)], topology,
                             After(NowNs(), 20 * kSecond), &offsets));
      CHECK_EQ(offsets[1], TimeNs{0});
      CHECK_EQ(offsets[3], offsets[2]);
      CHECK((offsets[2] != 0 && offsets[4] != 0) == (rank == 0));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(a_rank_that_gives_up_starting_is_heard_of_by_those_who_have_started) {
  // Rank 1 takes part in the start except for its last message to rank 2.
  auto transports = MakeInprocWorld(3, 0);
  std::thread stuck([&] {
    Transport& transport = *transports[1];
    TransportBootstrap::Beginning text, other;
    const std::string digest = Sha256("a=1");
    text.bytes = digest.copy(text.text, sizeof text.text);
    CHECK_OK(SendReceive(transport, 0, &text, sizeof text, 2, &other, sizeof other, kForever));
    CHECK_OK(transport.Wait(transport.Receive(0, &other, sizeof other), kForever));
  });
  Player players[3];
  const auto start = [&](int rank) {
    EngineConfig config;
    config.timeout_ns = rank == 2 ? 3 * kSecond : kTestTimeout;
    config.fingerprint = "a=1";
    const auto make_world = [&, rank](World* world) {
      world->transport = std::move(transports[static_cast<size_t>(rank)]);
      world->topology = MakeTopology(rank, {"host", "host", "host"});
      return Status::Ok();
    };
    return Start(config, make_world, &players[rank]);
  };
  std::thread gives_up([&] { CHECK(!start(2).ok()); });
  CHECK_OK(start(0));
  std::vector<float> data(1, 1.0f);
  CHECK(players[0].Allreduce("x", data).code() == Code::kTransport);
  CHECK(players[0].engine->Shutdown("", kTestTimeout));
  gives_up.join();
  stuck.join();
}

TEST(a_reason_that_is_passed_on_has_one_prefix) {
  auto transports = MakeInprocWorld(2, 0);
  Player player;
  const auto make_world = [&](World* world) {
    world->transport = std::move(transports[0]);
    return Status(Code::kPeerLost, "init: rank 1 died", 1);
  };
  EngineConfig config;
  config.timeout_ns = kTestTimeout;
  CHECK_EQ(Start(config, make_world, &player).message(), std::string("init: rank 1 died"));
  CHECK_EQ(transports[1]->CheckPeers().message(), std::string("init: rank 1 died"));
}

int64_t Create(HandleTable& table) {
  int64_t handle = 0;
  table.Create(&handle, 1);
  return handle;
}

TEST(a_waiter_for_a_handle_that_is_released_is_told) {
  HandleTable table;
  const int64_t handle = Create(table);
  std::atomic<bool> waits{false};
  std::thread waiter([&] {
    Status status;
    waits = true;
    CHECK(table.Wait(handle, kTestTimeout, &status) == HandleState::kUnknown);
  });
  while (!waits) std::this_thread::yield();
  const TimeNs begin = NowNs();
  CHECK(table.Release(handle));
  CHECK(!table.Release(handle));
  waiter.join();
  CHECK(NowNs() - begin < kTestTimeout / 2);
  table.Complete(handle, Status::Ok(), {});
}

TEST(one_thread_hears_of_whichever_handle_is_complete) {
  HandleTable table;
  const int64_t slow = Create(table), quick = Create(table), nobodys = Create(table);
  const int64_t none = table.NextCompletion(-1, kTestTimeout);
  CHECK(table.Poll(slow) == HandleState::kPending);
  CHECK(table.Poll(quick) == HandleState::kPending);
  table.Complete(nobodys, Status::Ok(), {});
  CHECK(table.NextCompletion(none, 0) == none);
  std::thread engine([&] { table.Complete({quick}); });
  const int64_t one = table.NextCompletion(none, kTestTimeout);
  CHECK(one == none + 1);
  CHECK(table.Poll(quick) == HandleState::kDone);
  CHECK(table.NextCompletion(one, 0) == one);
  engine.join();
  table.Complete(slow, Status(Code::kShutDown, "over"), {});
  CHECK(table.NextCompletion(one, kTestTimeout) == one + 1);
}

TEST(a_handle_that_is_done_is_released_at_once_and_only_then) {
  HandleTable table;
  const auto succeeds = [&](int64_t handle) {
    bool ok = false;
    const HandleState state = table.WaitMany(&handle, 1, 0, &ok);
    return state == HandleState::kDone && ok;
  };
  const int64_t pending = Create(table), failed = Create(table);
  const int64_t done = Create(table), left = Create(table);
  table.Complete(failed, Status(Code::kMismatch, "they differ"), {});
  CHECK(table.Release(left));
  table.Complete({done, left});
  for (const int64_t handle : {pending, failed}) CHECK(!succeeds(handle));
  for (const int64_t handle : {left, int64_t{0}, int64_t{-1}}) CHECK(succeeds(handle));
  CHECK(succeeds(done));
  CHECK(table.Poll(done) == HandleState::kUnknown);
  // The next handle reuses its slot.
  const int64_t mask = (int64_t{1} << HandleTable::kIndexBits) - 1;
  const int64_t next = Create(table);
  CHECK(next != done);
  CHECK_EQ(next & mask, done & mask);
  CHECK(table.Poll(next) == HandleState::kPending);
}

TEST(submitting_from_many_threads_is_safe) {
  Play(2, {}, [](Player& player) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int step = 0; step < 50; ++step) {
          std::vector<float> data(100, 1.0f);
          CHECK_OK(player.Allreduce("thread" + std::to_string(t), data));
          CHECK_EQ(data[99], 2.0f);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(callers_and_loop_thread_take_turns) {
  const unsigned seed = hororing_test::Seed();
  for (int size : {1, 2, 3}) {
    Play(size, {}, [&](Player& player) {
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
          std::mt19937 random(seed + static_cast<unsigned>(10 * player.rank + t));
          for (int step = 0; step < 100; ++step) {
            std::vector<float> ours(10, 1.0f), others(10, 2.0f);
            const std::string name = std::to_string(t);
            const bool early = random() % 2 == 0;
            int64_t first = 0, second = 0;
            CHECK_OK(player.Submit("a" + name, ours, ReduceOp::kSum, &first, random() % 2 == 0));
            if (early) CHECK_OK(player.Wait(first, 50 * kMicrosecond));
            CHECK_OK(player.Submit("b" + name, others, ReduceOp::kSum, &second, true));
            CHECK_OK(player.Wait(second, random() % 2 == 0 ? 0 : kTestTimeout));
            if (!early) CHECK_OK(player.Wait(first));
            CHECK_EQ(ours[9], static_cast<float>(player.size));
            CHECK_EQ(others[9], static_cast<float>(2 * player.size));
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  }
}

TEST(a_wait_that_was_announced_and_does_not_come_holds_nothing_up) {
  Play(2, {}, [](Player& player) {
    std::vector<float> data(4, 1.0f);
    int64_t handle = 0;
    CHECK_OK(player.Submit("x", data, ReduceOp::kSum, &handle, /*blocking=*/true));
    Status status;
    CHECK(player.handles->Wait(handle, kTestTimeout, &status) == HandleState::kDone);
    CHECK_EQ(data[0], 2.0f);
    CHECK_OK(player.Allreduce("both have waited", data));
  });
}

TEST(an_idle_engine_sleeps) {
  Play(2, {}, [](Player& player) {
    std::vector<float> data(1, 1.0f);
    CHECK_OK(player.Allreduce("x", data));
    const int64_t before = player.engine->stats().loop_wakeups;
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const int64_t wakeups = player.engine->stats().loop_wakeups - before;
    // Periodic checks run four times a second; a fixed cycle of 1 ms would run 1,000 times.
    CHECK(wakeups < 100);
    CHECK_OK(player.Allreduce("y", data));  // no rank leaves before all have slept
  });
}

TEST(steady_state_costs_one_control_message_each_way_per_batch) {
  Play(2, {}, [](Player& player) {
    constexpr int kTensors = 100;
    std::vector<std::vector<float>> data(kTensors, std::vector<float>(10, 1.0f));
    const auto step = [&] {
      std::vector<int64_t> handles(kTensors);
      for (size_t t = 0; t < kTensors; ++t) {
        CHECK_OK(player.Submit("t" + std::to_string(t), data[t], ReduceOp::kAverage, &handles[t]));
      }
      for (int64_t handle : handles) CHECK_OK(player.Wait(handle));
    };
    for (int i = 0; i < 5; ++i) step();
    const int64_t misses = player.engine->stats().cache_misses;
    for (int i = 0; i < 20; ++i) step();
    CHECK_EQ(player.engine->stats().cache_misses.load(), misses);
  });
}
