// SharedMemoryBackend's all-gather and reduce-scatter: who sends what to whom.
#include <utility>

#include "backend/channel_pipeline.h"
#include "backend/common.h"
#include "backend/scatter_pipeline.h"
#include "backend/shared_memory_backend.h"
#include "collective/segments.h"
#include "kernels/copy.h"

namespace hororing {
// A rank of the smallest host owns most: the channel of that host, and its share of the others'.
size_t SharedMemoryBackend::MaxChannels() const {
  size_t most = 0;
  const size_t owners = static_cast<size_t>(set_.group.least_local_size());
  for (const auto& ranks : set_.group.group_ranks_on) most += (ranks.size() + owners - 1) / owners;
  return most;
}

// With very many ranks, pieces would be too small to be worthwhile.
bool SharedMemoryBackend::Fits(Collective kind) const {
  if (kind == Collective::kAllgather) {
    return set_.geometry.capacity / MaxChannels() >= ChannelPlan::kMinBytes;
  }
  return set_.geometry.capacity / static_cast<size_t>(set_.group.size()) >= ScatterPlan::kMinBytes;
}

Status SharedMemoryBackend::RunAllgather(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const size_t size = static_cast<size_t>(set_.group.size()),
               own = static_cast<size_t>(set_.group.group_rank);
  std::vector<Channel> channels(size);
  for (const BatchEntry& entry : batch.entries) {
    HORORING_RETURN_IF_ERROR(CheckSizes(batch, entry, size, own));
    std::byte* at = static_cast<std::byte*>(entry.output);
    for (size_t rank = 0; rank < size; ++rank) {
      const size_t bytes = entry.receive_bytes[rank];
      channels[rank].Add(at, bytes);
      if (rank == own && bytes > 0 && at != entry.input) CopyBytes(at, entry.input, bytes);
      at += bytes;
    }
  }
  for (size_t rank = 0; rank < size; ++rank) {
    Channel& channel = channels[rank];
    const int local = set_.group.local_of[rank];
    if (set_.group.host_of[rank] == set_.group.host) {
      channel.owner = local;
    } else {
      channel.owner = set_.group.OwnerOn(set_.group.host, local);
      if (channel.owner == set_.group.local) channel.from = set_.group.members.ranks[rank];
    }
  }
  channels[own].begins = true;
  // At each distance every host sends to another one.
  for (int distance = 1; distance < set_.group.hosts(); ++distance) {
    const int host = (set_.group.host + distance) % set_.group.hosts();
    channels[own].to.push_back(
        set_.group.JobRank(host, set_.group.OwnerOn(host, set_.group.local)));
  }
  const ChannelPlan plan(std::move(channels), set_, MaxChannels());
  if (plan.blocks == 0) return Status::Ok();
  return ChannelPipeline(set_, batch, plan, deadline, trace).Run();
}

Status SharedMemoryBackend::RunReducescatter(const Batch& batch, TimeNs deadline,
                                             TraceSink& trace) {
  const ScatterPlan plan(set_, batch);
  if (plan.blocks == 0) return Status::Ok();
  std::byte* memory = nullptr;
  HORORING_RETURN_IF_ERROR(
      scratch_.Reserve(set_.geometry.depth * plan.scratch_bytes(batch.reduce()),
                       "reduce-scatter between hosts: no memory for partial sums", &memory));
  return ScatterPipeline(set_, batch, plan, memory, deadline, trace).Run();
}

}  // namespace hororing
