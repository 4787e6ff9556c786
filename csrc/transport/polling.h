// Polling: what a rank that waits does between two looks. It polls for a moment, then offers its
// core to others between two looks, then sleeps: until something rings, or, where nothing may ring,
// as with MPI, longer and longer.
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

// How long a wait polls without offering its core to others: about a change of threads.
constexpr TimeNs kKeepCore = 3 * kMicrosecond;

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// A moment between two looks. Where the last offer of the core was taken, which shows by how long
// it took, the core is offered at once, in later waits, too: the peer may be waiting for this very
// core.
class Spinner {
 public:
  // `relax`: pauses of the processor, for looks at memory that a peer is about to write.
  explicit Spinner(int relax) : relax_(relax) {}

  void Pause(TimeNs now, TimeNs waited) {
    if (!shares_core_ && waited < kKeepCore) {
      for (int i = 0; i < relax_; ++i) CpuRelax();
    } else {
      sched_yield();
      shares_core_ = NowNs() - now > kOfferRefused;
    }
  }
  bool shares_core() const { return shares_core_; }

 private:
  static constexpr TimeNs kOfferRefused = kMicrosecond;

  const int relax_;
  bool shares_core_ = false;
};

// Ends a sleep early. Any thread of this process may ring it.
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

// One wait. Only for the thread that runs the loop.
class Backoff {
 public:
  static constexpr TimeNs kYield = 200 * kMicrosecond;

  // `longest_sleep_ns` is the delay that a message may suffer, and what an idle rank costs: a
  // look takes a few microseconds. `yield_ns`: before it sleeps, beyond `spin_ns`.
  // `shortest_sleep_ns`: longer where every event that it waits for ends the sleep.
  Backoff(TimeNs spin_ns, TimeNs longest_sleep_ns, TimeNs yield_ns = kYield,
          TimeNs shortest_sleep_ns = kShortestSleep)
      : poll_until_ns_(std::max(spin_ns + yield_ns, kKeepCore)),
        shortest_sleep_ns_(shortest_sleep_ns),
        longest_sleep_ns_(longest_sleep_ns) {}
  // Where every event rings: sleeps after `spin_ns`, but looks every `interval_ns`.
  Backoff(TimeNs spin_ns, TimeNs interval_ns, Spinner* spinner)
      : spinner_(spinner),
        poll_until_ns_(spin_ns),
        shortest_sleep_ns_(interval_ns),
        longest_sleep_ns_(interval_ns) {}

  TimeNs begin_ns() const { return begin_ns_; }
  // Of the latest Pause.
  TimeNs now_ns() const { return now_ns_; }
  // Since when nothing has moved.
  TimeNs quiet_since_ns() const { return quiet_since_ns_; }

  // To be called after a look that found nothing (`moved` false), or something but not what the
  // wait is for. False once the deadline has passed. `Bell` is WakeBell, or sleeps as it does.
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
