#include "engine/handle_table.h"

#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "base/types.h"

namespace hororing {
namespace {

// A slot's handles get this many different numbers before one repeats.
constexpr int64_t kNumbers = (int64_t{1} << (63 - HandleTable::kIndexBits)) - 2;

Status NoResult(int64_t handle, size_t index) {
  return Status(Code::kInvalidArgument,
                "handle " + std::to_string(handle) + " has no result " + std::to_string(index));
}

}  // namespace

bool ResultBuffer::Allocate(size_t bytes, int64_t rows) {
  rows_ = rows;
  if (bytes == 0) return true;
  if (bytes > SIZE_MAX - kCacheLine) return false;
  data_.reset(std::aligned_alloc(kCacheLine, RoundUp(bytes, kCacheLine)));
  bytes_ = data_ != nullptr ? bytes : 0;
  return data_ != nullptr;
}

Status ResultBuffer::AllocateOn(const Device& device, size_t bytes, int64_t rows) {
  rows_ = rows;
  if (bytes == 0) return Status::Ok();
  HORORING_RETURN_IF_ERROR(device.Allocate(bytes, &on_device_));
  bytes_ = bytes;
  return Status::Ok();
}

bool ResultBuffer::CopyNumbers(const std::vector<int64_t>& numbers) {
  const size_t bytes = numbers.size() * sizeof(int64_t);
  if (!Allocate(bytes, static_cast<int64_t>(numbers.size()))) return false;
  if (bytes > 0) std::memcpy(data_.get(), numbers.data(), bytes);
  return true;
}

void HandleTable::Create(int64_t* handles, size_t count, bool done) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < count; ++i) {
    if (free_.empty()) {
      free_.push_back(static_cast<int64_t>(slots_.size()));
      slots_.emplace_back();
    }
    const int64_t index = free_.back();
    free_.pop_back();
    next_ = next_ % kNumbers + 1;
    handles[i] = next_ << kIndexBits | index;
    Slot& slot = slots_[static_cast<size_t>(index)];
    slot.handle = handles[i];
    slot.done = done;
  }
}

HandleTable::Slot* HandleTable::Find(int64_t handle) {
  const size_t index = static_cast<size_t>(handle & ((int64_t{1} << kIndexBits) - 1));
  if (handle <= 0 || index >= slots_.size() || slots_[index].handle != handle) return nullptr;
  return &slots_[index];
}

void HandleTable::Free(Slot& slot) {
  free_.push_back(&slot - slots_.data());
  slot = Slot();
}

// Returns whether a caller waits for this handle. Takes `outcome` unless the handle is released.
bool HandleTable::Finish(int64_t handle, std::unique_ptr<Outcome>&& outcome) {
  Slot* const slot = Find(handle);
  if (slot == nullptr) return false;
  const bool awaited = slot->awaited;
  if (awaited) ++completions_;
  if (slot->released) {
    Free(*slot);
  } else {
    slot->outcome = std::move(outcome);
    slot->done = true;
  }
  return awaited;
}

void HandleTable::Complete(int64_t handle, Status status, std::vector<ResultBuffer> results,
                           std::shared_ptr<const DeviceEvent> done_event) {
  std::unique_ptr<Outcome> outcome;
  if (!status.ok() || !results.empty() || done_event != nullptr) {
    outcome.reset(new Outcome{std::move(status), std::move(results), std::move(done_event)});
  }
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wake = Finish(handle, std::move(outcome));
  }
  if (wake) completed_.notify_all();
}

void HandleTable::Complete(const std::vector<int64_t>& handles) {
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const int64_t handle : handles) wake = Finish(handle, nullptr) || wake;
  }
  if (wake) completed_.notify_all();
}

HandleState HandleTable::Poll(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot* const slot = Find(handle);
  if (slot == nullptr || slot->released) return HandleState::kUnknown;
  if (slot->done) return HandleState::kDone;
  slot->awaited = true;
  return HandleState::kPending;
}

template <typename Settled>
bool HandleTable::Sleep(std::unique_lock<std::mutex>& lock, TimeNs timeout_ns,
                        const Settled& settled) {
  if (settled()) return true;
  if (timeout_ns <= 0) return false;  // saves reading the clock
  if (timeout_ns != kForever) {
    return completed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), settled);
  }
  completed_.wait(lock, settled);
  return true;
}

