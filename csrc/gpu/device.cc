#include "gpu/device.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace hororing {
namespace {

constexpr unsigned kPackThreads = 256;
// Equal to those of kernels.cu.
constexpr size_t kMaxPackedCopies = 120;
constexpr size_t kPackBlockBytes = 32 << 10;
struct PackTable {
  uint64_t count = 0;
  struct {
    const void* from;
    void* to;
    uint64_t bytes;
    uint64_t first_block;
  } copies[kMaxPackedCopies];
};
static_assert(sizeof(PackTable) <= 4096 - 16, "a launch takes 4 KiB of arguments");

constexpr char kKernels[] =
#include "gpu/kernels.inc"
    ;

CuAddress AddressOf(const void* memory) { return reinterpret_cast<CuAddress>(memory); }

// `status` of an allocation, with advice.
Status Advised(const Status& status, size_t bytes) {
  if (status.ok()) return status;
  return Status(status.code(), status.message() + ", for " + std::to_string(bytes) +
                                   " bytes; the framework may hold what is free in its cache: "
                                   "leave more memory to others, or communicate less at a time");
}

}  // namespace

// Errors are ignored: they mean that the context is lost, and the next call reports that.
DeviceEvent::~DeviceEvent() {
  const Device::Current current(*device_);
  device_->api().event_destroy(event_);
}

Status DeviceEvent::Poll(bool* reached) const {
  const Device::Current current(*device_);
  HORORING_RETURN_IF_ERROR(current.status());
  const CuResult result = device_->api().event_query(event_);
  *reached = result == kCuSuccess;
  if (result == kCuNotReady) return Status::Ok();
  return device_->api().Check(result, device_->api().event_query.name());
}

Status DeviceEvent::StreamWait(CuStream stream) const {
  return device_->Call(device_->api().stream_wait_event, stream, event_, 0);
}

DeviceMemory::~DeviceMemory() {
  if (address_ == 0) return;
  const Device::Current current(*device_);
  static_cast<void>(device_->ReleaseMemory(address_, device_->stream()));
}

Status DeviceMemory::MoveTo(void* to, size_t bytes, CuStream stream) {
  const Device::Current current(*device_);
  HORORING_RETURN_IF_ERROR(current.status());
  const CudaApi& api = device_->api();
  HORORING_RETURN_IF_ERROR(api.Call(api.copy_on_device, AddressOf(to), address_, bytes, stream));
  return device_->ReleaseMemory(std::exchange(address_, 0), stream);
}

Device::Current::Current(const Device& device) : device_(device) {
  status_ = device.api_->Call(device.api_->ctx_push, device.context_);
  if (status_.ok()) device.api_->exchange_capture_mode(&capture_mode_);
}

Device::Current::~Current() {
  if (!status_.ok()) return;
  CuContext popped = nullptr;
  device_.api_->exchange_capture_mode(&capture_mode_);
  device_.api_->ctx_pop(&popped);
}

Status Device::Open(std::shared_ptr<const CudaApi> api, int ordinal,
                    std::shared_ptr<Device>* device) {
  if (ordinal < 0 || ordinal >= api->devices) {
    return Status(Code::kInvalidArgument, "there is no CUDA device " + std::to_string(ordinal) +
                                              "; this process sees " +
                                              std::to_string(api->devices));
  }
  std::shared_ptr<Device> opened(new Device(std::move(api), ordinal));
  HORORING_RETURN_IF_ERROR(opened->Start());
  *device = std::move(opened);
  return Status::Ok();
}

Status Device::Start() {
  const CudaApi& api = *api_;
  HORORING_RETURN_IF_ERROR(api.Call(api.device_get, &device_, ordinal_));
  char text[256] = "";
  HORORING_RETURN_IF_ERROR(api.Call(api.device_get_name, text, int{sizeof text}, device_));
  name_ = text;
  HORORING_RETURN_IF_ERROR(api.Call(api.device_get_uuid, &uuid_, device_));
  // The framework uses the same context.
  HORORING_RETURN_IF_ERROR(api.Call(api.primary_ctx_retain, &context_, device_));
  const Current current(*this);
  HORORING_RETURN_IF_ERROR(current.status());
  int least = 0, greatest = 0;
  HORORING_RETURN_IF_ERROR(api.Call(api.ctx_priorities, &least, &greatest));
  HORORING_RETURN_IF_ERROR(api.Call(api.stream_create, &stream_, kCuStreamNonBlocking, greatest));
  int pools = 0;
  const CuResult asked = api.device_get_attribute(&pools, kCuMemoryPoolsSupported, device_);
  has_pools_ = asked == kCuSuccess && pools != 0;
  if (!has_pools_) {
    Log(LogLevel::kInfo, name_ + " has no memory pools: gathers allocate their results anew");
  }
  Status found = api.Call(api.module_load_data, &module_, kKernels);
  if (found.ok()) {
    found = api.Call(api.module_get_function, &copy_many_, module_, "hororing_copy_many");
  }
  if (!found.ok()) {
    Log(LogLevel::kInfo, "tensors are packed one by one on " + name_ + ": " + found.message());
  }
  return Status::Ok();
}

