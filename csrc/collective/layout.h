// Layout: types and operations in a buffer that is summed: runs of elements that are reduced alike.
//
//   run 0: float32, Average         | run 1: bfloat16, Average  | run 2: int64, Sum
//   begins at byte 0                | begins at a cache line    | begins at a cache line
//
// The algorithms cut buffers by bytes, whatever the types. A message may hold parts of several
// runs. Partial results (kernels/reduce.h) of the runs are contiguous, in the order of the buffer.
//
// Thread-safety: as a container of the standard library.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "collective/segments.h"
#include "kernels/reduce.h"

namespace hororing {

class Layout {
 public:
  Layout() = default;
  Layout(const ReduceSpec& spec, size_t elements) { Add(spec, elements * ElementSize(spec.dtype)); }

  // Appends `bytes`, padding included, to the last run or as a new run. REQUIRES: everything before
  // a new run consists of whole cache lines, and so does a new run unless it is the first.
  void Add(const ReduceSpec& spec, size_t bytes);

  size_t bytes() const { return bytes_; }
  size_t partial_bytes() const { return partial_bytes_; }
  // Whether any part needs a wide accumulator (kernels/reduce.h).
  bool wide() const { return wide_; }
  // The largest ratio of an element's size as a partial result to its own size.
  size_t widening() const;
  // Bytes of the partial results of the first `bytes` bytes.
  size_t PartialBytes(size_t bytes) const;
  size_t PartialBytes(const Span& span) const {
    return PartialBytes(span.begin + span.size) - PartialBytes(span.begin);
  }

  // The buffer may be cut at multiples of these bytes: an element; with several runs, a cache line.
  size_t unit() const { return runs_.size() == 1 ? ElementSize(runs_[0].spec.dtype) : kCacheLine; }
  // Part `index` of `count` of a span. Sizes differ by at most one unit.
  Span Part(const Span& span, int count, int index) const;
  std::vector<Span> Parts(int count) const;

  // Calls visit(spec, at, partial_at, elements) for the parts of runs in `span`, in order; `at` and
  // `partial_at` are offsets in the span, and in its partial results, in bytes.
  template <typename Visit>
  void ForEachRun(const Span& span, Visit visit) const {
    size_t partial_at = 0;
    for (size_t i = 0; i < runs_.size() && runs_[i].begin < span.begin + span.size; ++i) {
      const Run& run = runs_[i];
      const size_t begin = std::max(span.begin, run.begin);
      const size_t end = std::min(span.begin + span.size, run.end);
      if (begin >= end) continue;
      const size_t elements = (end - begin) / ElementSize(run.spec.dtype);
      visit(run.spec, begin - span.begin, partial_at, elements);
      partial_at += elements * PartialSize(run.spec);
    }
  }

 private:
  struct Run {
    ReduceSpec spec;
    size_t begin, end;  // bytes
  };
  std::vector<Run> runs_;
  size_t bytes_ = 0, partial_bytes_ = 0;
  bool wide_ = false;
};

// An allreduce of one rank: only applies the factors. May be in place.
void ReduceAlone(const Layout& layout, std::byte* result, const std::byte* source);

// The steps of kernels/reduce.h for the runs in `span`, where all pointers begin.
void StartPartial(const Layout& layout, const Span& span, std::byte* partial,
                  const std::byte* source);
void CombinePartials(const Layout& layout, const Span& span, std::byte* accumulator,
                     const std::byte* first, const std::byte* second);
void FinishPartial(const Layout& layout, const Span& span, int divisor, std::byte* result,
                   const std::byte* partial);

}  // namespace hororing
