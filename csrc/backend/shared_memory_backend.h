// SharedMemoryBackend: collectives of ranks that share memory, on one host or within each of
// several hosts, for all ranks or those of a process set: allreduces
// (backend/allreduce_pipeline.h; over several hosts "three phases": reduce-scatter in the host,
// allreduces of slices between hosts, all-gather in the host), and over several hosts all-gathers
// (backend/channel_pipeline.h) and reduce-scatters (backend/scatter_pipeline.h).
//
// Numerics: hosts are summed in order, and the ranks of a host in rank order, as partial results
// that are rounded once. All ranks get the same bits, whatever an element is fused with.
//
// HostBackend runs all other batches: Adasum, all-to-all, broadcast, pieces that would be too
// small, and everything over several hosts with HORORING_REPRODUCIBLE=1.
#pragma once

#include "backend/backend.h"
#include "backend/host_pipeline.h"
#include "collective/algorithm.h"
#include "collective/allreduce.h"
#include "transport/factory.h"
#include "transport/shm/shm_transport.h"

namespace hororing {

class SharedMemoryBackend final : public Backend {
 public:
  // `wire` connects all ranks of the job, `local` those of this host, by local rank; on one host
  // they are the same. REQUIRES: members.set < kSlotSets. At most one per set of a transport.
  SharedMemoryBackend(Transport& wire, ShmTransport& local, const Topology& topology,
                      const Members& members, const AllreduceOptions& options);

  const char* name() const override { return one_segment_ ? "shm_direct" : "hierarchical"; }
  bool Supports(const Batch& batch) const override;
  bool LooksAt(const Batch&) const override {
    return set_.group.hosts() == 1 && set_.group.size() > 1;
  }
  Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) override;
  AlgorithmUsed algorithm_used() const override { return algorithm_used_; }

 private:
  // In shared_memory_moves.cc.
  bool Fits(Collective kind) const;
  Status RunAllgather(const Batch& batch, TimeNs deadline, TraceSink& trace);
  Status RunReducescatter(const Batch& batch, TimeNs deadline, TraceSink& trace);
  size_t MaxChannels() const;  // The largest number of channels that a rank owns in an all-gather.

  const bool one_segment_;  // of all ranks of the job
  SetSlots set_;
  const AllreduceOptions options_;
  Scratch scratch_{&scratch_bytes_};  // for data on the wire
  AlgorithmUsed algorithm_used_ = AlgorithmUsed::kNotCounted;
  Status broken_;  // the first error: the ranks' counters differ, so every later Run fails
};

}  // namespace hororing
