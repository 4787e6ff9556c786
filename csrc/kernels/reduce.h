// Reduction kernels: elementwise arithmetic on contiguous memory, vectorised, chosen once at
// run time for the processor (portable, AVX2+F16C, AVX-512 with BF16 where present).
//
// Pure functions, callable from any thread. Pointers need the alignment of their element type only.
//
// Numerics
//   1. float16 and bfloat16 are accumulated in float32 and rounded once (to nearest even).
//   2. Sources are combined in the order given, so equal inputs give equal bits.
//   3. An average divides once, at the end, in the accumulation type; integers are summed
//      exactly (128 bit for 64-bit integers) and the quotient is truncated toward zero. A
//      weighted average, of floats, is sum(w[r] * source[r]) / sum(w), likewise divided once; a
//      source of weight 0 is not read.
//   4. prescale is applied to every source element, postscale to the result, in the
//      accumulation type; for integers each application goes through float64, truncates toward
//      zero and saturates at the ends of the element type (NaN becomes 0).
//   5. Sums and products of integers wrap modulo 2^bits. For bool, Sum and Max are "or",
//      Product and Min are "and"; Average and scale factors are not defined (see Check()).
//   6. Min and Max propagate NaN, whichever source holds it.
//   7. All instruction sets give the same bits, except for the payload of a NaN where two meet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/types.h"

namespace hororing {

// How the sources of one result element are combined. Batches with equal specs may share a buffer.
struct ReduceSpec {
  DataType dtype = DataType::kFloat32;
  // kAdasum: only for FillNeutral, and for the factors of one source; see collective/adasum.cc.
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  // Weighted Average of floats: a weight for each source, then their sum, or 1 if it is 0;
  // borrowed. `prescale` is this rank's own. Null: equal weights.
  const std::vector<double>* weights = nullptr;

  bool operator==(const ReduceSpec& other) const {
    return dtype == other.dtype && op == other.op && prescale == other.prescale &&
           postscale == other.postscale &&
           (weights == other.weights || (weights && other.weights && *weights == *other.weights));
  }
};

// kInvalidArgument with a reason if `spec` is invalid (Average of bool, ...). Not for Adasum.
Status Check(const ReduceSpec& spec);

// True when partial results must not be rounded to the element type between two sources: 16-bit
// floats, integer averages. Pairwise algorithms then use ReduceMany, or the partial results below.
bool NeedsWideAccumulator(const ReduceSpec& spec);
bool IsFloating(DataType dtype);
bool IsFloatSum(const ReduceSpec& spec);  // or average

// result[i] = finish(start(sources[0][i]) op start(sources[1][i]) op ...): prescale on every
// source, the operation in source order, division by `divisor` for an Average, postscale.
// `result` may equal any of the sources. `ranks`: whose sources they are, for their weights; null:
// all ranks', in their order. REQUIRES: count >= 1.
void ReduceMany(const ReduceSpec& spec, int divisor, void* result, const void* const* sources,
                int count, size_t n, const int* ranks = nullptr);

// Partial results, for algorithms that combine pairwise and send intermediate results: the
// accumulation type, float32 for 16-bit floats, int64 or a 128-bit integer for integer averages,
// and the element type otherwise. The three steps equal one ReduceMany where the combinations
// are made in its order. Partials are aligned to PartialSize; ranges do not overlap, but without a
// wide accumulator the first and the last step also work in place.
size_t PartialSize(const ReduceSpec& spec);  // bytes per element
void StartPartial(const ReduceSpec& spec, void* partial, const void* source, size_t n);
// accumulator[i] = first[i] op second[i]; `accumulator` may equal either.
void CombinePartials(const ReduceSpec& spec, void* accumulator, const void* first,
                     const void* second, size_t n);
void FinishPartial(const ReduceSpec& spec, int divisor, void* result, const void* partial,
                   size_t n);

// The neutral element of a reduction: 0, 1, the largest or the smallest value (infinite if the type
// has infinity). Not for Min, Max and Product with a prescale.
void FillNeutral(const ReduceSpec& spec, void* data, size_t n);

// Elements that are not finite. None if the type has only finite ones.
struct NonFinite {
  int64_t nan = 0, infinite = 0;
  explicit operator bool() const { return nan + infinite > 0; }
};
bool AllFinite(DataType dtype, const void* data, size_t n);
NonFinite CountNonFinite(DataType dtype, const void* data, size_t n);

// The instruction set in use: "avx512", "avx2" or "portable"; and, for tests, a way to force
// one. SetKernels returns false, and changes nothing, when the processor lacks it.
const char* KernelsInUse();
bool SetKernels(const char* name);

}  // namespace hororing
