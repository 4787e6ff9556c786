// The C interface: requests that the engine has, until they are complete and released.
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "capi/process.h"

using namespace hororing;

namespace {

Status NoHandle(int64_t handle) {
  return Status(Code::kInvalidArgument, "there is no handle " + std::to_string(handle));
}

}  // namespace

HR_EXPORT int hr_poll(int64_t handle) try {
  if (InForkedChild()) return -Remember(NotInitialized());
  const std::shared_ptr<Engine> engine = CurrentEngine();
  const HandleState state = engine != nullptr ? engine->Poll(handle) : Handles()->Poll(handle);
  if (state == HandleState::kUnknown) return -Remember(NoHandle(handle));
  return state == HandleState::kDone ? 1 : 0;
}
HR_OR(-Caught())

HR_EXPORT int64_t hr_next_completion(int64_t seen, double timeout_s) try {
  if (InForkedChild()) return -Remember(NotInitialized());
  const TimeNs timeout = Scaled(timeout_s, kSecond);
  const std::shared_ptr<Engine> engine = CurrentEngine();
  return engine ? engine->NextCompletion(seen, timeout) : Handles()->NextCompletion(seen, timeout);
}
HR_OR(-Caught())

HR_EXPORT int hr_wait(int64_t handle, double timeout_s) try {
  if (InForkedChild()) return Remember(NotInitialized());
  Status status;
  const TimeNs timeout = timeout_s < 0 ? kForever : Scaled(timeout_s, kSecond);
  const std::shared_ptr<Engine> engine = CurrentEngine();
  const HandleState state = engine != nullptr ? engine->Wait(handle, timeout, &status)
                                              : Handles()->Wait(handle, timeout, &status);
  if (state == HandleState::kPending) return HR_PENDING;
  return Remember(state == HandleState::kDone ? status : NoHandle(handle));
}
HR_OR(Caught())

HR_EXPORT int hr_wait_many(const int64_t* handles, int32_t count, double timeout_s,
                           const uintptr_t* stream) try {
  if (InForkedChild()) return Remember(NotInitialized());
  const TimeNs timeout = timeout_s < 0 ? kForever : Scaled(timeout_s, kSecond);
  const std::shared_ptr<Engine> engine = CurrentEngine();
  std::shared_ptr<Device> device;
  if (stream != nullptr && engine != nullptr && engine->devices().Any(&device).ok()) {
    const Status free = device->RefuseCaptured(StreamOf(*stream));  // before any is released
    if (!free.ok()) return Remember(free);
  }
  const size_t number = static_cast<size_t>(count);
  bool all_ok = false;
  std::vector<std::shared_ptr<const DeviceEvent>> events;
  const HandleState state = engine != nullptr && timeout > 0
                                ? engine->WaitMany(handles, number, timeout, &all_ok, &events)
                                : Handles()->WaitMany(handles, number, timeout, &all_ok, &events);
  if (state == HandleState::kPending) return HR_PENDING;
  if (!all_ok) return Remember(Status(Code::kInvalidArgument, "some of these handles have failed"));
  for (size_t i = 0; stream != nullptr && i < events.size(); ++i) {
    const Status status = events[i]->StreamWait(StreamOf(*stream));
    if (!status.ok()) return Remember(status);
  }
  return HR_OK;
}
HR_OR(Caught())

HR_EXPORT int hr_take_result(int64_t handle, int32_t index, hr_result* result) try {
  if (InForkedChild()) return Remember(NotInitialized());
  ResultBuffer gathered;
  const Status status = Handles()->Take(handle, static_cast<size_t>(index), &gathered);
  if (!status.ok()) return Remember(status);
  if (gathered.on_device() != nullptr) {
    return Remember(Status(Code::kInvalidArgument, "the result was on a device: hr_move_result"));
  }
  result->bytes = static_cast<int64_t>(gathered.bytes());
  result->rows = gathered.rows();
  result->data = reinterpret_cast<uintptr_t>(gathered.Release());
  return HR_OK;
}
HR_OR(Caught())

HR_EXPORT void hr_free(uintptr_t data) { std::free(reinterpret_cast<void*>(data)); }

HR_EXPORT int hr_release(int64_t handle) try {
  if (InForkedChild()) return Remember(NotInitialized());
  return Remember(Handles()->Release(handle) ? Status::Ok() : NoHandle(handle));
}
HR_OR(Caught())