Device::~Device() {
  if (context_ == nullptr) return;
  {
    const Current current(*this);
    if (module_ != nullptr) api_->module_unload(module_);
    if (stream_ != nullptr) api_->stream_destroy(stream_);
  }
  api_->primary_ctx_release(device_);
}

Status Device::RefuseCaptured(CuStream stream) const {
  int capturing = kCuStreamCaptureStatusNone;
  HORORING_RETURN_IF_ERROR(Call(api_->stream_is_capturing, stream, &capturing));
  if (capturing == kCuStreamCaptureStatusNone) return Status::Ok();
  return Status(Code::kInvalidArgument, CapturedText());
}

Status Device::Record(CuStream stream, std::shared_ptr<DeviceEvent>* event) const {
  HORORING_RETURN_IF_ERROR(RefuseCaptured(stream));
  const Current current(*this);
  HORORING_RETURN_IF_ERROR(current.status());
  CuEvent recorded = nullptr;
  HORORING_RETURN_IF_ERROR(api_->Call(api_->event_create, &recorded, kCuEventDisableTiming));
  *event = std::make_shared<DeviceEvent>(shared_from_this(), recorded);
  return api_->Call(api_->event_record, recorded, stream);
}

Status Device::CopyToHost(void* to, const void* from, size_t bytes) const {
  return Call(api_->copy_to_host, to, AddressOf(from), bytes, stream_);
}

Status Device::CopyToDevice(void* to, const void* from, size_t bytes) const {
  return Call(api_->copy_to_device, AddressOf(to), from, bytes, stream_);
}

Status Device::CopyOnDevice(const std::vector<DeviceCopy>& copies) const {
  if (packs_by_kernel() && copies.size() > 1) return CopyByKernel(copies);
  for (const DeviceCopy& copy : copies) {
    HORORING_RETURN_IF_ERROR(
        Call(api_->copy_on_device, AddressOf(copy.to), AddressOf(copy.from), copy.bytes, stream_));
  }
  return Status::Ok();
}

Status Device::CopyByKernel(const std::vector<DeviceCopy>& copies) const {
  for (size_t begin = 0; begin < copies.size(); begin += kMaxPackedCopies) {
    PackTable table;
    uint64_t blocks = 0;
    for (size_t i = begin; i < std::min(begin + kMaxPackedCopies, copies.size()); ++i) {
      table.copies[table.count++] = {copies[i].from, copies[i].to, copies[i].bytes, blocks};
      blocks += (copies[i].bytes + kPackBlockBytes - 1) / kPackBlockBytes;
    }
    void* parameters[] = {&table};
    HORORING_RETURN_IF_ERROR(Call(api_->launch_kernel, copy_many_, static_cast<unsigned>(blocks), 1,
                                  1, kPackThreads, 1, 1, 0, stream_, parameters, nullptr));
  }
  return Status::Ok();
}

Status Device::Allocate(size_t bytes, std::shared_ptr<DeviceMemory>* memory) const {
  CuAddress address = 0;
  const Status allocated = has_pools_ ? Call(api_->mem_alloc_async, &address, bytes, stream_)
                                      : Call(api_->mem_alloc, &address, bytes);
  HORORING_RETURN_IF_ERROR(Advised(allocated, bytes));
  *memory = std::make_shared<DeviceMemory>(shared_from_this(), address);
  return Status::Ok();
}

Status Device::ReleaseMemory(CuAddress address, CuStream stream) const {
  if (has_pools_) return api_->Call(api_->mem_free_async, address, stream);
  HORORING_RETURN_IF_ERROR(api_->Call(api_->stream_synchronize, stream));
  return api_->Call(api_->mem_free, address);
}

Status Device::AllocatePinned(size_t bytes, std::shared_ptr<void>* memory) const {
  void* data = nullptr;
  const Status allocated = Call(api_->mem_host_alloc, &data, bytes, kCuMemHostAllocPortable);
  HORORING_RETURN_IF_ERROR(Advised(allocated, bytes));
  memory->reset(data, [device = shared_from_this()](void* pinned) {
    const Current current(*device);
    device->api().mem_free_host(pinned);
  });
  return Status::Ok();
}

}  // namespace hororing
