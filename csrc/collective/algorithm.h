// The algorithms of allreduces, and their options.
#pragma once

#include <cstddef>

namespace hororing {

// The algorithm that ran an allreduce among several ranks, for statistics.
enum class AlgorithmUsed {
  kNotCounted,  // nothing to do, Adasum, or on a device
  kShmDirect,
  kThreePhase,  // within hosts, between the owners of slices on all hosts, within hosts
  kRing,
  kRankOrder,
  kOneShot,  // the engine itself, without a backend (engine/one_shot_allreduce.cc)
};
constexpr size_t kAlgorithmsUsed = 6;

// How allreduces are carried out, alike on all ranks of a job.
struct AllreduceOptions {
  bool reproducible = false;  // rank-order sums everywhere
  // Bytes that a host sends while a message arrives, about: 3 KB at 200 Mbit/s, 60 KB at 10 Gbit/s.
  size_t latency_bytes = 16 << 10;
};

}  // namespace hororing
