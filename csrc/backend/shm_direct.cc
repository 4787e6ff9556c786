#include "backend/shm_direct.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backend/common.h"
#include "backend/shm_pipeline.h"
#include "backend/shm_plan.h"

namespace hororing {
namespace {

int RankAmong(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Until nobody reads this rank's slot any more. No rank waits here for ever: what the readers have
// to do, they can do without this one, which has done its part.
Status WaitForReaders(ShmTransport& transport, TimeNs deadline) {
  const ShmTransport::SlotReaders& readers = transport.slot_readers();
  const auto lagging = [&] {
    std::string ranks;
    for (const int rank : readers.ranks) {
      const RankState& state = transport.segment().rank_state(rank);
      const uint64_t consumed = state.direct[readers.set].consumed.load(std::memory_order_acquire);
      if (consumed < readers.end) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    return ranks;
  };
  return transport.WaitUntil([&] { return lagging().empty(); }, lagging, deadline);
}

}  // namespace

ShmDirectBackend::ShmDirectBackend(ShmTransport& transport, Members members, size_t chunk_bytes)
    : transport_(transport),
      members_(std::move(members)),
      group_rank_(RankAmong(transport.rank(), members_.ranks)),
      next_block_(FirstBlock(members_)),
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
  if (members_.ranks.size() == 1) {
    ReduceAlone(batch, trace);
    return Status::Ok();
  }
  HORORING_RETURN_IF_ERROR(broken_);
  const Plan plan(batch, static_cast<int>(members_.ranks.size()),
                  transport_.segment().geometry().slot_bytes, chunk_bytes_);
  const uint64_t first = next_block_;
  next_block_ += plan.blocks;
  ShmTransport::SlotReaders& readers = transport_.slot_readers();
  const bool others = readers.set != members_.set || readers.generation != members_.generation;
  if (others) broken_ = WaitForReaders(transport_, deadline);
  if (!broken_.ok() || plan.blocks == 0) return broken_;
  algorithm_used_ = AlgorithmUsed::kShmDirect;
  broken_ =
      ShmPipeline(transport_, members_, group_rank_, batch, plan, first, deadline, trace).Run();
  readers = {members_.ranks, members_.set, members_.generation, next_block_};
  return broken_;
}

size_t ShmDirectBackend::scratch_bytes() const {
  return members_.set == 0 ? transport_.segment().geometry().slot_bytes : 0;
}

}  // namespace hororing
