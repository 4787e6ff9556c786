// StagedBatches: batches on a device that go through host memory: without NCCL, if several ranks
// share a device, and for operations that NCCL lacks.
//
// A batch is copied to a pinned buffer, carried out there by a backend of the host, and copied
// back. Unlike NCCL this blocks the loop, until the framework's kernels have produced the inputs
// and while the host reduces. Thread-safety: only for the thread that runs the loop.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "gpu/device.h"
#include "transport/transport.h"

namespace hororing {

class StagedBatches {
 public:
  // `host`: backends of the same ranks, of which the last supports every batch on the host.
  StagedBatches(Transport& transport, std::vector<Backend*> host)
      : transport_(transport), host_(std::move(host)) {}

  // REQUIRES: the private stream of `device` waits for the inputs. The outputs are complete when
  // that stream has finished. `timeout` limits every wait for a peer.
  Status Run(const Batch& batch, const Device& device, TimeNs timeout, TraceSink& trace);
  size_t scratch_bytes() const { return bytes_; }

 private:
  Status Reserve(const Device& device, size_t bytes);
  Status Synchronize(const DeviceEvent& event);

  Transport& transport_;
  const std::vector<Backend*> host_;
  std::shared_ptr<void> buffer_;  // pinned
  size_t bytes_ = 0;              // of it
};

}  // namespace hororing
