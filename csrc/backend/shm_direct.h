// ShmDirectBackend: allreduce among ranks that map one segment. The batch is one virtual buffer
// (its tensors are contiguous, each padded to 64 bytes) that is processed in blocks small enough to
// stay in the cache:
//
//   PACK    rank r copies the parts of block k for others to its slot   packed[r] = k + 1
//   REDUCE  rank r combines slice r of all ranks, in rank order         reduced[r] = k + 1
//   UNPACK  rank r copies the others' slices to its outputs             consumed[r] = k + 1
//
// Slots hold two or more blocks, so that the stages of neighbouring blocks overlap. No fusion
// buffer, no pairwise copies, one rounding, the same bits in every run.
//
// With more than two ranks, batches of up to 32 KiB take a short cut: each rank packs its whole
// input and reduces the whole block itself. That saves the second wait for the peers and gives the
// same bits.
//
// Invariants
//   1. A block of a slot is overwritten only when consumed[q] shows that every rank q has finished
//      with the previous contents.
//   2. Block numbers never restart: they increase over all batches of a set, and a later set with
//      the same number starts above them.
//   3. A rank's slot serves one set at a time: before a batch of another set writes to it, the rank
//      waits for the readers of the latest one.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "transport/shm_transport.h"

namespace hororing {

class ShmDirectBackend final : public Backend {
 public:
  // REQUIRES: Fits(transport.segment().geometry()) and members.set < kDirectSets. At most one
  // per set of a transport. `chunk_bytes`: of a block; 0: built in.
  ShmDirectBackend(ShmTransport& transport, Members members, size_t chunk_bytes = 0);
  // True when the slots can hold two blocks of at least a cache line.
  static bool Fits(const ShmSegment::Geometry& geometry);

  const char* name() const override { return "shm_direct"; }
  bool Supports(const Batch& batch) const override;
  Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) override;
  // This rank's slot.
  size_t scratch_bytes() const override;
  AlgorithmUsed algorithm_used() const override { return algorithm_used_; }

 private:
  ShmTransport& transport_;
  const Members members_;
  const int group_rank_;  // of this rank among the members
  uint64_t next_block_;
  const size_t chunk_bytes_;
  AlgorithmUsed algorithm_used_ = AlgorithmUsed::kNotCounted;
  Status broken_;  // the first error: the ranks' counters no longer agree, every later Run fails
};

}  // namespace hororing
