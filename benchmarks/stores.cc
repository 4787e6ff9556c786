// The cost of writing memory that another core has read, and of reading what it has written.
//
//   stores [--kib K] [--rounds N]
//
// Two threads pass K KiB (256) to each other in four buffers, like the slots of
// backend/host_pipeline.h: one copies into a buffer, the other out of it, in turns, with ordinary
// or with non-temporal stores. Printed are medians of N (400) rounds, in GB/s. The round trip of a
// cache line between the threads shows where they ran: about 60 ns within one last-level cache, 300
// or more between two.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/shared_writer.h"

namespace {

using namespace hororing;

// The threads take turns: even numbers are those of the first thread, odd ones of the second.
class Ball {
 public:
  void Await(size_t turn) const {
    while (turn_.load(std::memory_order_acquire) != turn) {
    }
  }
  void Throw(size_t turn) { turn_.store(turn, std::memory_order_release); }

 private:
  alignas(64) std::atomic<size_t> turn_{0};
};

template <typename First, typename Second>
void Play(size_t rounds, const First& first, const Second& second) {
  Ball ball;
  std::thread other([&] {
    for (size_t i = 0; i < rounds; ++i) {
      ball.Await(2 * i + 1);
      second(i);
      ball.Throw(2 * i + 2);
    }
  });
  for (size_t i = 0; i < rounds; ++i) {
    ball.Await(2 * i);
    first(i);
    ball.Throw(2 * i + 1);
  }
  ball.Await(2 * rounds);
  other.join();
}

double RoundTripNs() {
  constexpr size_t kRounds = 100000;
  const TimeNs begin = NowNs();
  Play(kRounds, [](size_t) {}, [](size_t) {});
  return static_cast<double>(NowNs() - begin) / kRounds;
}

double Median(std::vector<TimeNs> times) {
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
}

template <typename Copy>
void Measure(const char* name, size_t bytes, size_t rounds, const Copy& copy) {
  constexpr size_t kRooms = 4;
  std::vector<std::byte> rooms(kRooms * bytes + 64), from(bytes), to(bytes);
  std::byte* const first =
      rooms.data() + (64 - reinterpret_cast<uintptr_t>(rooms.data()) % 64) % 64;
  std::vector<TimeNs> writes, reads;
  Play(
      rounds,
      [&](size_t i) {
        const TimeNs begin = NowNs();
        copy(first + i % kRooms * bytes, from.data(), bytes);
        writes.push_back(NowNs() - begin);
      },
      [&](size_t i) {
        const TimeNs begin = NowNs();
        std::memcpy(to.data(), first + i % kRooms * bytes, bytes);
        reads.push_back(NowNs() - begin);
      });
  const double size = static_cast<double>(bytes);
  std::printf("%-10s %8.2f %8.2f\n", name, size / Median(writes), size / Median(reads));
}

}  // namespace

int main(int argc, char** argv) {
  size_t kib = 256, rounds = 400;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const size_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (value > 0 && option == "--kib") {
      kib = value;
    } else if (value > 0 && option == "--rounds") {
      rounds = value;
    } else {
      std::fprintf(stderr, "usage: stores [--kib K] [--rounds N]\n");
      return 2;
    }
  }
  std::printf("round trip %.0f ns\n%-10s %8s %8s\n", RoundTripNs(), "stores", "write", "read");
  Measure("ordinary", kib << 10, rounds,
          [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
  Measure("streaming", kib << 10, rounds, [](void* to, const void* from, size_t bytes) {
    StreamingCopy(to, from, bytes);
    StoreFence();
  });
  std::printf("round trip %.0f ns\n", RoundTripNs());
  return 0;
}
