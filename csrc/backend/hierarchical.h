// HierarchicalBackend: collectives over several hosts whose ranks share memory within their host,
// for all ranks or those of a process set. Allreduces are in backend/allreduce_pipeline.h. Every
// host has as many slice owners as the smallest host has ranks ("three phases": reduce-scatter in
// the host, allreduces of slices between hosts, all-gather in the host), or one ("leader").
// All-gathers and broadcasts are in backend/channel_pipeline.h, reduce-scatters in
// backend/scatter_pipeline.h.
// backend/scatter_pipeline.h.
//
// Numerics: hosts are summed in order, and the ranks of a host in rank order, as partial results
// that are rounded once. All ranks get the same bits, whatever an element is fused with.
//
// Costs decide which batches it runs (collective/algorithm.h). HostBackend's flat algorithms run
// the others.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "backend/channel_pipeline.h"
#include "backend/host_pipeline.h"
#include "collective/algorithm.h"
#include "collective/allreduce.h"
#include "transport/factory.h"
#include "transport/shm_transport.h"

namespace hororing {

class HierarchicalBackend final : public Backend {
 public:
  // `wire` connects all ranks of the job, `local` those of this host, by local rank.
  HierarchicalBackend(Transport& wire, ShmTransport& local, const Topology& topology,
                      const Members& members, const AllreduceOptions& options);

  const char* name() const override { return "hierarchical"; }
  bool Supports(const Batch& batch) const override;
  Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) override;
  // This rank's slot and the buffers for the wire.
  size_t scratch_bytes() const override;
  AlgorithmUsed algorithm_used() const override { return algorithm_used_; }

 private:
  Algorithm Choose(const Batch& batch) const;
  bool Flat() const;
  bool leader() const { return algorithm_ == Algorithm::kLeader; }
  Status RunAllreduce(const Batch& batch, TimeNs deadline, TraceSink& trace);
  // In hierarchical_moves.cc.
  bool Fits(Collective kind) const;
  Status RunAllgather(const Batch& batch, TimeNs deadline, TraceSink& trace);
  Status RunBroadcast(const Batch& batch, TimeNs deadline, TraceSink& trace);
  Status RunChannels(const Batch& batch, std::vector<Channel> channels, size_t most,
                     TimeNs deadline, TraceSink& trace);
  Status RunReducescatter(const Batch& batch, TimeNs deadline, TraceSink& trace);
  // The largest number of channels that a rank owns in an all-gather.
  size_t MaxChannels() const;

  SetSlots set_;
  const HostShape shape_;
  const AllreduceOptions options_;
  const Algorithm algorithm_;  // requested for all batches
  Scratch scratch_;
  AlgorithmUsed algorithm_used_ = AlgorithmUsed::kNotCounted;
  Status broken_;  // the first error: the ranks' counters differ, so every later Run fails
};

}  // namespace hororing
