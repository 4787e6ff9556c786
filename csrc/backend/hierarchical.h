// HierarchicalBackend: allreduce over several hosts, whose ranks share memory with those of their
// host. The batch is one virtual buffer (its tensors back to back, each padded to 64 bytes) that
// is walked in blocks; of every block, some ranks of each host own a slice:
//
//   PACK      rank r copies the slices of others in block k into its slot       packed[r] = k + 1
//   REDUCE    an owner sums its slice of all ranks of the host, in rank order
//   exchange  the owners of a slice on all hosts add up their sums, over the wire
//             (collective/slice_exchange.h), into the owner's slot             reduced[r] = k + 1
//   UNPACK    every rank copies all slices to its outputs                      consumed[r] = k + 1
//
// Slots hold several blocks, so that the wire is busy while the next blocks are reduced. As many
// ranks of each host own slices as every host has ("three phases": reduce-scatter in the host,
// allreduces of slices between hosts, all-gather in the host), or only one ("leader").
//
// Numerics: hosts are summed in their order, each of them in rank order, as partial results that
// are rounded once; on all ranks the same bits, whatever an element is fused with.
//
// Which batches it takes, the costs decide (collective/algorithm.h); the flat algorithms of
// HostBackend have the rest.
//
// Invariants: 1 and 2 of backend/shm_direct.h.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "collective/algorithm.h"
#include "collective/allreduce.h"
#include "transport/factory.h"
#include "transport/shm_transport.h"

namespace hororing {

class HierarchicalBackend final : public Backend {
 public:
  struct Options {
    Algorithm algorithm = Algorithm::kAuto;
    WireCost wire;
  };
  // `wire` connects all ranks, `local` those of this host, by local rank.
  // REQUIRES: several hosts.
  HierarchicalBackend(Transport& wire, ShmTransport& local, const Topology& topology,
                      const Options& options);

  const char* name() const override { return "hierarchical"; }
  bool Supports(const Batch& batch) const override;
  Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) override;
  // This rank's slot, and what lies between hosts.
  size_t scratch_bytes() const override;

 private:
  Algorithm Choose(const Batch& batch) const;

  Transport& wire_;
  ShmTransport& local_;
  const Topology topology_;
  const std::vector<std::vector<int>> ranks_on_;  // per host, by local rank
  const HostShape shape_;
  const Options options_;
  Scratch scratch_;
  uint64_t next_block_ = 0;
  Status broken_;  // the first error: the ranks' counters no longer agree, every later Run fails
};

}  // namespace hororing
