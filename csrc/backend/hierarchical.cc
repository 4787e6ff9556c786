#include "backend/hierarchical.h"

#include "backend/allreduce_pipeline.h"
#include "backend/common.h"

namespace hororing {
namespace {

HostShape Shared(HostShape shape) {
  shape.shared = true;
  return shape;
}

}  // namespace

HierarchicalBackend::HierarchicalBackend(Transport& wire, ShmTransport& local,
                                         const Topology& topology, const Members& members,
                                         const AllreduceOptions& options)
    : set_{HostGroup(topology, members), wire, local,
           SlotGeometry::SeveralHosts(local.segment().geometry().slot_bytes), FirstBlock(members)},
      shape_(Shared(ShapeOf(set_.group.group_ranks_on))),
      options_(options),
      algorithm_(options.OnlyAlgorithm()) {}

Algorithm HierarchicalBackend::Choose(const Batch& batch) const {
  if (shape_.hosts == 1) return Algorithm::kThreePhase;
  const Algorithm algorithm = options_.AlgorithmFor(batch.bytes());
  if (algorithm != Algorithm::kAuto) return algorithm;
  return Cheapest(VolumeOf(batch), shape_, options_.wire);
}

// Whether all batches over several hosts use the flat algorithms.
bool HierarchicalBackend::Flat() const {
  return shape_.hosts > 1 &&
         (algorithm_ == Algorithm::kRing || algorithm_ == Algorithm::kRecursiveDoubling);
}

bool HierarchicalBackend::Supports(const Batch& batch) const {
  if (Flat()) return false;
  switch (batch.kind) {
    case Collective::kAllreduce: {
      if (batch.is_adasum() || options_.reproducible) return false;
      const Algorithm algorithm = Choose(batch);
      return algorithm == Algorithm::kThreePhase || algorithm == Algorithm::kLeader;
    }
    case Collective::kReducescatter:
      return !options_.reproducible && Fits(batch.kind) &&
             (algorithm_ != Algorithm::kAuto || shape_.hosts == 1 ||
              SumsWithinHosts(batch.reduce(), shape_));
    case Collective::kAllgather:
    case Collective::kBroadcast: return Fits(batch.kind);
    default: return false;
  }
}

Status HierarchicalBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  algorithm_used_ = AlgorithmUsed::kNotCounted;
  HORORING_RETURN_IF_ERROR(broken_);
  switch (batch.kind) {
    case Collective::kAllgather: broken_ = RunAllgather(batch, deadline, trace); break;
    case Collective::kBroadcast: broken_ = RunBroadcast(batch, deadline, trace); break;
    case Collective::kReducescatter: broken_ = RunReducescatter(batch, deadline, trace); break;
    default: broken_ = RunAllreduce(batch, deadline, trace);
  }
  return broken_;
}

Status HierarchicalBackend::RunAllreduce(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  HORORING_RETURN_IF_ERROR(CheckSpecs(batch));
  const bool by_leader = Choose(batch) == Algorithm::kLeader;
  const AllreducePlan plan(batch, set_, by_leader ? 1 : shape_.least, options_.wire,
                           options_.chunk_bytes);
  if (plan.blocks == 0) return Status::Ok();
  algorithm_used_ = by_leader ? AlgorithmUsed::kLeader : AlgorithmUsed::kThreePhase;
  return hororing::RunAllreduce(set_, batch, plan, scratch_, deadline, trace);
}

size_t HierarchicalBackend::scratch_bytes() const {
  const size_t slot = set_.group.members.set == 0 ? set_.local.segment().geometry().slot_bytes : 0;
  return slot + scratch_.bytes();
}

}  // namespace hororing
