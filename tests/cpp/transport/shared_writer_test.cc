// Copies for other cores: all bytes arrive, and the policy chooses the faster kind of stores.
#include "kernels/shared_writer.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "check.h"

namespace hororing_test {
namespace {

using namespace hororing;

// The time of copies on a machine, in ns per byte.
struct Machine {
  double ordinary, streaming;
  TimeNs Took(bool streams, size_t bytes) const {
    return static_cast<TimeNs>((streams ? streaming : ordinary) * static_cast<double>(bytes));
  }
};
constexpr Machine kOneCache{0.05, 0.035}, kTwoCaches{0.5, 0.07};

// Copies `mib` MiB. Returns the share of them that was streamed.
double ShareStreamed(StorePolicy* choice, const Machine& machine, size_t mib,
                     size_t piece = 16 << 10) {
  size_t streamed = 0;
  const size_t pieces = (mib << 20) / piece;
  for (size_t i = 0; i < pieces; ++i) {
    const bool streams = choice->streaming();
    streamed += streams ? 1 : 0;
    choice->Record(piece, choice->measures() ? machine.Took(streams, piece) : 0);
  }
  return static_cast<double>(streamed) / static_cast<double>(pieces);
}

TEST(stores_are_ordinary_within_one_cache_but_for_trials) {
  StorePolicy choice;
  const double share = ShareStreamed(&choice, kOneCache, 1024);
  CHECK(share > 0);
  CHECK(share < 0.002);
  CHECK(!choice.streaming() || choice.measures());
}

TEST(they_stream_between_caches_from_the_first_megabyte_on) {
  StorePolicy choice;
  CHECK(!choice.streaming());
  CHECK(choice.measures());
  ShareStreamed(&choice, kTwoCaches, 1, 1 << 10);
  CHECK(choice.streaming());
  const double share = ShareStreamed(&choice, kTwoCaches, 1024);
  CHECK(share > 0.998);
  CHECK(share < 1);
}

TEST(they_follow_threads_that_are_moved) {
  StorePolicy choice;
  ShareStreamed(&choice, kOneCache, 256);
  // The policy judges ordinary stores every megabyte, and streaming ones every 32nd time.
  ShareStreamed(&choice, kTwoCaches, 100);
  CHECK(ShareStreamed(&choice, kTwoCaches, 256) > 0.99);
  ShareStreamed(&choice, kOneCache, 100);
  CHECK(ShareStreamed(&choice, kOneCache, 256) < 0.01);
}

TEST(a_thread_that_lost_its_core_now_and_then_changes_nothing) {
  for (const Machine& machine : {kOneCache, kTwoCaches}) {
    StorePolicy choice;
    ShareStreamed(&choice, machine, 256);
    const bool streams = ShareStreamed(&choice, machine, 4) > 0.5;
    Machine late = machine;
    late.ordinary += 100;
    late.streaming += 100;
    std::mt19937 random(7);
    size_t same = 0, all = 0;
    for (size_t i = 0; i < 1 << 16; ++i) {
      const Machine& now = random() % 64 == 0 ? late : machine;
      same += choice.streaming() == streams ? 1 : 0;
      ++all;
      choice.Record(16 << 10, choice.measures() ? now.Took(choice.streaming(), 16 << 10) : 0);
    }
    CHECK(same * 100 > all * 95);
  }
}

// Page faults cost both kinds the same.
TEST(new_memory_is_not_mistaken_for_slow_stores) {
  StorePolicy choice;
  ShareStreamed(&choice, {2.0, 2.0}, 6);
  CHECK(!choice.streaming());
  ShareStreamed(&choice, kTwoCaches, 2);
  CHECK(ShareStreamed(&choice, kTwoCaches, 64) > 0.9);
}

TEST(little_is_gained_by_streaming_where_it_is_a_bit_faster) {
  StorePolicy choice;
  ShareStreamed(&choice, {0.1, 0.05}, 256);
  CHECK(ShareStreamed(&choice, {0.1, 0.05}, 64) < 0.01);
  // Once the policy streams, only a clear difference makes it stop.
  ShareStreamed(&choice, kTwoCaches, 256);
  CHECK(ShareStreamed(&choice, {0.1, 0.05}, 256) > 0.99);
}

TEST(all_bytes_arrive_and_no_others) {
  std::mt19937 random(3);
  std::vector<unsigned char> from(100000), to(100000);
  for (unsigned char& each : from) each = static_cast<unsigned char>(random());
  const auto copies = [&](const auto& copy) {
    for (int i = 0; i < 2000; ++i) {
      const size_t bytes = random() % (i % 10 == 0 ? 90000 : 400);
      const size_t source = random() % (from.size() - bytes);
      const size_t target = random() % (to.size() - bytes);
      std::vector<unsigned char> expected = to;
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(source), bytes,
                  expected.begin() + static_cast<std::ptrdiff_t>(target));
      copy(&to[target], &from[source], bytes);
      if (to != expected) {
        CHECK(false);
        return;
      }
    }
  };
  copies([](void* target, const void* source, size_t bytes) {
    StreamingCopy(target, source, bytes);
    StoreFence();
  });
  SharedWriter writer;
  copies([&](void* target, const void* source, size_t bytes) {
    writer.Copy(target, source, bytes);
    writer.Fence();
  });
}

TimeNs fake_now = 0;
TimeNs FakeClock() { return fake_now += kMicrosecond; }

// Waits are between batches of copies, here only after ordinary ones.
TEST(waiting_is_not_counted) {
  std::vector<unsigned char> from(64 << 10), to(64 << 10);
  SharedWriter writer(FakeClock);
  size_t streamed = 0, all = 0;
  for (size_t i = 0; i < 1 << 14; ++i) {
    const bool streams = writer.choice().streaming();
    streamed += streams ? 1 : 0;
    ++all;
    writer.Copy(to.data(), from.data(), 20 << 10);
    writer.Fence();
    if (!streams) fake_now += kSecond;
  }
  CHECK(streamed > 0);
  CHECK(streamed * 100 < all);
}

// Two threads write and read a buffer in turns, like slots. Returns how many numbers the reader
// missed although the writer had announced them.
template <typename Copy>
size_t Missed(const Copy& copy) {
  constexpr size_t kRoom = 10000, kRounds = 4000;  // 160 MB, so that trials occur, too
  std::vector<uint32_t> room(kRoom);
  std::atomic<size_t> written{0}, read{0};
  size_t missed = 0;
  std::thread reader([&] {
    for (size_t round = 1; round <= kRounds; ++round) {
      while (written.load(std::memory_order_acquire) < round) std::this_thread::yield();
      // Reads the bytes written last first.
      for (size_t i = kRoom; i-- > 0;) missed += room[i] == round ? 0 : 1;
      read.store(round, std::memory_order_release);
    }
  });
  for (size_t round = 1; round <= kRounds; ++round) {
    const std::vector<uint32_t> data(kRoom, static_cast<uint32_t>(round));
    while (read.load(std::memory_order_acquire) < round - 1) std::this_thread::yield();
    copy(room.data(), data.data(), kRoom * sizeof(uint32_t));
    written.store(round, std::memory_order_release);
  }
  reader.join();
  return missed;
}

TEST(the_other_thread_reads_what_was_settled) {
  SharedWriter writer;
  CHECK_EQ(Missed([&](void* to, const void* from, size_t bytes) {
             writer.Copy(to, from, bytes);
             writer.Fence();
           }),
           size_t{0});
  CHECK_EQ(Missed([](void* to, const void* from, size_t bytes) {
             StreamingCopy(to, from, bytes);
             StoreFence();
           }),
           size_t{0});
}

}  // namespace
}  // namespace hororing_test
