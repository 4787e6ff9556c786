// Device: one GPU: a private stream for the engine's work, events towards the framework's, memory.
//
//   framework's stream   ... backward | event ----------- wait | step ...
//   private stream           wait ----+ pack reduce unpack | event ----+
//
// Only functions that allocate block the host, and, without memory pools, those that free memory.
//
// Thread-safety: any function, any thread. Only the loop uses the private stream, and orders it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "gpu/cuda_api.h"

namespace hororing {

class Device;

// A point in a stream.
class DeviceEvent {
 public:
  DeviceEvent(std::shared_ptr<const Device> device, CuEvent event)
      : device_(std::move(device)), event_(event) {}
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;

  Status Poll(bool* reached) const;  // Whether the device has reached it.
  // Makes later work in `stream` of that device wait for it.
  Status StreamWait(CuStream stream) const;
  const Device& device() const { return *device_; }

 private:
  const std::shared_ptr<const Device> device_;
  const CuEvent event_;
};

// Device memory, allocated in the order of the private stream: work there may write it at once, and
// it is released when that stream has finished its work so far.
class DeviceMemory {
 public:
  DeviceMemory(std::shared_ptr<const Device> device, CuAddress address)
      : device_(std::move(device)), address_(address) {}
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(address_); }
  // Copies `bytes` to `to` in the order of `stream`, and is released there. REQUIRES: `stream`
  // waits for the writes to this memory.
  Status MoveTo(void* to, size_t bytes, CuStream stream);

 private:
  const std::shared_ptr<const Device> device_;
  CuAddress address_;
};

// One of many copies on the device.
struct DeviceCopy {
  void* to;
  const void* from;
  size_t bytes;
};

class Device : public std::enable_shared_from_this<Device> {
 public:
  // kInvalidArgument when there is no such device.
  static Status Open(std::shared_ptr<const CudaApi> api, int ordinal,
                     std::shared_ptr<Device>* device);
  ~Device();
  Device(const Device&) = delete;

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }  // "NVIDIA H200"
  const CuUuid& uuid() const { return uuid_; }       // of the GPU, also where this is a part of it
  CuStream stream() const { return stream_; }        // the private one
  const CudaApi& api() const { return *api_; }
  bool packs_by_kernel() const { return copy_many_ != nullptr; }

  // kInvalidArgument while `stream` is captured into a graph.
  Status RefuseCaptured(CuStream stream) const;
  // The present point of `stream`. kInvalidArgument as before.
  Status Record(CuStream stream, std::shared_ptr<DeviceEvent>* event) const;

  // On the private stream.
  Status CopyToHost(void* to, const void* from, size_t bytes) const;
  Status CopyToDevice(void* to, const void* from, size_t bytes) const;
  Status CopyOnDevice(const std::vector<DeviceCopy>& copies) const;  // REQUIRES: none is empty
  Status Allocate(size_t bytes, std::shared_ptr<DeviceMemory>* memory) const;
  // Releases memory of Allocate when `stream` reaches this point. REQUIRES: Current.
  Status ReleaseMemory(CuAddress address, CuStream stream) const;

  // Host memory that the device reads and writes by itself.
  Status AllocatePinned(size_t bytes, std::shared_ptr<void>* memory) const;

  // Makes the device's context current on this thread while it exists. NCCL needs that, too. Calls
  // meanwhile do not break a capture that the framework runs on another thread, as most calls
  // otherwise would (querying events, allocating memory).
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    const Device& device_;
    Status status_;
    int capture_mode_ = kCuStreamCaptureModeRelaxed;  // after the constructor: the previous one
  };

  // Calls a function of api() while the context is current.
  template <typename Function, typename... Arguments>
  Status Call(const Function& function, Arguments... arguments) const {
    const Current current(*this);
    HORORING_RETURN_IF_ERROR(current.status());
    return api_->Call(function, arguments...);
  }

 private:
  Device(std::shared_ptr<const CudaApi> api, int ordinal)
      : api_(std::move(api)), ordinal_(ordinal) {}
  Status Start();
  Status CopyByKernel(const std::vector<DeviceCopy>& copies) const;

  const std::shared_ptr<const CudaApi> api_;
  const int ordinal_;
  CuDevice device_ = 0;
  CuContext context_ = nullptr;
  CuStream stream_ = nullptr;
  CuModule module_ = nullptr;
  CuFunction copy_many_ = nullptr;  // null: one copy after the other
  bool has_pools_ = true;           // of memory; some virtual GPUs have none
  std::string name_;
  CuUuid uuid_ = {};
};

}  // namespace hororing
