// The one-shot exchange: all ranks agree on whether it has succeeded, even if one comes late, or
// never, or with another request; and the engine's sums have the same bits as through the loop.
#include "transport/shm/one_shot_exchange.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/arithmetic.h"
#include "check.h"
#include "engine_world.h"
#include "kernels/reduce.h"
#include "transport/shm/segment.h"
#include "world.h"

using namespace hororing;
using namespace hororing_test;

namespace {

constexpr TimeNs kSpin = 50 * kMicrosecond;

void SpinFor(TimeNs span) {
  for (const TimeNs until = NowNs() + span; NowNs() < until;) std::this_thread::yield();
}

// Runs body(exchange, rank) on every rank.
template <typename Body>
void Meet(int size, const Body& body, TimeNs spin = kSpin) {
  const auto segment = ShmSegment::OnHeap(ShmSegment::Geometry::For(size));
  Watchdog watchdog(size, kWorldLimit);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      OneShotExchange exchange(segment, rank, spin);
      body(exchange, rank);
      watchdog.Enter(rank, "done");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The payload of a rank in a round, unlike any other; its length depends on the round.
std::vector<uint32_t> PayloadOf(int round, int rank) {
  std::vector<uint32_t> payload(1 + static_cast<size_t>(round * 37) % 4096);
  for (size_t i = 0; i < payload.size(); ++i) {
    payload[i] = static_cast<uint32_t>(round) << 16 ^ static_cast<uint32_t>(rank) << 28 ^
                 static_cast<uint32_t>(i);
  }
  return payload;
}

// Ranks come to every round in step or, if `latest` is not 0, by up to `latest` late. They skip a
// round with probability `out`, and mistake it for another with probability `mistaken`. Returns the
// number of rounds in which all have met.
int PlayRounds(int size, int rounds, double out, double mistaken, TimeNs latest) {
  std::vector<std::vector<char>> met(static_cast<size_t>(size));
  InStep step(size);
  Meet(size, [&](OneShotExchange& exchange, int rank) {
    std::mt19937 random(Seed() + static_cast<unsigned>(rank));
    std::uniform_real_distribution<> chance;
    std::vector<char>& mine = met[static_cast<size_t>(rank)];
    for (int round = 0; round < rounds; ++round) {
      if (latest == 0) {
        step.Wait();
      } else {
        SpinFor(static_cast<TimeNs>(random() % static_cast<unsigned>(latest)));
      }
      mine.push_back(0);
      if (chance(random) < out) continue;
      const std::string signature =
          "round " + std::to_string(chance(random) < mistaken ? rounds + rank : round);
      const std::vector<uint32_t> payload = PayloadOf(round, rank);
      if (!exchange.Try(signature.data(), signature.size(), payload.data(), payload.size() * 4)) {
        continue;
      }
      mine.back() = 1;
      for (int peer = 0; peer < size; ++peer) {
        const std::vector<uint32_t> theirs = PayloadOf(round, peer);
        CHECK(std::memcmp(exchange.payload(peer), theirs.data(), theirs.size() * 4) == 0);
      }
    }
  });
  int all = 0;
  for (int round = 0; round < rounds; ++round) {
    const size_t at = static_cast<size_t>(round);
    for (const std::vector<char>& each : met) CHECK_EQ(int{each[at]}, int{met[0][at]});
    all += met[0][at];
  }
  return all;
}

// ---------------------------------------------------------------------------------------------
// The engine

constexpr size_t kMost = OneShotExchange::kMaxPayload;

// Whether the exchange succeeded; the handle is complete then.
bool AllreduceOneShot(Player& player, const TensorEntry& tensor) {
  int64_t handle = 0;
  if (!player.engine->AllreduceOneShot(tensor, &handle)) return false;
  CHECK(player.engine->Poll(handle) == HandleState::kDone);
  CHECK_OK(player.Wait(handle));
  CHECK(player.engine->Poll(handle) == HandleState::kUnknown);
  return true;
}

// Sums by the exchange if the ranks meet, otherwise by the loop.
Status Sum(Player& player, const std::string& name, std::vector<float>& data, bool* one_shot,
           ReduceOp op = ReduceOp::kSum) {
  *one_shot = AllreduceOneShot(player, *Player::Entry(name, data, op));
  return *one_shot ? Status::Ok() : player.Allreduce(name, data, op);
}

}  // namespace

TEST(whoever_comes_in_step_meets) {
  for (const int size : {1, 2, 3, 4, 16}) {
    // Threads on busy cores lose rounds, and skip some then, but not all.
    const int met = PlayRounds(size, 500, 0, 0, 0);
    if (size <= 2) CHECK(met > 0);
  }
}

TEST(all_agree_on_whether_they_have_met) {
  for (const int size : {2, 3, 4}) {
    PlayRounds(size, 400, 0, 0, 100 * kMicrosecond);
    PlayRounds(size, 400, 0.1, 0, 20 * kMicrosecond);
    PlayRounds(size, 400, 0.05, 0.1, 5 * kMicrosecond);
  }
}

TEST(who_comes_when_others_have_left_does_not_wait) {
  constexpr int kTimes = 200;
  std::vector<TimeNs> late;
  std::atomic<int> turn{0};
  // Rank 1 comes after rank 0 has left.
  Meet(2, [&](OneShotExchange& exchange, int rank) {
    for (int step = rank; step < 2 * kTimes; step += 2) {
      while (turn != step) std::this_thread::yield();
      const TimeNs begin = NowNs();
      CHECK(!exchange.Try("late", 4, &rank, sizeof rank));
      if (rank == 1) late.push_back(NowNs() - begin);
      ++turn;
    }
  });
  std::sort(late.begin(), late.end());
  CHECK(late[kTimes / 4] < 20 * kMicrosecond);
}

TEST(whoever_waits_in_vain_again_and_again_stops_waiting) {
  Meet(2, [](OneShotExchange& exchange, int rank) {
    if (rank == 1) return;
    const std::string signature = "alone";
    int quick = 0;
    for (int i = 0; i < 1000; ++i) {
      const TimeNs before = NowNs();
      CHECK(!exchange.Try(signature.data(), signature.size(), &rank, sizeof rank));
      quick += NowNs() - before < 20 * kMicrosecond ? 1 : 0;
    }
    CHECK(quick > 500);
  });
}

TEST(equal_bits_at_once_and_by_the_loop) {
  std::mt19937 random(Seed());
  for (const int size : {1, 2, 3, 4}) {
    std::atomic<int> met{0};
    Play(size, EngineConfig(), [&](Player& player) {
      std::mt19937 values(Seed() + static_cast<unsigned>(player.rank));
      std::normal_distribution<float> normal;
      int i = 0, mine = 0;  // all ranks have the same
      for (; i < 200 || (size <= 2 && mine == 0 && i < 20000); ++i) {
        std::vector<float> data(1 + static_cast<size_t>(i * 13) % (kMost / 4));
        for (float& value : data) value = normal(values);
        std::vector<float> again = data;
        const ReduceOp op = i % 3 == 0 ? ReduceOp::kAverage : ReduceOp::kSum;
        bool one_shot = false;
        CHECK_OK(Sum(player, "at once", data, &one_shot, op));
        mine += one_shot ? 1 : 0;
        CHECK_OK(player.Allreduce("by the loop", again, op));
        CHECK(data == again);
      }
      const Stats& stats = player.engine->stats();
      CHECK_EQ(stats.submitted.load(), 2 * i);
      CHECK_EQ(stats.completed.load(), 2 * i);
      CHECK_EQ(stats.batches.load(), 2 * i);
      met += mine;
    });
    CHECK_EQ(met.load() % size, 0);
    if (size <= 2) CHECK(met.load() > 0);
  }
}

TEST(sums_do_not_depend_on_how_the_callers_threads_compute) {
#if defined(__SSE__)
  const uint64_t flushes = 0x8040, rounds_up = 0x4000;
#else
  const uint64_t flushes = 1 << 24, rounds_up = 1 << 22;
#endif
  for (const int ranks : {1, 3}) {  // rank 0 alone, all
    const auto adjust = [&](int rank, EngineConfig&) {
      if (rank < ranks) SetArithmetic(kStandardArithmetic | flushes | rounds_up);
    };
    const auto script = [](Player& player) {
      const uint64_t before = Arithmetic() & ~kArithmeticFlags;
      for (int round = 0; round < 100; ++round) {
        const float mine = player.rank == 0 ? 1.0f : 1e-8f;
        std::vector<float> data{1e-40f, mine};
        if (round % 2 == 0) {
          CHECK_OK(player.Allreduce("x", data));
        } else {
          int64_t handle = 0;
          CHECK_OK(player.Submit("y", data, ReduceOp::kSum, &handle));
          CHECK_OK(player.Wait(handle));
        }
        int32_t bits[2];
        std::memcpy(bits, data.data(), sizeof bits);
        CHECK_EQ(bits[0], 3 * 71362);  // 1e-40
        CHECK_EQ(bits[1], 0x3f800000);
      }
      CHECK_EQ(Arithmetic() & ~kArithmeticFlags, before);
    };
    Play(3, {}, script, adjust);
  }
}

TEST(a_mismatch_has_the_words_of_the_coordinator) {
  Play(2, EngineConfig(), [](Player& player) {
    for (int i = 0; i < 50; ++i) {
      std::vector<float> data(static_cast<size_t>(4 + player.rank), 1.0f);
      bool one_shot = false;
      const Status status = Sum(player, "unlike", data, &one_shot);
      CHECK(!one_shot);
      CHECK(status.code() == Code::kMismatch);
      CHECK(Contains(status.message(), "unlike"));
      std::vector<float> fine(3, 1.0f);
      CHECK_OK(Sum(player, "alike", fine, &one_shot));
      CHECK_EQ(fine[2], 2.0f);
    }
  });
}

// Two ranks come in step every time: they would meet if their requests were equal.
TEST(requests_that_differ_in_anything_do_not_meet) {
  InStep step(2);
  Play(2, EngineConfig(), [&](Player& player) {
    const bool other = player.rank == 1;
    const std::string name = "sum", other_name = "sun";
    for (int i = 0; i < 300; ++i) {
      std::vector<float> data(16, 1.0f);
      const std::unique_ptr<TensorEntry> entry = Player::Entry(name, data, ReduceOp::kSum);
      TensorEntry& tensor = *entry;
      Request& request = tensor.request;
      tensor.views[0].shape = {4, 4};
      if (other && i % 7 == 0) tensor.views[0].shape = {8, 2};
      if (other && i % 7 == 6) tensor.views[0].shape = {4};
      if (other && i % 7 == 1) request.op = ReduceOp::kMax;
      if (other && i % 7 == 2) tensor.views[0].dtype = DataType::kInt32;
      if (other && i % 7 == 3) request.prescale = 2;
      if (other && i % 7 == 4) request.postscale = 2;
      if (other && i % 7 == 5) request.name = other_name;
      request.tensors = {{tensor.views[0].dtype, tensor.views[0].shape}};
      step.Wait();
      CHECK(!AllreduceOneShot(player, tensor));
      CHECK(data == std::vector<float>(16, 1.0f));
    }
  });
}

TEST(nothing_is_summed_at_once_beside_what_is_in_flight) {
  InStep step(2);
  Play(2, EngineConfig(), [&](Player& player) {
    std::vector<float> under_way(8, 1.0f), data(8, 1.0f);
    int64_t handle = 0;
    if (player.rank == 0) {
      CHECK_OK(player.Submit("under way", under_way, ReduceOp::kSum, &handle));
    }
    for (int i = 0; i < 300; ++i) {
      step.Wait();
      CHECK(!AllreduceOneShot(player, *Player::Entry("under way", data, ReduceOp::kSum)));
    }
    CHECK(data[0] == 1.0f);
    if (player.rank == 1) {
      CHECK_OK(player.Submit("under way", under_way, ReduceOp::kSum, &handle));
    }
    CHECK_OK(player.Wait(handle));
    CHECK_EQ(under_way[7], 2.0f);
  });
}

TEST(what_is_unusual_goes_by_the_loop) {
  InStep step(2);
  Play(2, EngineConfig(), [&](Player& player) {
    std::vector<float> large(kMost / 4 + 1, 1.0f), empty, small(1, 1.0f);
    const std::string longest(OneShotExchange::kMaxSignature, 'n'), name = "unusual";
    std::array<std::unique_ptr<TensorEntry>, 5> unusual = {
        Player::Entry(name, small, ReduceOp::kSum, 3),
        Player::Entry(name, small, ReduceOp::kAdasum),
        Player::Entry(longest, small, ReduceOp::kSum),
        Player::Entry(name, large, ReduceOp::kSum),
        Player::Entry(name, empty, ReduceOp::kSum),
    };
    for (int i = 0; i < 100; ++i) {
      for (const auto& entry : unusual) {
        step.Wait();
        CHECK(!AllreduceOneShot(player, *entry));
      }
    }
    bool one_shot = false;
    CHECK_OK(Sum(player, longest, small, &one_shot));
    CHECK_EQ(small[0], 2.0f);
  });
}

TEST(a_rank_that_never_comes_holds_nobody_up) {
  Play(3, EngineConfig(), [](Player& player) {
    for (int i = 0; i < 100; ++i) {
      std::vector<float> data(16, 1.0f);
      bool one_shot = false;
      // Rank 2 does not take part in the exchange.
      const Status status =
          player.rank == 2 ? player.Allreduce("sum", data) : Sum(player, "sum", data, &one_shot);
      CHECK_OK(status);
      CHECK(!one_shot);
      CHECK_EQ(data[15], 3.0f);
    }
  });
}
