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

}  // namespace

GatheredTensor::~GatheredTensor() { std::free(data_); }

GatheredTensor::GatheredTensor(GatheredTensor&& other) noexcept { *this = std::move(other); }

GatheredTensor& GatheredTensor::operator=(GatheredTensor&& other) noexcept {
  std::swap(data_, other.data_);
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

void HandleTable::Complete(int64_t handle, Status status, std::vector<GatheredTensor> results) {
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto slot = slots_.find(handle);
    if (slot == slots_.end()) return;
    if (slot->second.released) {
      slots_.erase(slot);
    } else {
      slot->second.done = true;
      slot->second.status = std::move(status);
      slot->second.results = std::move(results);
    }
    wake = waiters_ > 0;
  }
  if (wake) completed_.notify_all();
}

HandleTable::Look HandleTable::Poll(int64_t handle) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(handle);
  if (slot == slots_.end() || slot->second.released) return Look::kUnknown;
  return slot->second.done ? Look::kDone : Look::kPending;
}

HandleTable::Look HandleTable::Wait(int64_t handle, TimeNs timeout_ns, Status* status) {
  std::unique_lock<std::mutex> lock(mutex_);
  Look look = Look::kPending;
  const auto settled = [&] {
    const auto slot = slots_.find(handle);
    if (slot == slots_.end() || slot->second.released) {
      look = Look::kUnknown;
      return true;
    }
    if (!slot->second.done) return false;
    look = Look::kDone;
    *status = slot->second.status;
    return true;
  };
  ++waiters_;
  if (timeout_ns == kForever) {
    completed_.wait(lock, settled);
  } else {
    completed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), settled);
  }
  --waiters_;
  return look;
}

Status HandleTable::Take(int64_t handle, size_t index, GatheredTensor* result) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(handle);
  if (slot == slots_.end() || !slot->second.done || index >= slot->second.results.size()) {
    return Status(Code::kInvalidArgument,
                  "handle " + std::to_string(handle) + " has no result " + std::to_string(index));
  }
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
    if (waiters_ > 0) completed_.notify_all();  // whoever waits for it waits in vain
  }
  return true;
}

}  // namespace hororing
