// Integers with factors, and averages of integers: through a wide accumulator, without intrinsics.
// Gradients are not integers; plain integer sums, of counters, are in reduce_kernels.inc.
#pragma once

#include <cstddef>

#include "base/types.h"
#include "kernels/reduce_kernels.h"

namespace hororing {

// The functions for one integer type. `Wide` is int64_t, or a 128-bit integer for int64.
struct IntegerKernels {
  size_t wide_bytes;
  // Like ReduceFunction. `average`: divide the exact sum.
  void (*reduce)(const Factors& factors, Arithmetic arithmetic, bool average, void* result,
                 const void* const* sources, int count, size_t n);
  // The steps of an average.
  void (*start)(const Factors& factors, void* wide, const void* source, size_t n);
  void (*add)(void* wide, const void* first, const void* second, size_t n);
  void (*finish)(const Factors& factors, void* result, const void* wide, size_t n);
};

// REQUIRES: an integer type (not bool).
const IntegerKernels& IntegerKernelsOf(DataType dtype);

}  // namespace hororing
