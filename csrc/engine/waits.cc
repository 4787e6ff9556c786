// Engine: what callers do while they wait. They run the loop where they may (ADR 12), and otherwise
// sleep, look after it now and then, and see that its thread is awake.
#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/loop.h"

namespace hororing {
namespace {

// How long a caller sleeps before it looks after the loop.
TimeNs NextLook(TimeNs deadline) {
  constexpr TimeNs kLookInterval = 500 * kMillisecond;
  return std::clamp<TimeNs>(deadline - NowNs(), 0, kLookInterval);
}

}  // namespace

// A caller in Wait: what it waits for is reported at once.
class Engine::Waits {
 public:
  explicit Waits(Engine& engine) : engine_(engine) { ++engine_.waiting_; }
  ~Waits() { --engine_.waiting_; }
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

 private:
  Engine& engine_;
};

HandleTable::Look Engine::Wait(int64_t handle, TimeNs timeout_ns, Status* status) {
  const Waits waits(*this);
  const TimeNs deadline = After(NowNs(), timeout_ns);
  DriveUntil([&] { return handles_->Poll(handle) != HandleTable::Look::kPending; }, deadline);
  for (;;) {
    const HandleTable::Look look = handles_->Wait(handle, NextLook(deadline), status);
    if (look != HandleTable::Look::kPending) return look;
    LookAtLoop();
    if (NowNs() >= deadline) return look;
  }
}

HandleTable::Look Engine::WaitMany(const int64_t* handles, size_t count, TimeNs timeout_ns,
                                   bool* all_ok,
                                   std::vector<std::shared_ptr<const DeviceEvent>>* landed) {
  const Waits waits(*this);
  const TimeNs deadline = After(NowNs(), timeout_ns);
  size_t left = count;
  DriveUntil(
      [&] {
        while (left > 0 && handles_->Poll(handles[left - 1]) != HandleTable::Look::kPending) --left;
        return left == 0;
      },
      deadline);
  for (;;) {
    const HandleTable::Look look =
        handles_->WaitMany(handles, count, NextLook(deadline), all_ok, landed);
    if (look != HandleTable::Look::kPending) return look;
    LookAtLoop();
    if (NowNs() >= deadline) return look;
  }
}

int64_t Engine::NextCompletion(int64_t seen, TimeNs timeout_ns) {
  ++awaiting_next_;
  const int64_t completions = handles_->NextCompletion(seen, timeout_ns);
  --awaiting_next_;
  return completions;
}

HandleTable::Look Engine::Poll(int64_t handle) {
  const HandleTable::Look look = handles_->Poll(handle);
  if (look != HandleTable::Look::kPending) return look;
  LookAtLoop();
  if (tensors_.submitted().count != 0) {
    asked_for_ = true;
    if (poll_scheduled_.load()) Wake();
  }
  return look;
}

// Waits for `done`, at most so long, and looks after the loop meanwhile. False: in vain.
bool Engine::Await(std::unique_lock<std::mutex>& lock, TimeNs timeout_ns,
                   const std::function<bool()>& done) {
  const TimeNs deadline = After(NowNs(), timeout_ns);
  while (!changed_.wait_for(lock, std::chrono::nanoseconds(NextLook(deadline)), done)) {
    if (NowNs() >= deadline) return false;
    lock.unlock();
    LookAtLoop();
    lock.lock();
  }
  return true;
}

// A call of NVIDIA's that does not return must not be one that a caller is in: nobody could give it
// up, so with a device the loop stays with its thread. So it does while this rank has joined, when
// tensors of the others may be its first on a device.
bool Engine::Drivable() const { return drivable_ && !devices_->in_use() && !tensors_.joining(); }

// Runs the loop, unless somebody else does or it is not for callers to run.
void Engine::DriveUntil(const std::function<bool()>& done, TimeNs deadline) {
  if (done()) return;
  if (!Drivable()) {
    if (poll_scheduled_.load()) Wake();  // it need not let more come
    return;
  }
  std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (turn.owns_lock() && loop_ != nullptr && loop_->drivable()) {
    const Loop::Left left = loop_->Drive(done, deadline);
    turn.unlock();
    // Only now: what rings before the turn is free wakes a thread that cannot take it.
    left.wake ? Wake() : WakeUnless(left.bell);
  } else {
    if (turn.owns_lock()) turn.unlock();
    Wake();  // a request that was submitted without may have been overlooked
  }
}

// Under the lock, so that the transport cannot vanish meanwhile; Transport::Wake never blocks.
void Engine::Wake() {
  std::lock_guard<std::mutex> lock(target_mutex_);
  if (target_ != nullptr) target_->Wake();
}

// When they are in the table. The loop either takes them after it has withdrawn its word, or we see
// that it has.
void Engine::WakeForRequests() {
  if (!poll_scheduled_.load()) Wake();
}

void Engine::WakeUnless(uint32_t bell) {
  std::lock_guard<std::mutex> lock(target_mutex_);
  if (target_ != nullptr && target_->turns()->Bell() != bell) target_->Wake();
}

}  // namespace hororing
