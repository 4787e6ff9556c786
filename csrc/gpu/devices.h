// Devices: the one GPU that an engine uses, which is that of its first GPU tensor.
//
// One process per GPU, as in Horovod; a tensor on another device is refused. The driver is loaded
// with the first GPU tensor, never before.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "gpu/device.h"
#include "gpu/nccl_api.h"

namespace hororing {

class Devices {
 public:
  struct Options {
    std::string cuda_library = "libcuda.so.1";
    std::string nccl_libraries = "libnccl.so.2";  // "a:b": the first that can be loaded
    int likely = 0;  // the device of a process that has not used one: its rank on the host
  };
  explicit Devices(const Options& options) : options_(options) {}

  bool Exist();  // Whether there are devices and a sufficiently new driver.
  // Device `ordinal`; kInvalidArgument if it is unusable or another one is in use.
  Status Use(int ordinal, std::shared_ptr<Device>* device);
  // The device in use. A process that has used none gets its likely device.
  Status Any(std::shared_ptr<Device>* device) { return UseOr(std::nullopt, device); }
  // Whether a device is in use, or about to be.
  bool in_use() const { return in_use_.load(); }
  // Whether NCCL reduces tensors of this engine.
  bool nccl_in_use() const { return nccl_in_use_.load(); }
  void set_nccl_in_use() { nccl_in_use_ = true; }
  // NCCL, loaded by the first call; later calls give the same answer.
  Status Nccl(std::shared_ptr<const NcclApi>* nccl);
  // Runs `end_communicators`, which aborts communicators of NCCL, as one group if NCCL supports
  // that. Then all of them are aborted before the first is waited for: a collective of one may be
  // stuck in the stream behind a collective of another.
  void AbortTogether(const std::function<void()>& end_communicators);

 private:
  std::unique_lock<std::mutex> LockOpening();
  Status LoadDriver();
  Status Open(std::optional<int> ordinal);  // none: the likely one
  std::shared_ptr<Device> opened();         // null: none
  // The device in use, or else `ordinal`.
  Status UseOr(std::optional<int> ordinal, std::shared_ptr<Device>* device);

  const Options options_;
  // Each is held during calls of its library, which may never return. There are two, so that a
  // caller that needs the device does not wait for NCCL.
  std::mutex opening_, loading_nccl_;
  std::shared_ptr<const CudaApi> cuda_;  // GUARDED_BY(opening_)
  std::mutex mutex_;                     // not held during any call
  std::shared_ptr<Device> device_;       // GUARDED_BY(mutex_)
  std::shared_ptr<const NcclApi> nccl_;  // GUARDED_BY(mutex_)
  bool nccl_asked_ = false;              // GUARDED_BY(loading_nccl_)
  Status nccl_status_;                   // GUARDED_BY(loading_nccl_)
  std::atomic<bool> in_use_{false}, nccl_in_use_{false};
};

}  // namespace hororing
