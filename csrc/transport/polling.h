// Polling: what a rank does between two looks. And how it waits on something that has no doorbell,
// such as MPI: it polls for a moment, then offers the core to others between two looks, then sleeps
// longer and longer.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

#include "base/clock.h"

namespace hororing {

// How long a wait polls without offering its core to others: about a change of threads. Not where
// the last offer was taken, which shows by how long it took.
constexpr TimeNs kKeepCore = 3 * kMicrosecond;
constexpr TimeNs kOfferRefused = kMicrosecond;

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// What ends a sleep early; rung by any thread of this process.
class WakeBell {
 public:
  // Read it before looking for work: a ring in between makes SleepUnless return at once.
  uint32_t count() const { return count_.load(); }

  void Ring() {
    // Sequentially consistent here and in SleepUnless: either the sleeper sees the new count, or
    // we see that it sleeps.
    count_.fetch_add(1);
    if (sleeping_.load() == 0) return;
    syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Sleeps for `span_ns`, or until a ring; not at all when it has rung since `seen`.
  void SleepUnless(uint32_t seen, TimeNs span_ns) {
    sleeping_.store(1);
    if (count_.load() == seen) {
      const timespec span{static_cast<time_t>(span_ns / kSecond),
                          static_cast<long>(span_ns % kSecond)};
      syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, &span, nullptr, 0);
    }
    sleeping_.store(0);
  }

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleeping_{0};
};

// One wait. Loop thread only.
class Backoff {
 public:
  static constexpr TimeNs kYield = 200 * kMicrosecond;

  // `longest_sleep_ns` is the delay that a message may suffer, and what an idle rank costs: a
  // look takes a few microseconds. `yield_ns`: before it sleeps, beyond `spin_ns`.
  // `shortest_sleep_ns`: longer where every event that it waits for ends the sleep.
  Backoff(TimeNs spin_ns, TimeNs longest_sleep_ns, TimeNs yield_ns = kYield,
          TimeNs shortest_sleep_ns = kShortestSleep)
      : yield_until_ns_(spin_ns + yield_ns),
        shortest_sleep_ns_(shortest_sleep_ns),
        longest_sleep_ns_(longest_sleep_ns) {}

  TimeNs begin_ns() const { return begin_ns_; }
  // Since when nothing has moved.
  TimeNs quiet_since_ns() const { return quiet_since_ns_; }

  // To be called after a look that found nothing (`moved` false), or something but not what the
  // wait is for. False once the deadline has passed. `Bell` is WakeBell, or sleeps as it does.
  template <typename Bell>
  bool Pause(Bell& bell, uint32_t seen, bool moved, TimeNs deadline) {
    const TimeNs now = NowNs();
    if (now >= deadline) return false;
    if (moved) {
      quiet_since_ns_ = now;
      sleep_ns_ = shortest_sleep_ns_;
    }
    const TimeNs quiet = now - quiet_since_ns_;
    if (moved || quiet < kKeepCore) return true;
    if (quiet < yield_until_ns_) {
      sched_yield();
      return true;
    }
    bell.SleepUnless(seen, std::min(sleep_ns_, deadline - now));
    sleep_ns_ = std::min(2 * sleep_ns_, longest_sleep_ns_);
    return true;
  }

 private:
  static constexpr TimeNs kShortestSleep = 20 * kMicrosecond;

  const TimeNs yield_until_ns_;
  const TimeNs shortest_sleep_ns_;
  const TimeNs longest_sleep_ns_;
  const TimeNs begin_ns_ = NowNs();
  TimeNs quiet_since_ns_ = begin_ns_;
  TimeNs sleep_ns_ = shortest_sleep_ns_;
};

}  // namespace hororing