int64_t HandleTable::NextCompletion(int64_t seen, TimeNs timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  Sleep(lock, timeout_ns, [&] { return completions_ > seen; });
  return completions_;
}

HandleState HandleTable::Wait(int64_t handle, TimeNs timeout_ns, Status* status) {
  std::unique_lock<std::mutex> lock(mutex_);
  HandleState state = HandleState::kPending;
  Sleep(lock, timeout_ns, [&] {
    Slot* const slot = Find(handle);
    if (slot == nullptr || slot->released) {
      state = HandleState::kUnknown;
      return true;
    }
    slot->awaited = true;
    if (!slot->done) return false;
    state = HandleState::kDone;
    *status = slot->outcome != nullptr ? slot->outcome->status : Status::Ok();
    return true;
  });
  return state;
}

std::shared_ptr<const DeviceEvent> HandleTable::DoneEvent(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Slot* const slot = Find(handle);
  return slot == nullptr || slot->outcome == nullptr ? nullptr : slot->outcome->done_event;
}

HandleState HandleTable::WaitMany(const int64_t* handles, size_t count, TimeNs timeout_ns,
                                  bool* all_ok,
                                  std::vector<std::shared_ptr<const DeviceEvent>>* done_events) {
  // Device memory and events are destroyed without the mutex, since that calls the driver.
  std::vector<std::unique_ptr<Outcome>> ended;
  std::unique_lock<std::mutex> lock(mutex_);
  *all_ok = true;
  size_t left = count;
  // Start with the last handle: it usually completes last, so this thread is not woken earlier.
  const bool settled = Sleep(lock, timeout_ns, [&] {
    for (; left > 0; --left) {
      Slot* const slot = Find(handles[left - 1]);
      if (slot == nullptr) continue;
      if (slot->released) {
        *all_ok = false;
        continue;
      }
      if (!slot->done) {
        slot->awaited = true;
        return false;
      }
      *all_ok = *all_ok && (slot->outcome == nullptr || slot->outcome->status.ok());
    }
    return true;
  });
  if (!settled) {
    *all_ok = false;
    return HandleState::kPending;
  }
  for (size_t i = 0; *all_ok && i < count; ++i) {
    Slot* const slot = Find(handles[i]);
    if (slot == nullptr) continue;  // listed twice, or already waited for
    if (slot->outcome != nullptr) {
      std::shared_ptr<const DeviceEvent>& event = slot->outcome->done_event;
      // Handles of one batch share one event, and usually follow one another.
      if (done_events != nullptr && event != nullptr &&
          (done_events->empty() || done_events->back() != event)) {
        done_events->push_back(std::move(event));
      }
      ended.push_back(std::move(slot->outcome));
    }
    Free(*slot);
  }
  return HandleState::kDone;
}

ResultBuffer* HandleTable::Result(int64_t handle, size_t index) {
  Slot* const slot = Find(handle);
  const bool there = slot != nullptr && slot->done && slot->outcome != nullptr &&
                     index < slot->outcome->results.size();
  return there ? &slot->outcome->results[index] : nullptr;
}

Status HandleTable::Rows(int64_t handle, size_t index, int64_t* rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  const ResultBuffer* result = Result(handle, index);
  if (result == nullptr) return NoResult(handle, index);
  *rows = result->rows();
  return Status::Ok();
}

Status HandleTable::Take(int64_t handle, size_t index, ResultBuffer* result) {
  std::lock_guard<std::mutex> lock(mutex_);
  ResultBuffer* const there = Result(handle, index);
  if (there == nullptr) return NoResult(handle, index);
  *result = std::exchange(*there, {});
  return Status::Ok();
}

bool HandleTable::Release(int64_t handle) {
  std::unique_ptr<Outcome> ended;  // destroyed after the mutex is released, as above
  std::lock_guard<std::mutex> lock(mutex_);
  Slot* const slot = Find(handle);
  if (slot == nullptr || slot->released) return false;
  if (slot->done) {
    ended = std::move(slot->outcome);
    Free(*slot);
  } else {
    slot->released = true;
    if (slot->awaited) completed_.notify_all();  // callers that wait for it must return
  }
  return true;
}

}  // namespace hororing
