// Stochastic rounding of float32 to float16 or bfloat16: up or down at random, so that the mean of
// many roundings is the number itself, and updates that are smaller than half a unit in the last
// place are not lost.
//
// Pure functions of their arguments, callable from any thread. The randomness of an element is a
// function of (seed, tensor, stream, step, element index) alone: the same on every rank, in every
// instruction set, however the elements are cut into pieces, and again after a restart.
//
// Generator: Threefry-4x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as
// easy as 1, 2, 3; SC 2011, doi:10.1145/2063384.2063405), which needs no multiplication and so is
// fast in every instruction set.
//
//   key      seed (low, high), tensor, stream
//   counter  block (low, high), step (low, high); a block is 4 words, which are 8 numbers of 16
//   bits
//
// 128 elements share a tile of 16 blocks. Element 16 h + l of tile t has the (h % 2)-th half (the
// low one first) of word h / 2 of block 16 t + l: vectors of 4, 8 and 16 lanes then need no
// shuffling.
//
// Numerics, for a number of 16 random bits and a finite source
//   1. bfloat16, and float16 where the result is normal: exact, E[result] = source.
//   2. Subnormal float16: what is below 2^-40, 2^-16 of their unit, is cut off first.
//   3. Numbers of the target type are kept, as are infinities and signs of zero.
//   4. Beyond the largest finite number, up is infinity, as in rounding to nearest.
//   5. Not-a-number becomes the quiet one that rounding to nearest makes of it (half.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace hororing {

// Which random numbers.
struct RandomStream {
  uint64_t seed = 0;
  uint32_t tensor = 0;
  uint32_t stream = 0;
  uint64_t step = 0;
};

// result[i] = source[i], rounded with the random number of element `first` + i, for i < n.
// REQUIRES: `to` is kFloat16 or kBfloat16; the ranges do not overlap.
void RoundStochastically(DataType to, const RandomStream& stream, uint64_t first, void* result,
                         const float* source, size_t n);

}  // namespace hororing
