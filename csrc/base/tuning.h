// Tuning: how allreduces are carried out, as far as that may change while a job runs. All ranks
// change alike, between two batches (Decision::Kind::kTune).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hororing {

struct Tuning {
  // Bytes of the largest batch of each class but the last.
  static constexpr std::array<size_t, 2> kClassEnds = {64 << 10, 4 << 20};

  // Of the blocks in which shared memory is walked, and of the segments of rings; 0: built in. What
  // it cannot be, it is as nearly as possible.
  int64_t chunk_bytes = 0;
  // Over several hosts, by class of batches: values of Algorithm (collective/algorithm.h).
  std::array<uint8_t, 3> algorithms{};

  static size_t ClassOf(size_t bytes) {
    return (bytes > kClassEnds[0] ? 1u : 0u) + (bytes > kClassEnds[1] ? 1u : 0u);
  }
  bool operator==(const Tuning& other) const {
    return chunk_bytes == other.chunk_bytes && algorithms == other.algorithms;
  }
};

}  // namespace hororing
