#include "gpu/devices.h"

#include <utility>

#include "base/call_watch.h"

namespace hororing {

// A thread waits here for one in a call of the driver. The loop's thread, if abandoned meanwhile,
// would keep the lock forever; so it releases it before the watched wait ends, and tries again.
std::unique_lock<std::mutex> Devices::LockOpening() {
  constexpr CallWatch::Name kOpening{"the first use of a device, in another thread,",
                                     "NVIDIA's driver"};
  for (;;) {
    std::unique_lock<std::mutex> opening(opening_, std::try_to_lock);
    if (opening.owns_lock()) return opening;
    const CallWatch::Call waits(CallWatch::Current(), kOpening);
    std::lock_guard<std::mutex> wait(opening_);
  }
}

// REQUIRES: opening_.
Status Devices::LoadDriver() {
  if (cuda_ != nullptr) return Status::Ok();
  auto api = std::make_shared<CudaApi>();
  HORORING_RETURN_IF_ERROR(CudaApi::Load(options_.cuda_library, api.get()));
  cuda_ = std::move(api);
  return Status::Ok();
}

// REQUIRES: opening_, and no device is open.
Status Devices::Open(std::optional<int> ordinal) {
  in_use_ = true;  // from here on, callers do not run the loop (engine/engine.h)
  std::shared_ptr<Device> fresh;
  Status status = LoadDriver();
  if (status.ok()) {
    status = Device::Open(cuda_, ordinal.value_or(options_.likely % cuda_->devices), &fresh);
  }
  in_use_ = status.ok();
  std::lock_guard<std::mutex> lock(mutex_);
  device_ = std::move(fresh);
  return status;
}

std::shared_ptr<Device> Devices::opened() {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_;
}

Status Devices::Use(int ordinal, std::shared_ptr<Device>* device) {
  std::shared_ptr<Device> one;
  HORORING_RETURN_IF_ERROR(UseOr(ordinal, &one));
  if (one->ordinal() != ordinal) {
    return Status(Code::kInvalidArgument,
                  "the tensor is on CUDA device " + std::to_string(ordinal) +
                      ", but this process communicates on device " +
                      std::to_string(one->ordinal()) +
                      "; start one process per GPU, and set the framework's device to "
                      "local_rank() in each, before its first tensor");
  }
  *device = std::move(one);
  return Status::Ok();
}

Status Devices::UseOr(std::optional<int> ordinal, std::shared_ptr<Device>* device) {
  *device = opened();
  if (*device != nullptr) return Status::Ok();
  const std::unique_lock<std::mutex> opening = LockOpening();
  if (opened() == nullptr) HORORING_RETURN_IF_ERROR(Open(ordinal));
  *device = opened();
  return Status::Ok();
}

bool Devices::Exist() {
  const std::unique_lock<std::mutex> opening = LockOpening();
  return LoadDriver().ok();
}

Status Devices::Nccl(std::shared_ptr<const NcclApi>* nccl) {
  std::lock_guard<std::mutex> loading(loading_nccl_);
  if (!nccl_asked_) {
    nccl_asked_ = true;
    auto api = std::make_shared<NcclApi>();
    nccl_status_ = NcclApi::Load(options_.nccl_libraries, api.get());
    std::lock_guard<std::mutex> lock(mutex_);
    if (nccl_status_.ok()) nccl_ = std::move(api);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  *nccl = nccl_;
  return nccl_status_;
}

void Devices::AbortTogether(const std::function<void()>& end_communicators) {
  std::shared_ptr<const NcclApi> nccl;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    nccl = nccl_;
  }
  if (nccl == nullptr || nccl->version < kMinNcclVersionOfGroupedAborts) return end_communicators();
  nccl->group_start();
  end_communicators();
  nccl->group_end();
}

}  // namespace hororing
