// CudaBackend: batches of tensors on CUDA devices, for one process set. They go through NCCL if
// every rank has it and a device of its own, otherwise through host memory (ADR 23).
//
// The ranks agree on one of the two at the first batch. Run returns when all work is in the
// device's private stream, followed by an event (`done`). Poll reports later failures.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "gpu/devices.h"
#include "gpu/nccl_batch.h"
#include "gpu/nccl_communicator.h"
#include "gpu/staged_batch.h"
#include "transport/transport.h"

namespace hororing {

enum class GpuMode { kAuto, kNccl, kStaged };
// "auto", "nccl", "staged"
Status Parse(const std::string& name, GpuMode* mode);

class CudaBackend final : public Backend {
 public:
  struct Options {
    std::shared_ptr<Devices> devices;
    GpuMode mode = GpuMode::kAuto;
    bool reproducible = false;  // through host memory, where sums are made in rank order
    size_t fusion_bytes = 0;
  };
  // `host` as for StagedBatches.
  CudaBackend(Transport& transport, const Options& options, std::vector<Backend*> host);

  const char* name() const override { return "cuda"; }
  bool on_device() const override { return true; }
  bool Supports(const Batch& batch) const override { return batch.on_device; }
  Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) override;
  std::shared_ptr<const DeviceEvent> done() const override { return done_; }
  Status Poll() override;
  Status Leave(TimeNs deadline) override;
  void Abort() override;
  // Null: through host memory, or not chosen yet.
  const NcclCommunicator* nccl() const { return nccl_.get(); }

 private:
  // A batch in the stream.
  struct InFlight {
    std::vector<std::shared_ptr<const DeviceEvent>> ready;  // of the framework
    std::shared_ptr<const DeviceEvent> done;
    std::string label;
    TimeNs timeout;
    TimeNs deadline = 0;  // 0: its tensors are not ready yet
  };
  struct Card;
  Status Choose(TimeNs deadline);
  Status RunOnDevice(const Batch& batch, TimeNs timeout, TraceSink& trace);
  Status Compare(int nccl_version, TimeNs deadline, std::string* obstacle);
  std::string Obstacle(const std::vector<Card>& cards) const;
  Status PollBatch(InFlight& batch, bool* done);

  Transport& transport_;
  const Options options_;
  StagedBatches staged_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<NcclCommunicator> nccl_;
  bool chosen_ = false;
  std::shared_ptr<const DeviceEvent> done_;
  std::deque<InFlight> in_flight_;
};

}  // namespace hororing
