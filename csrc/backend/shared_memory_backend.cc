#include "backend/shared_memory_backend.h"

#include "backend/allreduce_pipeline.h"
#include "backend/common.h"

namespace hororing {
SharedMemoryBackend::SharedMemoryBackend(Transport& wire, ShmTransport& local,
                                         const Topology& topology, const Members& members,
                                         const AllreduceOptions& options)
    : one_segment_(&wire == &local),
      set_{HostGroup(topology, members), wire, local,
           one_segment_ ? SlotGeometry::OneHost(local.segment().geometry().slot_bytes)
                        : SlotGeometry::SeveralHosts(local.segment().geometry().slot_bytes),
           FirstBlock(members)},
      options_(options) {
  if (members.set == 0) scratch_bytes_ = local.segment().geometry().slot_bytes;
}

bool SharedMemoryBackend::Supports(const Batch& batch) const {
  const bool one_host = set_.group.hosts() == 1;
  // Sums over several hosts are not in rank order.
  if (batch.kind == Collective::kAllreduce) {
    return !batch.is_adasum() && (one_host || !options_.reproducible);
  }
  if (one_segment_) return false;
  switch (batch.kind) {
    case Collective::kReducescatter: return !options_.reproducible && Fits(batch.kind);
    case Collective::kAllgather: return Fits(batch.kind);
    default: return false;
  }
}

Status SharedMemoryBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  algorithm_used_ = AlgorithmUsed::kNotCounted;
  HORORING_RETURN_IF_ERROR(broken_);
  switch (batch.kind) {
    case Collective::kAllgather: broken_ = RunAllgather(batch, deadline, trace); break;
    case Collective::kReducescatter: broken_ = RunReducescatter(batch, deadline, trace); break;
    default:
      if (set_.group.size() == 1) {
        ReduceAlone(batch, trace);
        break;
      }
      const AllreducePlan plan(batch, set_, options_.latency_bytes);
      if (plan.blocks == 0) break;
      algorithm_used_ =
          set_.group.hosts() == 1 ? AlgorithmUsed::kShmDirect : AlgorithmUsed::kThreePhase;
      broken_ = RunAllreduce(set_, batch, plan, scratch_, deadline, trace);
  }
  return broken_;
}

}  // namespace hororing
