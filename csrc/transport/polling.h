// Polling: what a waiting rank does between two polls. It spins briefly, then yields its core, then
// sleeps until a bell rings. If nothing can ring it, as with MPI, its sleeps grow longer.
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

// How long a wait spins before it yields its core: about the time of a thread switch.
constexpr TimeNs kSpinBeforeYield = 3 * kMicrosecond;

// Of a rank that waits for MPI, which wakes nobody when a message arrives: it polls often.
constexpr TimeNs kLongestDataSleep = 100 * kMicrosecond, kLongestIdleSleep = kMillisecond;

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Pauses between two polls. If another thread used the core after the last yield, as its duration
// shows, later waits yield at once: the peer may be waiting for this core.
class Spinner {
 public:
  // `relax`: the number of CPU pauses between polls of memory that a peer is about to write.
  explicit Spinner(int relax) : relax_(relax) {}

  void Pause(TimeNs now, TimeNs waited) {
    if (!core_is_shared_ && waited < kSpinBeforeYield) {
      for (int i = 0; i < relax_; ++i) CpuRelax();
    } else {
      sched_yield();
      core_is_shared_ = NowNs() - now > kYieldTook;
    }
  }
  bool core_is_shared() const { return core_is_shared_; }

 private:
  static constexpr TimeNs kYieldTook = kMicrosecond;

  const int relax_;
  bool core_is_shared_ = false;
};

// Ends a sleep early. Any thread of this process may ring it.
class WakeBell {
 public:
  // Read it before polling for work: a ring in between makes SleepUnless return at once.
  uint32_t count() const { return count_.load(); }

  void Ring() {
    // Sequentially consistent, as in SleepUnless: the sleeper sees the count, or we see it asleep.
    count_.fetch_add(1);
    if (sleeping_.load() == 0) return;
    syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Sleeps for `span_ns`, or until a ring; returns at once if it has rung since `seen`.
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

// One wait. Only for the thread that runs the loop.
class Backoff {
 public:
  static constexpr TimeNs kYield = 200 * kMicrosecond;

  // `longest_sleep_ns` bounds the delay of a message; an idle rank polls that often, and a poll
  // takes a few microseconds. `yield_ns`: how long it yields after `spin_ns` before it sleeps.
  // `shortest_sleep_ns`: may be longer if every event ends the sleep.
  Backoff(TimeNs spin_ns, TimeNs longest_sleep_ns, TimeNs yield_ns = kYield,
          TimeNs shortest_sleep_ns = kShortestSleep)
      : poll_until_ns_(std::max(spin_ns + yield_ns, kSpinBeforeYield)),
        shortest_sleep_ns_(shortest_sleep_ns),
        longest_sleep_ns_(longest_sleep_ns) {}
  // For waits in which every event rings: sleeps after `spin_ns`, but polls every `interval_ns`.
  Backoff(TimeNs spin_ns, TimeNs interval_ns, Spinner* spinner)
      : spinner_(spinner),
        poll_until_ns_(spin_ns),
        shortest_sleep_ns_(interval_ns),
        longest_sleep_ns_(interval_ns) {}

  TimeNs begin_ns() const { return begin_ns_; }
  // Of the latest Pause.
  TimeNs now_ns() const { return now_ns_; }
  // The time of the latest progress.
  TimeNs quiet_since_ns() const { return quiet_since_ns_; }

  // Call it after a poll that found nothing (`moved` false), or something other than the awaited
  // event. False once the deadline has passed. `Bell` is WakeBell, or sleeps as it does.
  template <typename Bell>
  bool Pause(Bell& bell, uint32_t seen, bool moved, TimeNs deadline) {
    now_ns_ = NowNs();
    if (now_ns_ >= deadline) return false;
    const TimeNs quiet = now_ns_ - quiet_since_ns_;
    if (moved) {
      quiet_since_ns_ = now_ns_;
      sleep_ns_ = shortest_sleep_ns_;
    } else if (quiet < poll_until_ns_) {
      spinner_->Pause(now_ns_, quiet);
    } else {
      bell.SleepUnless(seen, std::min(sleep_ns_, deadline - now_ns_));
      sleep_ns_ = std::min(2 * sleep_ns_, longest_sleep_ns_);
      now_ns_ = NowNs();
    }
    return true;
  }

 private:
  static constexpr TimeNs kShortestSleep = 20 * kMicrosecond;

  Spinner own_{0};
  Spinner* const spinner_ = &own_;
  const TimeNs poll_until_ns_;
  const TimeNs shortest_sleep_ns_;
  const TimeNs longest_sleep_ns_;
  const TimeNs begin_ns_ = NowNs();
  TimeNs quiet_since_ns_ = begin_ns_, now_ns_ = begin_ns_;
  TimeNs sleep_ns_ = shortest_sleep_ns_;
};

}  // namespace hororing
