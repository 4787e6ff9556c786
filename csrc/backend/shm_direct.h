// ShmDirectBackend: allreduces among ranks that map one segment (backend/allreduce_pipeline.h), for
// all ranks of a one-host job or those of a process set. The same bits in every run; no wire.
#pragma once

#include "backend/backend.h"
#include "backend/host_pipeline.h"
#include "collective/allreduce.h"
#include "transport/shm_transport.h"

namespace hororing {

class ShmDirectBackend final : public Backend {
 public:
  // REQUIRES: Fits(transport.segment().geometry()) and members.set < kDirectSets. At most one per
  // set of a transport. `chunk_bytes`: the block size; 0: built in.
  ShmDirectBackend(ShmTransport& transport, const Members& members, size_t chunk_bytes = 0);
  // True when the slots can hold two blocks of at least a cache line.
  static bool Fits(const ShmSegment::Geometry& geometry);

  const char* name() const override { return "shm_direct"; }
  bool Supports(const Batch& batch) const override;
  Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) override;
  // This rank's slot.
  size_t scratch_bytes() const override;
  AlgorithmUsed algorithm_used() const override { return algorithm_used_; }

 private:
  SetSlots set_;
  const size_t chunk_bytes_;
  Scratch scratch_;  // remains empty
  AlgorithmUsed algorithm_used_ = AlgorithmUsed::kNotCounted;
  Status broken_;  // the first error: the ranks' counters differ, so every later Run fails
};

}  // namespace hororing
