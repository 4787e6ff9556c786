// Allreduce algorithms over a Transport. Stateless: scratch memory is handed in, and nothing
// is remembered between calls. All ranks call with equal arguments except `data` and
// `scratch`; all ranks end with identical bits.
//
//   algorithm            messages      bytes sent per rank   rounding, order
//   RingAllreduce        2(N-1)        2(N-1)/N * S          ring order, differs per chunk
//   RecursiveDoubling    log2(N) (+2)  S * log2(N)           a fixed tree
//   RankOrderAllreduce   2(N-1)        2(N-1)/N * S          rank order, wide accumulator
//
// Each file explains its algorithm with a picture, the index formula and the byte count.
#pragma once

#include <cstddef>

#include "base/clock.h"
#include "base/reduce.h"
#include "base/status.h"
#include "transport/transport.h"

namespace hororing {

// Memory that a backend keeps between calls: allocated once, touched once, never returned
// before the engine stops (page faults of fresh temporaries cost MPI half of its time).
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes`, 64-byte aligned, contents undefined; null when memory is short. Earlier
  // pointers become invalid when it grows.
  void* Reserve(size_t bytes);
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// What is summed: `elements` of spec.dtype at `data`, in place. The whole of ReduceSpec is
// honoured: prescale before, Average's division and postscale after.
struct ReduceBuffer {
  void* data = nullptr;
  size_t elements = 0;
  ReduceSpec spec;
};

// REQUIRES: !NeedsWideAccumulator(spec).
Status RingAllreduce(Transport& transport, const ReduceBuffer& buffer, Scratch& scratch,
                     TimeNs deadline);
Status RankOrderAllreduce(Transport& transport, const ReduceBuffer& buffer, Scratch& scratch,
                          TimeNs deadline);
// Any spec: 16-bit floats and integer averages travel as wide partial results.
Status RecursiveDoublingAllreduce(Transport& transport, const ReduceBuffer& buffer,
                                  Scratch& scratch, TimeNs deadline);

// The choice among them, from the bytes, the spec and the world size alone. `reproducible`
// demands the same bits in every run whatever is fused with what: rank order everywhere.
Status Allreduce(Transport& transport, const ReduceBuffer& buffer, bool reproducible,
                 Scratch& scratch, TimeNs deadline);

}  // namespace hororing
