// The kernels' interface to reduce.cc: a table of functions per instruction set. The functions
// share one source (reduce_kernels.inc), compiled once per set with that set's compiler flags.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace hororing {

// Factors around the operation; 1 means none.
struct Factors {
  double prescale = 1.0;
  double postscale = 1.0;
  double divisor = 1;               // of an Average
  const double* weights = nullptr;  // of the sources, in place of prescale: sums of floats only
};

// result[i] = finish(start(sources[0][i]) op start(sources[1][i]) op ...) for i < n.
// Integers and bool ignore the factors: reduce_integers.h has them.
using ReduceFunction = void (*)(const Factors& factors, void* result, const void* const* sources,
                                int count, size_t n);

// Whether no exponent has all bits set: floats are finite.
using FiniteFunction = bool (*)(const void* data, size_t n);

enum class Arithmetic : int { kSum = 0, kMin = 1, kMax = 2, kProduct = 3 };  // Average is a sum
constexpr int kArithmeticCount = 4;

struct KernelTable {
  const char* name;
  struct Row {
    ReduceFunction of[kArithmeticCount];  // by Arithmetic
  };
  Row reduce[kDataTypeCount];
  // 16-bit floats, one source: to a float32 accumulator and back. Start and finish of Partials.
  ReduceFunction widen_float16, widen_bfloat16;
  ReduceFunction narrow_float16, narrow_bfloat16;
  FiniteFunction finite[kDataTypeCount];  // null: always
};

extern const KernelTable kPortableKernels;
extern const KernelTable kAvx2Kernels;    // x86-64 only: AVX2, F16C
extern const KernelTable kAvx512Kernels;  // x86-64 only: AVX-512 F, BW, DQ, VL

}  // namespace hororing
