// Collectives with arithmetic over a Transport: allreduce and reduce-scatter. Stateless: the caller
// provides scratch memory. All ranks pass equal arguments, except for `scratch` and the addresses
// of their data. An allreduce gives identical bits on all ranks.
//
//   algorithm               messages          bytes sent per rank   rounding, order
//   RingAllreduce           2(N-1)            2(N-1)/N * S          ring order, differs per chunk
//   RankOrderAllreduce      2(N-1)            2(N-1)/N * S          rank order, wide accumulator
//   RankOrderReduceScatter  N-1               S minus own part      rank order, wide accumulator
//   AdasumAllreduce         about 2 log2(N)   2(N-1)/N * S          a fixed tree of pairs
//
// Each file explains its algorithm with a picture, the index formula and the byte count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "collective/collectives.h"
#include "collective/layout.h"
#include "kernels/reduce.h"
#include "transport/transport.h"

namespace hororing {

// Memory that a backend keeps between calls. It grows as needed and is freed when the engine stops
// (page faults of fresh temporaries cost MPI half of its time).
class Scratch {
 public:
  // `total`: is kept up to date with the bytes of all that refer to it; may be null.
  explicit Scratch(size_t* total = nullptr) : total_(total) {}
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;

  // Provides at least `bytes`, 64-byte aligned, with undefined contents. Growing invalidates
  // earlier pointers. If memory is short: kInternal, whose text is `lacking`, such as "no memory
  // for sums", and the size.
  Status Reserve(size_t bytes, const char* lacking, std::byte** memory) {
    if (bytes > bytes_ || data_ == nullptr) {
      // Freed first: the old contents are of no use, and both at once may be more than there is.
      std::free(std::exchange(data_, nullptr));
      if (total_ != nullptr) *total_ -= bytes_;
      bytes_ = bytes / kCacheLine * kCacheLine + kCacheLine;
      if (bytes <= SIZE_MAX - kCacheLine) data_ = std::aligned_alloc(kCacheLine, bytes_);
      if (data_ == nullptr) bytes_ = 0;
      if (total_ != nullptr) *total_ += bytes_;
    }
    *memory = static_cast<std::byte*>(data_);
    if (data_ != nullptr) return Status::Ok();
    return Status(Code::kInternal,
                  std::string(lacking) + " of " + std::to_string(bytes) + " bytes");
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t* const total_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// A buffer to reduce in place. Each ReduceSpec is applied in full: prescale, division, postscale.
struct ReduceBuffer {
  ReduceBuffer() = default;
  ReduceBuffer(void* at, size_t elements, const ReduceSpec& spec)
      : data(static_cast<std::byte*>(at)), layout(spec, elements) {}

  std::byte* data = nullptr;
  Layout layout;
};

// `segment_bytes`: of a message; 0: built in. REQUIRES: !layout.wide().
Status RingAllreduce(Transport& transport, const ReduceBuffer& buffer, Scratch& scratch,
                     TimeNs deadline, size_t segment_bytes = 0);
// Any layout.
Status RankOrderAllreduce(Transport& transport, const ReduceBuffer& buffer, Scratch& scratch,
                          TimeNs deadline, const GatherOptions& options = {});

// The operands of a reduce-scatter: `input`, and the bytes of every rank's part, in rank order,
// which are multiples of the layout's unit. This rank's part of the result goes to `result`, which
// either does not overlap `input` or is this rank's part of it.
struct ScatterBuffer {
  ScatterBuffer() = default;
  ScatterBuffer(const void* from, std::vector<size_t> bytes, void* to, const ReduceSpec& spec)
      : input(static_cast<const std::byte*>(from)),
        parts(std::move(bytes)),
        result(static_cast<std::byte*>(to)),
        layout(spec, Sum(parts) / ElementSize(spec.dtype)) {}

  const std::byte* input = nullptr;
  std::vector<size_t> parts;
  std::byte* result = nullptr;
  Layout layout;
};

// Any layout. `segment_bytes`: of a message; 0: built in.
Status RankOrderReduceScatter(Transport& transport, const ScatterBuffer& buffer, Scratch& scratch,
                              TimeNs deadline, size_t segment_bytes = 0);

// kInvalidArgument with a reason if an Adasum of `spec` among `size` ranks is not defined.
Status CheckAdasum(const ReduceSpec& spec, int size);
// Adaptive summation of several tensors, each with its own coefficients. Tensor t has tensors[t]
// elements. `data` holds Chunk(tensors[t], N, 0) of every t, then Chunk(tensors[t], N, 1) of every
// t, and so on. The bits do not depend on what a tensor is fused with.
Status AdasumAllreduce(Transport& transport, const ReduceSpec& spec, void* data,
                       const std::vector<size_t>& tensors, Scratch& scratch, TimeNs deadline);

}  // namespace hororing
