// Devices: the one GPU that an engine uses: that of the first GPU tensor.
//
// One process per GPU, as in Horovod; a tensor on another device is refused. The driver is loaded
// when the first GPU tensor comes, never before.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/status.h"
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

  // Whether there are devices and a driver that is new enough.
  bool Exist();
  // Device `ordinal`; kInvalidArgument where it cannot be had, or another one is in use.
  Status Use(int ordinal, std::shared_ptr<Device>* device);
  // The one in use. A process that has used none gets the one that it would likely use.
  Status Any(std::shared_ptr<Device>* device);
  // Whether there is one in use, or about to be.
  bool in_use() const { return in_use_.load(); }
  // NCCL, loaded at the first call; the same answer ever after.
  Status Nccl(std::shared_ptr<const NcclApi>* nccl);
  // Does `end_communicators`, which aborts some of NCCL, in one group where NCCL can, so that all
  // are told before the first is waited for: a collective of one may be stuck in the stream behind
  // one of another.
  void AbortTogether(const std::function<void()>& end_communicators);

 private:
  std::unique_lock<std::mutex> LockOpening();
  Status LoadDriver();
  Status Open(std::optional<int> ordinal);  // none: the likely one
  std::shared_ptr<Device> opened();         // null: none

  const Options options_;
  // Each is held while its library is called, which may take forever. There are two, so that a
  // caller that needs the device does not wait for NCCL.
  std::mutex opening_, loading_nccl_;
  std::shared_ptr<const CudaApi> cuda_;  // GUARDED_BY(opening_)
  std::mutex mutex_;                     // not held during any call
  std::shared_ptr<Device> device_;       // GUARDED_BY(mutex_)
  std::shared_ptr<const NcclApi> nccl_;  // GUARDED_BY(mutex_)
  bool nccl_asked_ = false;              // GUARDED_BY(loading_nccl_)
  Status nccl_status_;                   // GUARDED_BY(loading_nccl_)
  std::atomic<bool> in_use_{false};
};

}  // namespace hororing
