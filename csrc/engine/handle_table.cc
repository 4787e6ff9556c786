#include "engine/handle_table.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace hororing {
namespace {

// Of any vector unit, so that frameworks take results as they are: TensorFlow copies others.
constexpr size_t kAlignment = 64;

Status NoResult(int64_t handle, size_t index) {
  return Status(Code::kInvalidArgument,
                "handle " + std::to_string(handle) + " has no result " + std::to_string(index));
}

}  // namespace

GatheredTensor::~GatheredTensor() { std::free(data_); }

GatheredTensor::GatheredTensor(GatheredTensor&& other) noexcept { *this = std::move(other); }

GatheredTensor& GatheredTensor::operator=(GatheredTensor&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(on_device_, other.on_device_);
  std::swap(bytes_, other.bytes_);
  std::swap(rows_, other.rows_);
  return *this;
}

bool GatheredTensor::Allocate(size_t bytes, int64_t rows) {
  rows_ = rows;
  if (bytes == 0) return true;
  if (bytes > SIZE_MAX - kAlignment) return false;
  data_ = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  bytes_ = data_ != nullptr ? bytes : 0;
  return data_ != nullptr;
}

Status GatheredTensor::AllocateOn(const Device& device, size_t bytes, int64_t rows) {
  rows_ = rows;
  if (bytes == 0) return Status::Ok();
  HORORING_RETURN_IF_ERROR(device.Allocate(bytes, &on_device_));
  bytes_ = bytes;
  return Status::Ok();
}

bool GatheredTensor::Hold(const std::vector<int64_t>& numbers) {
  const size_t bytes = numbers.size() * sizeof(int64_t);
  if (!Allocate(bytes, static_cast<int64_t>(numbers.size()))) return false;
  if (bytes > 0) std::memcpy(data_, numbers.data(), bytes);
  return true;
}

void* GatheredTensor::Release() { return std::exchange(data_, nullptr); }

int64_t HandleTable::Create() {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t handle = next_++;
  slots_.emplace(handle, Slot());
  return handle;
}

void HandleTable::Create(int64_t* handles, size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < count; ++i) {
    handles[i] = next_++;
    slots_.emplace(handles[i], Slot());
  }
}

void HandleTable::Complete(int64_t handle, Status status, std::vector<GatheredTensor> results,
                           std::shared_ptr<const DeviceEvent> landed) {
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto slot = slots_.find(handle);
    if (slot == slots_.end()) return;
    wake = slot->second.awaited;
    if (slot->second.released) {
      slots_.erase(slot);
    } else {
      slot->second.done = true;
      slot->second.status = std::move(status);
      slot->second.results = std::move(results);
      slot->second.landed = std::move(landed);
    }
  }
  if (wake) completed_.notify_all();
}

HandleTable::Look HandleTable::Poll(int64_t handle) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(handle);
  if (slot == slots_.end() || slot->second.released) return Look::kUnknown;
  return slot->second.done ? Look::kDone : Look::kPending;
}

template <typename Settled>
bool HandleTable::Sleep(std::unique_lock<std::mutex>& lock, TimeNs timeout_ns,
                        const Settled& settled) {
  if (timeout_ns != kForever) {
    return completed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), settled);
  }
  completed_.wait(lock, settled);
  return true;
}

HandleTable::Look HandleTable::Wait(int64_t handle, TimeNs timeout_ns, Status* status) {
  std::unique_lock<std::mutex> lock(mutex_);
  Look look = Look::kPending;
  Sleep(lock, timeout_ns, [&] {
    const auto slot = slots_.find(handle);
    if (slot == slots_.end() || slot->second.released) {
      look = Look::kUnknown;
      return true;
    }
    slot->second.awaited = true;
    if (!slot->second.done) return false;
    look = Look::kDone;
    *status = slot->second.status;
    return true;
  });
  return look;
}

std::shared_ptr<const DeviceEvent> HandleTable::Landed(int64_t handle) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(handle);
  return slot == slots_.end() ? nullptr : slot->second.landed;
}

HandleTable::Look HandleTable::WaitMany(const int64_t* handles, size_t count, TimeNs timeout_ns,
                                        bool* all_ok,
                                        std::vector<std::shared_ptr<const DeviceEvent>>* landed) {
  std::unique_lock<std::mutex> lock(mutex_);
  *all_ok = true;
  size_t left = count;
  // The last one first: it is the last to be done, mostly, and then nothing wakes this thread
  // before.
  const bool settled = Sleep(lock, timeout_ns, [&] {
    for (; left > 0; --left) {
      const auto slot = slots_.find(handles[left - 1]);
      if (slot == slots_.end() || slot->second.released) {
        *all_ok = false;
        continue;
      }
      if (!slot->second.done) {
        slot->second.awaited = true;
        return false;
      }
      *all_ok = *all_ok && slot->second.status.ok();
    }
    return true;
  });
  if (!settled) {
    *all_ok = false;
    return Look::kPending;
  }
  for (size_t i = 0; *all_ok && i < count; ++i) {
    const auto slot = slots_.find(handles[i]);
    if (slot == slots_.end()) continue;
    std::shared_ptr<const DeviceEvent>& event = slot->second.landed;
    // Mostly those of one batch follow one another, and have one event.
    if (landed != nullptr && event != nullptr && (landed->empty() || landed->back() != event)) {
      landed->push_back(std::move(event));
    }
    slots_.erase(slot);
  }
  return Look::kDone;
}

// REQUIRES: mutex_ is held.
const GatheredTensor* HandleTable::Result(int64_t handle, size_t index) const {
  const auto slot = slots_.find(handle);
  const bool there =
      slot != slots_.end() && slot->second.done && index < slot->second.results.size();
  return there ? &slot->second.results[index] : nullptr;
}

Status HandleTable::Rows(int64_t handle, size_t index, int64_t* rows) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const GatheredTensor* result = Result(handle, index);
  if (result == nullptr) return NoResult(handle, index);
  *rows = result->rows();
  return Status::Ok();
}

Status HandleTable::Take(int64_t handle, size_t index, GatheredTensor* result) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(handle);
  if (Result(handle, index) == nullptr) return NoResult(handle, index);
  *result = std::move(slot->second.results[index]);
  return Status::Ok();
}

bool HandleTable::Release(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(handle);
  if (slot == slots_.end() || slot->second.released) return false;
  if (slot->second.done) {
    slots_.erase(slot);
  } else {
    slot->second.released = true;
    if (slot->second.awaited) completed_.notify_all();  // whoever waits for it waits in vain
  }
  return true;
}

}  // namespace hororing
