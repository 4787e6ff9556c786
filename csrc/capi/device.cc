// The C interface: additional functions for tensors on GPUs.
#include <memory>
#include <string>

#include "capi/process.h"
#include "gpu/devices.h"

using namespace hororing;

namespace {

std::string DescribeCuda(const std::string& library) {
  CudaApi api;
  const Status loaded = CudaApi::Load(library, &api);
  if (!loaded.ok()) return "GPU: none; " + loaded.message() + "\n";
  std::string text = "driver: CUDA " + api.version_text() + " (" + api.library.path() + ")\n";
  for (int i = 0; i < api.devices; ++i) {
    CuDevice device = 0;
    char name[128] = "";
    const bool known = api.device_get(&device, i) == kCuSuccess &&
                       api.device_get_name(name, sizeof name, device) == kCuSuccess;
    text += "GPU " + std::to_string(i) + ": " + (known ? name : "does not answer") + "\n";
  }
  return text;
}

}  // namespace

HR_EXPORT int hr_wait_in_stream(int64_t handle, uintptr_t stream) try {
  if (InForkedChild()) return Remember(NotInitialized());
  const std::shared_ptr<const DeviceEvent> done_event = Handles()->DoneEvent(handle);
  return done_event == nullptr ? static_cast<int>(HR_OK)
                               : Remember(done_event->StreamWait(StreamOf(stream)));
}
HR_OR(Caught())

HR_EXPORT int hr_landed(int64_t handle) try {
  if (InForkedChild()) return -Remember(NotInitialized());
  const std::shared_ptr<HandleTable> handles = Handles();
  if (handles->Poll(handle) == HandleState::kPending) return 0;
  const std::shared_ptr<const DeviceEvent> done_event = handles->DoneEvent(handle);
  bool reached = false;
  // A device that does not answer no longer uses memory.
  return done_event == nullptr || !done_event->Poll(&reached).ok() || reached;
}
HR_OR(-Caught())

HR_EXPORT int hr_result_rows(int64_t handle, int32_t index, int64_t* rows) try {
  if (InForkedChild()) return Remember(NotInitialized());
  return Remember(Handles()->Rows(handle, static_cast<size_t>(index), rows));
}
HR_OR(Caught())

HR_EXPORT int hr_move_result(int64_t handle, int32_t index, uintptr_t memory,
                             uintptr_t stream) try {
  const int waits = hr_wait_in_stream(handle, stream);
  if (waits != HR_OK) return waits;
  ResultBuffer gathered;
  const Status taken = Handles()->Take(handle, static_cast<size_t>(index), &gathered);
  if (!taken.ok() || gathered.on_device() == nullptr) return Remember(taken);
  return Remember(gathered.on_device()->MoveTo(reinterpret_cast<void*>(memory), gathered.bytes(),
                                               StreamOf(stream)));
}
HR_OR(Caught())

HR_EXPORT int hr_use_device(int32_t ordinal) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Remember(NotInitialized());
  std::shared_ptr<Device> device;
  if (!engine->devices().Exist()) return HR_OK;
  return Remember(engine->devices().Use(ordinal, &device));
}
HR_OR(Caught())

HR_EXPORT int32_t hr_nccl_version(const char* nccl_libraries) try {
  NcclApi nccl;
  Remember(NcclApi::Load(nccl_libraries, &nccl));
  return nccl.version;
}
HR_OR((Caught(), 0))

HR_EXPORT void hr_describe_gpu(const char* cuda_library, const char* nccl_libraries, char* text,
                               int32_t text_bytes) try {
  const Devices::Options otherwise;
  std::string described =
      DescribeCuda(cuda_library != nullptr ? cuda_library : otherwise.cuda_library);
  NcclApi nccl;
  const Status loaded = NcclApi::Load(nccl_libraries, &nccl);
  described += "NCCL: " + (loaded.ok() ? nccl.version_text() + " (" + nccl.library.path() + ")"
                                       : "none; " + loaded.message());
  CopyText(described, text, text_bytes);
}
HR_OR(static_cast<void>(Caught()))
