#include "backend/hierarchical_nccl.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "backend/common.h"
#include "backend/nccl_batch.h"
#include "base/log.h"
#include "collective/collectives.h"

namespace hororing {
namespace {

// Enough to use a bus and a network well, few enough to come to the next piece soon.
constexpr size_t kMostSlice = 4 << 20;
// Also where the fusion buffer would be smaller.
constexpr size_t kLeastSlice = 4 << 10;

std::vector<int> OwnersOf(const RanksOn& ranks_on, size_t slice) {
  std::vector<int> owners;
  for (const std::vector<int>& ranks : ranks_on) owners.push_back(ranks[slice]);
  return owners;
}

}  // namespace

bool HierarchicalNccl::MakesSense(const RanksOn& ranks_on) {
  return ranks_on.size() > 1 &&
         std::any_of(ranks_on.begin(), ranks_on.end(),
                     [](const std::vector<int>& ranks) { return ranks.size() > 1; });
}

HierarchicalNccl::Place HierarchicalNccl::Find(const RanksOn& ranks_on, int rank) {
  for (size_t host = 0;; ++host) {
    const std::vector<int>& ranks = ranks_on[host];
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found != ranks.end()) return {host, static_cast<size_t>(found - ranks.begin())};
  }
}

HierarchicalNccl::HierarchicalNccl(Transport& transport, const RanksOn& ranks_on,
                                   const WireCost& wire)
    : transport_(transport),
      ranks_on_(ranks_on),
      owners_(ShapeOf(ranks_on).least),
      homogeneous_(ShapeOf(ranks_on).most == owners_),
      own_(Find(ranks_on, transport.rank())),
      local_(transport, ranks_on[own_.host]) {
  if (static_cast<int>(own_.local) >= owners_) return;
  across_.emplace(transport, OwnersOf(ranks_on, own_.local));
  HostBackend::Options options;
  for (int host = 0; host < across_->size(); ++host) options.ranks_on.push_back({host});
  options.wire = wire;
  across_backend_.emplace(*across_, options);
}

NcclWay HierarchicalNccl::WayOf(const Batch& batch, bool scales) const {
  Batch sum;
  sum.kind = batch.kind;
  sum.reduce = WithDivisor(batch.reduce);
  return NcclWayOf(sum, transport_.size(), scales);
}

ReduceSpec HierarchicalNccl::WithDivisor(ReduceSpec spec) const {
  if (spec.op == ReduceOp::kAverage) {
    spec.op = ReduceOp::kSum;
    spec.postscale /= transport_.size();
  }
  return spec;
}

bool HierarchicalNccl::Supports(const Batch& batch, bool scales) const {
  // What is each rank's own crosses by way of its peers on the other hosts.
  const bool own_parts =
      batch.kind == Collective::kAllgather || batch.kind == Collective::kReducescatter;
  if (own_parts && !homogeneous_) return false;
  return batch.kind != Collective::kAlltoall && WayOf(batch, scales) != NcclWay::kNot;
}

Status HierarchicalNccl::Accept(const Batch& batch, const Gpu& gpu, TimeNs deadline,
                                bool* accepts) {
  *accepts = Supports(batch, gpu.scales);
  if (*accepts && !prepared_) HORORING_RETURN_IF_ERROR(Prepare(gpu, deadline));
  *accepts = *accepts && slice_bytes_ > 0;
  return Status::Ok();
}

// Memory, on all ranks or on none.
Status HierarchicalNccl::Prepare(const Gpu& gpu, TimeNs deadline) {
  prepared_ = true;
  const size_t slices = 2 * static_cast<size_t>(owners_);
  // A line for each host at least, where each has a part of a slice.
  const size_t least = std::max(kLeastSlice, ranks_on_.size() * kEntryAlign);
  const size_t permitted = std::max(gpu.fusion_bytes, slices * least) / slices;
  const size_t bytes = std::min(std::max(kMostSlice, least), permitted) / kEntryAlign * kEntryAlign;
  HORORING_RETURN_IF_ERROR(gpu.communicator->MakeFusionBuffer(slices * bytes, deadline));
  bool mine = gpu.communicator->fusion_bytes() > 0;
  for (auto& memory : pinned_) {
    mine = mine && (!across_ || gpu.device.AllocatePinned(bytes, &memory).ok());
  }
  std::vector<uint8_t> got(static_cast<size_t>(transport_.size()));
  const uint8_t own = mine ? 1 : 0;
  HORORING_RETURN_IF_ERROR(
      AllgatherV(transport_, &own, std::vector<size_t>(got.size(), 1), got.data(), deadline));
  const auto lacks = std::find(got.begin(), got.end(), 0);
  if (lacks == got.end()) {
    slice_bytes_ = bytes;
  } else if (!mine || transport_.rank() == 0) {
    Log(LogLevel::kWarning,
        "tensors on the device travel by way of the host, which is slow: rank " +
            std::to_string(lacks - got.begin()) +
            " of the process set lacks memory for slices of " + std::to_string(bytes) +
            " bytes; lower HORORING_FUSION_BYTES, or leave more free");
  }
  return Status::Ok();
}

size_t HierarchicalNccl::scratch_bytes() const {
  return across_backend_ ? 2 * slice_bytes_ + across_backend_->scratch_bytes() + scratch_.bytes()
                         : 0;
}

}  // namespace hororing
