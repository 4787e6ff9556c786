// A world for tests: N ranks as threads of this process, each with its transport. If they take too
// long, a watchdog prints the stage of every rank and ends the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/factory.h"
#include "transport/transport.h"

namespace hororing_test {

// Unless it is destroyed in time, prints the stage of each rank and aborts.
class Watchdog {
 public:
  Watchdog(int ranks, hororing::TimeNs limit_ns)
      : stages_(static_cast<size_t>(ranks)), thread_([this, limit_ns] { Guard(limit_ns); }) {
    for (auto& stage : stages_) stage = "not begun";
  }
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // REQUIRES: `stage` is a string literal.
  void Enter(int rank, const char* stage) { stages_[static_cast<size_t>(rank)] = stage; }

 private:
  void Guard(hororing::TimeNs limit_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto limit = std::chrono::nanoseconds(limit_ns);
    if (changed_.wait_for(lock, limit, [this] { return done_; })) return;
    std::fprintf(stderr, "watchdog: not done after %lld s\n",
                 static_cast<long long>(limit_ns / hororing::kSecond));
    for (size_t i = 0; i < stages_.size(); ++i) {
      std::fprintf(stderr, "  rank %zu: %s\n", i, stages_[i].load());
    }
    std::fflush(nullptr);
    std::abort();
  }

  std::vector<std::atomic<const char*>> stages_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;  // GUARDED_BY(mutex_)
  std::thread thread_;
};

// The argument of the body of one rank.
struct Rank {
  hororing::Transport& transport;
  Watchdog& watchdog;
  int rank() const { return transport.rank(); }
  int size() const { return transport.size(); }
  void Enter(const char* stage) { watchdog.Enter(rank(), stage); }
};

constexpr hororing::TimeNs kWorldLimit = 120 * hororing::kSecond;  // sanitizers are slow
constexpr hororing::TimeNs kDefaultSpin = 20 * hororing::kMicrosecond;

// Runs body(rank) on one thread per transport; a transport ends with its thread.
inline void RunWorld(std::vector<std::unique_ptr<hororing::Transport>> transports,
                     const std::function<void(Rank&)>& body) {
  Watchdog watchdog(static_cast<int>(transports.size()), kWorldLimit);
  std::vector<std::thread> threads;
  for (auto& each : transports) {
    threads.emplace_back([&watchdog, &body, transport = std::move(each)] {
      Rank rank{*transport, watchdog};
      body(rank);
      rank.Enter("done");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline void RunWorld(int size, const std::function<void(Rank&)>& body,
                     hororing::TimeNs spin_ns = kDefaultSpin) {
  RunWorld(hororing::MakeInprocWorld(size, spin_ns), body);
}

}  // namespace hororing_test
