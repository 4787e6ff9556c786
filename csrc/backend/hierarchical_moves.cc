// HierarchicalBackend's collectives except allreduce: who sends what to whom.
#include <cstring>
#include <string>
#include <utility>

#include "backend/common.h"
#include "backend/hierarchical.h"
#include "backend/scatter_pipeline.h"
#include "base/copy.h"
#include "collective/segments.h"

namespace hororing {
namespace {

// A channel with less than this is not worth its own message.
constexpr size_t kMinChannelBytes = 64 << 10;

Status DoesNotFit(const Batch& batch, const BatchEntry& entry) {
  return Status(Code::kInternal, std::string(Name(batch.kind)) + " of '" + entry.name +
                                     "': the agreed sizes do not fit this rank's tensor");
}

// The rank that sends to a rank, and the ranks to which it sends, when `count` ranks forward the
// data of rank 0 as in collective/broadcast.cc. -1: none.
struct Neighbours {
  int from = -1;
  std::vector<int> to;
};

Neighbours InChain(int rank, int count) {
  Neighbours neighbours;
  if (rank > 0) neighbours.from = rank - 1;
  if (rank + 1 < count) neighbours.to.push_back(rank + 1);
  return neighbours;
}

Neighbours InTree(int rank, int count) {
  Neighbours neighbours;
  int bit = 1;
  while (bit < count && (rank & bit) == 0) bit *= 2;
  if (rank > 0) neighbours.from = rank - bit;
  for (bit /= 2; bit > 0; bit /= 2) {
    if (rank + bit < count) neighbours.to.push_back(rank + bit);
  }
  return neighbours;
}

}  // namespace

size_t HierarchicalBackend::MaxChannels() const {
  size_t most = 0;
  for (int host = 0; host < set_.group.hosts(); ++host) {
    std::vector<size_t> owned(set_.group.group_ranks_on[static_cast<size_t>(host)].size(), 1);
    for (int other = 0; other < set_.group.hosts(); ++other) {
      const int ranks =
          static_cast<int>(set_.group.group_ranks_on[static_cast<size_t>(other)].size());
      for (int local = 0; local < ranks && other != host; ++local) {
        ++owned[static_cast<size_t>(set_.group.OwnerOn(host, local, leader()))];
      }
    }
    for (const size_t count : owned) most = std::max(most, count);
  }
  return most;
}

// With very many ranks, pieces would be too small to be worthwhile.
bool HierarchicalBackend::Fits(Collective kind) const {
  switch (kind) {
    case Collective::kAllgather:
      return set_.geometry.capacity / MaxChannels() >= ChannelPlan::kMinBytes;
    case Collective::kReducescatter:
      return set_.geometry.capacity / static_cast<size_t>(set_.group.size()) >=
             ScatterPlan::kMinBytes;
    default:
      return set_.geometry.capacity / static_cast<size_t>(shape_.least) >= ChannelPlan::kMinBytes;
  }
}

Status HierarchicalBackend::RunChannels(const Batch& batch, std::vector<Channel> channels,
                                        size_t most, TimeNs deadline, TraceSink& trace) {
  const ChannelPlan plan(std::move(channels), set_, most);
  if (plan.blocks == 0) return Status::Ok();
  return ChannelPipeline(set_, batch, plan, deadline, trace).Run();
}

Status HierarchicalBackend::RunAllgather(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const size_t size = static_cast<size_t>(set_.group.size()),
               own = static_cast<size_t>(set_.group.group_rank);
  std::vector<Channel> channels(size);
  for (const BatchEntry& entry : batch.entries) {
    if (entry.receive_bytes.size() != size || entry.receive_bytes[own] != entry.bytes()) {
      return DoesNotFit(batch, entry);
    }
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
      channel.owner = set_.group.OwnerOn(set_.group.host, local, leader());
      if (channel.owner == set_.group.local) channel.from = set_.group.members.ranks[rank];
    }
  }
  channels[own].begins = true;
  // At each distance, every host sends to another one.
  for (int distance = 1; distance < set_.group.hosts(); ++distance) {
    const int host = (set_.group.host + distance) % set_.group.hosts();
    channels[own].to.push_back(
        set_.group.JobRank(host, set_.group.OwnerOn(host, set_.group.local, leader())));
  }
  return RunChannels(batch, std::move(channels), MaxChannels(), deadline, trace);
}

