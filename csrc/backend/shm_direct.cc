#include "backend/shm_direct.h"

#include <string>
#include <vector>

#include "backend/allreduce_pipeline.h"
#include "backend/common.h"

namespace hororing {

ShmDirectBackend::ShmDirectBackend(ShmTransport& transport, const Members& members,
                                   size_t chunk_bytes)
    : set_{HostGroup(MakeTopology(transport.rank(),
                                  std::vector<std::string>(static_cast<size_t>(transport.size()))),
                     members),
           transport, transport, SlotGeometry::OneHost(transport.segment().geometry().slot_bytes),
           FirstBlock(members)},
      chunk_bytes_(chunk_bytes) {}

bool ShmDirectBackend::Fits(const ShmSegment::Geometry& geometry) {
  return geometry.slot_bytes >= 2 * kEntryAlign;
}

bool ShmDirectBackend::Supports(const Batch& batch) const {
  return batch.kind == Collective::kAllreduce && !batch.is_adasum();
}

Status ShmDirectBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  algorithm_used_ = AlgorithmUsed::kNotCounted;
  HORORING_RETURN_IF_ERROR(CheckSpecs(batch));
  if (set_.group.size() == 1) {
    ReduceAlone(batch, trace);
    return Status::Ok();
  }
  HORORING_RETURN_IF_ERROR(broken_);
  const AllreducePlan plan(batch, set_, set_.group.size(), {}, chunk_bytes_);
  if (plan.blocks == 0) return Status::Ok();
  algorithm_used_ = AlgorithmUsed::kShmDirect;
  return broken_ = RunAllreduce(set_, batch, plan, scratch_, deadline, trace);
}

size_t ShmDirectBackend::scratch_bytes() const {
  return set_.group.members.set == 0 ? set_.local.segment().geometry().slot_bytes : 0;
}

}  // namespace hororing
