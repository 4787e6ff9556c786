// Stats: counters of one engine. The thread that runs the loop and callers write them; any thread
// may read them. Each counter is exact, but together they are not a snapshot.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/recorder.h"
#include "collective/algorithm.h"

namespace hororing {

struct Stats {
  using Counter = std::atomic<int64_t>;
  Counter submitted{0};
  Counter completed{0};
  Counter batches{0};
  Counter tensors{0};
  Counter bytes{0};
  Counter cache_hits{0};
  Counter cache_misses{0};
  Counter control_messages_sent{0};
  Counter control_messages_received{0};
  Counter loop_wakeups{0};
  Counter scratch_bytes{0};
  Counter fusion_bytes{0}, cycle_time_ns{0};          // in use
  std::array<Counter, kAlgorithmsUsed> allreduces{};  // batches, by AlgorithmUsed
};

// Where the flight recorder counts the bytes of an algorithm.
inline Total BytesBy(AlgorithmUsed used) {
  static_assert(static_cast<size_t>(Total::kEnd) ==
                static_cast<size_t>(Total::kBytes) + kAlgorithmsUsed);
  return static_cast<Total>(static_cast<size_t>(Total::kBytes) + static_cast<size_t>(used));
}

}  // namespace hororing
