// CallWatch: watches calls that should return at once, but may never return.
//
// Open MPI with MPI_THREAD_MULTIPLE has deadlocked itself on learning over TCP that a peer had
// died; NVIDIA's driver waits for kernels that wait for a peer. Nothing ends such a call. Threads
// that wait for the calling thread notice it here and abandon that thread. If the call returns
// after all, its thread stops there forever, before it touches what others have taken over.
//
// Thread-safety: Call on one thread, never two at a time; everything else on any.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <future>
#include <mutex>

#include "base/clock.h"

namespace hororing {

class CallWatch {
 public:
  // Its name and its library; null: the transport's. Both are literals.
  struct Name {
    const char* call = nullptr;
    const char* library = nullptr;
    bool waits_for_kernels = false;  // of NCCL, and so returns once these are aborted
  };

  // Around a call. `watch` may be null.
  class Call {
   public:
    Call(CallWatch* watch, const Name& name) : watch_(watch) {
      if (watch_ != nullptr) watch_->Enter(name);
    }
    ~Call() {
      if (watch_ != nullptr) watch_->Leave();
    }
    Call(const Call&) = delete;

   private:
    CallWatch* const watch_;
  };

  // Makes `watch` the watch of this thread while it exists: for library calls that any thread
  // makes, of which only those on this thread are watched.
  class Thread {
   public:
    explicit Thread(CallWatch* watch) { current_ = watch; }
    ~Thread() { current_ = nullptr; }
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;
  };
  static CallWatch* Current() { return current_; }

  // How long checks have found the same call in progress; 0 without one. Between two checks at most
  // one second counts: if the whole process was stopped, no call is to blame.
  TimeNs Elapsed(TimeNs now) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t state = state_.load();
    if (state != seen_ || state % 2 == 0) {
      elapsed_ns_ = 0;
    } else {
      elapsed_ns_ += std::min(now - checked_ns_, kSecond);
    }
    seen_ = state;
    checked_ns_ = now;
    return elapsed_ns_;
  }

  // From now on, the thread never leaves the call that the last check found. Returns the call's
  // name; everything that the thread did before is visible. No name if the thread has left the call
  // or was abandoned earlier.
  Name Abandon() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (seen_ % 2 == 0 || !state_.compare_exchange_strong(seen_, kAbandoned)) return {};
    return {call_.load(), library_.load(), waits_for_kernels_.load()};
  }
  bool abandoned() const { return state_.load() == kAbandoned; }
  // Blocks until the call has returned. REQUIRES: abandoned(); one caller.
  void AwaitParked() { parked_.get_future().wait(); }

 private:
  static constexpr uint64_t kAbandoned = ~uint64_t{0} - 1;  // even: no call to watch

  void Enter(const Name& name) {
    call_.store(name.call, std::memory_order_relaxed);
    library_.store(name.library, std::memory_order_relaxed);
    waits_for_kernels_.store(name.waits_for_kernels, std::memory_order_relaxed);
    state_.store(++count_, std::memory_order_release);
  }
  void Leave() {
    uint64_t entered = count_++;
    if (state_.compare_exchange_strong(entered, count_)) return;
    parked_.set_value();
    for (;;) pause();
  }

  inline static thread_local CallWatch* current_ = nullptr;

  // The number of entries and exits, odd while a call is in progress.
  std::atomic<uint64_t> state_{0};
  uint64_t count_ = 0;  // the same; of the thread that calls
  std::atomic<const char*> call_{nullptr}, library_{nullptr};
  std::atomic<bool> waits_for_kernels_{false};
  std::promise<void> parked_;
  std::mutex mutex_;
  uint64_t seen_ = 0;      // GUARDED_BY(mutex_)
  TimeNs elapsed_ns_ = 0;  // GUARDED_BY(mutex_)
  TimeNs checked_ns_ = 0;  // GUARDED_BY(mutex_)
};

}  // namespace hororing
