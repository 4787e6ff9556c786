// NcclCommunicator: NCCL's communicator for one process set, each rank with its own device.
//
// It is non-blocking: the state of an operation is polled until it is done, a peer is dead or a
// deadline passes. After any error the communicator is aborted, which ends its kernels.
//
// Thread-safety: only for the thread that runs the loop, or has abandoned it.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "base/types.h"
#include "gpu/device.h"
#include "gpu/nccl_api.h"
#include "transport/transport.h"

namespace hororing {

class NcclCommunicator {
 public:
  // All ranks of `transport` call it; the transport carries NCCL's unique id.
  static Status Make(std::shared_ptr<const NcclApi> api, std::shared_ptr<Device> device,
                     Transport& transport, TimeNs deadline,
                     std::unique_ptr<NcclCommunicator>* made);
  ~NcclCommunicator();  // Aborts, unless Leave has succeeded.
  // Aborts work in flight. Only the destructor may follow, and not within the same group of NCCL.
  void Abort();
  NcclCommunicator(const NcclCommunicator&) = delete;

  // One group of calls, made by `enqueue`, on the device's private stream. Returns when they are in
  // the stream, so that an event can follow.
  Status Group(const std::function<NcclResult()>& enqueue, TimeNs deadline);
  Status Poll() const;            // kTransport if an operation in the stream has failed.
  Status Leave(TimeNs deadline);  // All ranks call it when the stream is empty.

  // Multiplies by `factor` before summing; valid until LimitScaledSums. REQUIRES: a type of floats.
  Status ScaledSum(DataType dtype, double factor, NcclOp* op);
  // Called before each batch: frees the operations if there are many, because factors that change
  // in every step would fill NCCL's table.
  Status LimitScaledSums();
  // Memory for fusion, allocated once. All ranks call it, with the same `bytes`, and exchange the
  // result. The buffer exists on all ranks or on none, because they must make the same calls.
  Status MakeFusionBuffer(size_t bytes, TimeNs deadline);
  std::byte* fusion_buffer() const { return static_cast<std::byte*>(fusion_->data()); }
  size_t fusion_bytes() const { return fusion_bytes_; }  // 0: no buffer

  const NcclApi& api() const { return *api_; }
  NcclComm comm() const { return comm_; }

 private:
  NcclCommunicator(std::shared_ptr<const NcclApi> api, std::shared_ptr<Device> device,
                   Transport& transport)
      : api_(std::move(api)), device_(std::move(device)), transport_(transport) {}
  Status Join(TimeNs deadline);
  Status Settle(NcclResult begun, const char* call, TimeNs deadline);

  const std::shared_ptr<const NcclApi> api_;
  const std::shared_ptr<Device> device_;
  Transport& transport_;
  NcclComm comm_ = nullptr;  // null before creation, after Leave and Abort
  std::map<std::pair<DataType, double>, NcclOp> scaled_sums_;
  bool fusion_asked_ = false;
  std::shared_ptr<DeviceMemory> fusion_;  // freed behind the work in the stream
  size_t fusion_bytes_ = 0;
};

// NCCL's name of the type. REQUIRES: NcclSupportsType(dtype).
NcclType NcclTypeOf(DataType dtype);
bool NcclSupportsType(DataType dtype);

}  // namespace hororing
