// Membership: sends heartbeats to the store of an elastic job, and receives the end of a generation
// at once. It has a connection, which Python has opened and authenticated, and its own thread,
// which needs neither interpreter nor loop, so that a computing process does not count as dead.
//
//   process -> store   one byte, every interval
//   store -> process   frames of fixed size; the first byte makes it repeat the current ones
//
// Thread-safety: any thread, but constructor and destructor at no other's time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/status.h"

namespace hororing {

class Membership {
 public:
  // Called on the membership's thread: generations up to this one are over. Must not block.
  using Ended = std::function<void(int64_t generation, const Status& why)>;

  // `socket` is borrowed, and connected until the destructor returns.
  Membership(int socket, TimeNs interval_ns, Ended ended);
  ~Membership();  // Ends the thread and the connection.

  // Ok until this process learns that the generation is over.
  Status Check(int64_t generation) const;
  // The changes of hosts and processes since that generation began: the time of the latest
  // (microseconds since the epoch), and their kinds (1: removals, 2: additions, 3: both).
  struct Updates {
    int64_t stamp = 0;
    int32_t what = 0;
  };
  Updates UpdatesSince(int64_t generation) const;

 private:
  // The layout of FRAME in hororing/_job/rendezvous/protocol.py; little-endian.
  struct Frame {
    uint32_t kind;
    int32_t rank;  // to blame
    int64_t generation;
    int64_t stamp;
    int32_t what;
    char text[132];  // zero-terminated
  };
  static constexpr uint32_t kOver = 1, kUpdated = 2;
  static_assert(sizeof(Frame) == 160, "as the store sends it");

  void ThreadMain();
  bool Beat();
  bool Receive();
  void Take(const Frame& frame);
  void End(int64_t generation, const Status& why);

  const int socket_;
  const TimeNs interval_ns_;
  const Ended ended_;
  std::atomic<bool> leaving_{false};
  mutable std::mutex mutex_;
  int64_t over_ = 0;     // GUARDED_BY(mutex_): generations up to this one
  Status why_;           // GUARDED_BY(mutex_)
  Frame updates_ = {};   // GUARDED_BY(mutex_): the last one
  Frame incoming_ = {};  // the thread's, as below
  size_t received_ = 0;  // bytes of it
  std::thread thread_;
};

}  // namespace hororing