Status HierarchicalBackend::RunBroadcast(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const bool is_root = batch.root == set_.group.group_rank;
  size_t total = 0;
  for (const BatchEntry& entry : batch.entries) {
    const size_t bytes = entry.bytes();
    total += bytes;
    if (is_root && bytes > 0 && entry.output != entry.input) {
      CopyBytes(entry.output, entry.input, bytes);
    }
  }
  if (total == 0) return Status::Ok();
  const size_t owners = leader() ? 1 : static_cast<size_t>(shape_.least);
  const size_t count = std::min(owners, (total + kMinChannelBytes - 1) / kMinChannelBytes);
  std::vector<Channel> channels(count);
  size_t channel = 0, filled = 0;
  for (const BatchEntry& entry : batch.entries) {
    const size_t bytes = entry.bytes();
    for (size_t done = 0; done < bytes;) {
      const Span part = Chunk(total, static_cast<int>(count), static_cast<int>(channel));
      const size_t length = std::min(bytes - done, part.begin + part.size - filled);
      channels[channel].Add(static_cast<std::byte*>(entry.output) + done, length);
      done += length;
      filled += length;
      if (filled == part.begin + part.size) ++channel;
    }
  }
  const size_t root = static_cast<size_t>(batch.root);
  const int hosts = set_.group.hosts(), first = set_.group.host_of[root];
  const int position = (set_.group.host - first + hosts) % hosts;
  size_t rounds = 0;
  while ((size_t{1} << rounds) < static_cast<size_t>(hosts)) ++rounds;
  const size_t segments = (total + kMinChannelBytes - 1) / kMinChannelBytes;
  const bool chain = static_cast<size_t>(std::max(hosts - 2, 0)) + segments < rounds * segments;
  const Neighbours around = chain ? InChain(position, hosts) : InTree(position, hosts);
  const auto rank_at = [&](int there, size_t number) {
    if (there == 0) return set_.group.members.ranks[root];
    return set_.group.JobRank((first + there) % hosts, static_cast<int>(number));
  };
  for (size_t number = 0; number < count; ++number) {
    Channel& each = channels[number];
    each.owner = position == 0 ? set_.group.local_of[root] : static_cast<int>(number);
    each.begins = is_root;
    if (each.owner != set_.group.local) continue;
    if (around.from >= 0) each.from = rank_at(around.from, number);
    for (const int to : around.to) each.to.push_back(rank_at(to, number));
  }
  return RunChannels(batch, std::move(channels), count, deadline, trace);
}

Status HierarchicalBackend::RunReducescatter(const Batch& batch, TimeNs deadline,
                                             TraceSink& trace) {
  HORORING_RETURN_IF_ERROR(Check(batch.reduce()));
  for (const BatchEntry& entry : batch.entries) {
    size_t elements = 0;
    for (const size_t part : entry.parts) elements += part;
    if (entry.parts.size() != static_cast<size_t>(set_.group.size()) ||
        elements != entry.elements) {
      return DoesNotFit(batch, entry);
    }
  }
  const ScatterPlan plan(set_, batch, leader());
  if (plan.blocks == 0) return Status::Ok();
  const size_t bytes = set_.geometry.depth * plan.scratch_bytes(batch.reduce());
  std::byte* const memory = static_cast<std::byte*>(scratch_.Reserve(bytes));
  if (memory == nullptr) {
    return Status(Code::kInternal, "reduce-scatter between hosts: no memory for partial sums of " +
                                       std::to_string(bytes) + " bytes");
  }
  return ScatterPipeline(set_, batch, plan, memory, deadline, trace).Run();
}

}  // namespace hororing
