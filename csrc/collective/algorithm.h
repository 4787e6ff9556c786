// What an allreduce over several hosts depends on: values that all ranks share.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <vector>

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

// How the ranks are distributed over hosts.
struct HostShape {
  int hosts = 1;
  int max_ranks = 1;  // on a host
  int min_ranks = 1;
};

// The shape for the ranks on each host. Empty: one host.
HostShape ShapeOf(const std::vector<std::vector<int>>& ranks_on);

}  // namespace hororing
