// HandleTable: the only completion concept. A submission creates a handle, the engine's thread
// completes it exactly once (stage COMPLETE), and it lives until it is released.
//
// Thread-safe. Outlives the engine, so that handles that failed at shutdown can still be queried.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/device.h"

namespace hororing {

// Memory of the engine: a result whose size negotiation tells, or the values of a joined rank.
class ResultBuffer {
 public:
  // False if memory is short. `rows` is the first dimension of the result.
  bool Allocate(size_t bytes, int64_t rows);
  // Allocates on a device, in the order of its private stream.
  Status AllocateOn(const Device& device, size_t bytes, int64_t rows);
  bool CopyNumbers(const std::vector<int64_t>& numbers);
  void* data() const { return on_device_ != nullptr ? on_device_->data() : data_.get(); }
  size_t bytes() const { return bytes_; }
  int64_t rows() const { return rows_; }
  // Null: on the host.
  DeviceMemory* on_device() const { return on_device_.get(); }
  void* Release() { return data_.release(); }  // of the host; the caller frees it with free()

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data_;
  std::shared_ptr<DeviceMemory> on_device_;
  size_t bytes_ = 0;
  int64_t rows_ = 0;
};

enum class HandleState { kUnknown, kPending, kDone };

class HandleTable {
 public:
  // A handle has 63 bits. The low bits are the index of its slot, which bounds the number of
  // requests in flight; the others are a number.
  static constexpr int kIndexBits = 28;

  // `done`: they are complete already, successfully and without results.
  void Create(int64_t* handles, size_t count, bool done = false);
  // REQUIRES: `handle` is pending. Releases it if its owner already has. `done_event`: when the
  // results are on the device; null: now.
  void Complete(int64_t handle, Status status, std::vector<ResultBuffer> results,
                std::shared_ptr<const DeviceEvent> done_event = nullptr);
  // Completes all of them successfully and without results; wakes waiting callers once.
  void Complete(const std::vector<int64_t>& handles);

  HandleState Poll(int64_t handle);
  // Blocks until the completion counter exceeds `seen`, or until the timeout. The counter counts
  // handles that a caller had polled or waited for before they completed. Returns the counter.
  int64_t NextCompletion(int64_t seen, TimeNs timeout_ns);
  // Waits at most `timeout_ns`; fills `status` when done.
  HandleState Wait(int64_t handle, TimeNs timeout_ns, Status* status);
  // Waits for all of them. When all have succeeded they are released, and `all_ok` is true;
  // `done_events` receives their events. An already released handle counts as successful, so an
  // interrupted wait can be repeated.
  HandleState WaitMany(const int64_t* handles, size_t count, TimeNs timeout_ns, bool* all_ok,
                       std::vector<std::shared_ptr<const DeviceEvent>>* done_events = nullptr);
  // Null if there is no event, or no such handle.
  std::shared_ptr<const DeviceEvent> DoneEvent(int64_t handle);
  // The first dimension of result `index` of a handle that is done; else kInvalidArgument.
  Status Rows(int64_t handle, size_t index, int64_t* rows);
  Status Take(int64_t handle, size_t index, ResultBuffer* result);
  bool Release(int64_t handle);  // False when there is no such handle.

 private:
  // Sleeps until settled(), at most for `timeout_ns`. Returns whether it is.
  template <typename Settled>
  bool Sleep(std::unique_lock<std::mutex>& lock, TimeNs timeout_ns, const Settled& settled);

  struct Outcome {
    Status status;
    std::vector<ResultBuffer> results;
    std::shared_ptr<const DeviceEvent> done_event;
  };

  // Small, because a step may have a thousand handles, and by the time one is used again the others
  // have displaced it from the CPU's cache.
  struct Slot {
    int64_t handle = 0;  // 0: free
    bool done = false;
    bool released = false;
    bool awaited = false;              // a caller has waited or polled for it
    std::unique_ptr<Outcome> outcome;  // null: success, and nothing else
  };

  // All of these: REQUIRES mutex_.
  Slot* Find(int64_t handle);
  void Free(Slot& slot);
  ResultBuffer* Result(int64_t handle, size_t index);  // null if there is none
  bool Finish(int64_t handle, std::unique_ptr<Outcome>&& outcome);

  std::mutex mutex_;
  std::condition_variable completed_;
  // A handle combines the slot's index with a number that the slot has never had.
  std::vector<Slot> slots_;    // GUARDED_BY(mutex_)
  std::vector<int64_t> free_;  // indices; GUARDED_BY(mutex_)
  int64_t next_ = 0;           // GUARDED_BY(mutex_)
  int64_t completions_ = 0;    // of handles that were awaited; GUARDED_BY(mutex_)
};

}  // namespace hororing
