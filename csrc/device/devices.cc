#include "device/devices.h"

#include <utility>

namespace hororing {

// REQUIRES: mutex_ is held.
Status Devices::LoadDriver() {
  if (cuda_ != nullptr) return Status::Ok();
  auto api = std::make_shared<CudaApi>();
  HORORING_RETURN_IF_ERROR(CudaApi::Load(options_.cuda_library, api.get()));
  cuda_ = std::move(api);
  return Status::Ok();
}

Status Devices::Use(int ordinal, std::shared_ptr<Device>* device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (device_ == nullptr) {
    HORORING_RETURN_IF_ERROR(LoadDriver());
    HORORING_RETURN_IF_ERROR(Device::Open(cuda_, ordinal, &device_));
    in_use_ = true;
  }
  if (device_->ordinal() != ordinal) {
    return Status(Code::kInvalidArgument,
                  "the tensor is on CUDA device " + std::to_string(ordinal) +
                      ", but this process communicates on device " +
                      std::to_string(device_->ordinal()) +
                      "; start one process per GPU, and set the framework's device to "
                      "local_rank() in each, before its first tensor");
  }
  *device = device_;
  return Status::Ok();
}

Status Devices::Any(std::shared_ptr<Device>* device) {
  int ordinal = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    HORORING_RETURN_IF_ERROR(LoadDriver());
    ordinal = device_ != nullptr ? device_->ordinal() : options_.likely % cuda_->devices;
  }
  return Use(ordinal, device);
}

Status Devices::Nccl(std::shared_ptr<const NcclApi>* nccl) {
  std::lock_guard<std::mutex> lock(nccl_mutex_);
  if (nccl_ == nullptr && nccl_status_.ok()) {
    auto api = std::make_shared<NcclApi>();
    nccl_status_ = NcclApi::Load(options_.nccl_libraries, api.get());
    if (nccl_status_.ok()) nccl_ = std::move(api);
  }
  *nccl = nccl_;
  return nccl_status_;
}

void Devices::AbortTogether(const std::function<void()>& end_communicators) {
  std::shared_ptr<Device> device;
  std::shared_ptr<const NcclApi> nccl;
  {
    std::scoped_lock lock(mutex_, nccl_mutex_);
    device = device_;
    nccl = nccl_;
  }
  if (device == nullptr || nccl == nullptr || nccl->version < kLeastNcclVersionOfGroupedAborts) {
    return end_communicators();
  }
  const Device::Current current(*device);
  nccl->group_start();
  end_communicators();
  nccl->group_end();
}

}  // namespace hororing
