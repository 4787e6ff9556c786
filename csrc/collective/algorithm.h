// What an allreduce over several hosts depends on: values that all ranks share.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <vector>

#include "base/reduce.h"
#include "base/status.h"

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
  // Bytes that a host sends in the time that a message needs to arrive, about: 3 KB at 200 Mbit/s,
  // 60 KB at 10 Gbit/s.
  size_t latency_bytes = 16 << 10;
};

// The data that an allreduce moves, in bytes.
struct Volume {
  size_t bytes = 0;
  size_t partial = 0;  // as partial results
  bool wide = false;   // whether any part needs a wide accumulator (base/reduce.h)

  void Add(const ReduceSpec& spec, size_t more);
};

// How the ranks are distributed over hosts.
struct HostShape {
  int hosts = 1;
  int max_ranks = 1;  // on a host
  int min_ranks = 1;
};

// The shape for the ranks on each host. Empty: one host.
HostShape ShapeOf(const std::vector<std::vector<int>>& ranks_on);

// Whether hosts send whole slices to every other host, so that no results are returned.
bool ExchangesWholeSlices(const Volume& volume, int hosts, size_t latency_bytes);

}  // namespace hororing
