// HostBackend: runs any batch on host memory over any Transport. Several tensors of an allreduce
// are packed into the fusion buffer, reduced there and unpacked; a single tensor is reduced in
// place. Other collectives of several tensors share messages likewise; broadcasts only small ones.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "collective/allreduce.h"
#include "collective/collectives.h"
#include "transport/subgroup.h"
#include "transport/transport.h"

namespace hororing {

class HostBackend final : public Backend {
 public:
  // `ranks_on`: the ranks of `transport` by host, if there are several hosts. Empty: one host.
  explicit HostBackend(Transport& transport, const AllreduceOptions& options = {},
                       const std::vector<std::vector<int>>& ranks_on = {});

  const char* name() const override { return "host"; }
  bool Supports(const Batch&) const override { return true; }
  Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) override;
  AlgorithmUsed algorithm_used() const override { return algorithm_used_; }

 private:
  Status RunAllreduce(const Batch& batch, TimeNs deadline, TraceSink& trace);
  Status RunAdasum(const Batch& batch, TimeNs deadline, TraceSink& trace);
  Status RunReducescatter(const Batch& batch, TimeNs deadline, TraceSink& trace);
  // In host_moves.cc.
  Status RunAllgather(const Batch& batch, TimeNs deadline, TraceSink& trace);
  Status RunAlltoall(const Batch& batch, TimeNs deadline, TraceSink& trace);
  Status RunBroadcast(const Batch& batch, TimeNs deadline, TraceSink& trace);
  Status BroadcastByHost(int root, void* data, size_t bytes, TimeNs deadline);

  size_t MessageBytes() const;
  GatherOptions gather_options() const {
    return {by_host_.get(), MessageBytes(),
            hosts_ > 1 && static_cast<size_t>(transport_.size()) == hosts_};
  }
  void MoveToOutput(const Batch& batch, const BatchEntry& entry, TraceSink& trace);
  // Returns the fusion buffer, at least `bytes` long.
  Status Fuse(size_t bytes, std::byte** buffer);

  Transport& transport_;
  const AllreduceOptions options_;
  const size_t hosts_;                       // 0 or 1: one host
  const std::unique_ptr<Subgroup> by_host_;  // null if the order of the ranks is as good
  Scratch fusion_buffer_{&scratch_bytes_};
  Scratch receive_buffer_{&scratch_bytes_};
  AlgorithmUsed algorithm_used_ = AlgorithmUsed::kNotCounted;
};

}  // namespace hororing
