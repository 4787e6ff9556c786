// Chooses the algorithm of an allreduce over several hosts: a pure function of what all ranks know.
//
// Thread-safety: pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "base/reduce.h"
#include "base/status.h"

namespace hororing {

enum class Algorithm {
  kAuto,               // the cheapest
  kRing,               // around all ranks; rank order where it must round once
  kRecursiveDoubling,  // among all ranks
  kThreePhase,         // within hosts, between hosts by as many ranks as each has, within hosts
  kLeader,             // the same, with one rank of each host between hosts
};

// The algorithm that ran an allreduce among several ranks, for statistics. (Algorithm is what the
// user asked for.)
enum class AlgorithmUsed {
  kNotCounted,  // nothing to do, Adasum, or on a device
  kShmDirect,
  kThreePhase,
  kLeader,
  kRing,
  kRecursiveDoubling,
  kRankOrder,
  kOneShot,  // the engine itself, without a backend (engine/one_shot_allreduce.cc)
};
constexpr size_t kAlgorithmsUsed = 8;

const char* Name(Algorithm algorithm);
// kInvalidArgument if there is no algorithm `name`.
Status Parse(const std::string& name, Algorithm* algorithm);
// Duration of a message between two hosts: alpha + bytes * beta.
struct WireCost {
  double alpha_s = 50e-6;
  double beta_s = 1 / 1.25e9;  // 10 Gbit/s
};

// How allreduces are carried out, alike on all ranks of a job.
struct AllreduceOptions {
  // The largest batch of each class but the last, in bytes.
  static constexpr std::array<size_t, 2> kClassEnds = {64 << 10, 4 << 20};

  // Over several hosts, by class of batches.
  std::array<Algorithm, kClassEnds.size() + 1> algorithms{};
  // Bytes of the blocks in shared memory and of the segments of rings; 0: built in. Rounded to the
  // nearest possible size.
  size_t chunk_bytes = 0;
  bool reproducible = false;  // rank-order sums everywhere
  WireCost wire;

  // For a batch of that many bytes.
  Algorithm AlgorithmFor(size_t bytes) const;
  // The algorithm of all classes; kAuto if they differ.
  Algorithm OnlyAlgorithm() const;
};

// `names`: one algorithm for all classes of batches, or one per class, separated by commas.
Status Parse(const std::string& names, AllreduceOptions* options);
// The inverse.
std::string Names(const AllreduceOptions& options);

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
  int ranks = 1;
  int most = 1;  // ranks of one host
  int least = 1;
  bool shared = false;  // the ranks of each host share memory
};

// The shape for the ranks on each host, without shared memory. Empty: one host.
HostShape ShapeOf(const std::vector<std::vector<int>>& ranks_on);

// Seconds, by the formulas of docs/algorithms.md.
double Cost(Algorithm algorithm, const Volume& volume, const HostShape& shape,
            const WireCost& wire);
// The cheapest algorithm that can run; the last two need shared memory.
Algorithm Cheapest(const Volume& volume, const HostShape& shape, const WireCost& wire);

// Whether hosts send whole slices to every other host, so that no results are returned.
bool ExchangesWholeSlices(const Volume& volume, int hosts, const WireCost& wire);
// Whether a reduce-scatter sends less if each host first sums what leaves it, as partial results,
// than if every rank sends to every other one.
bool SumsWithinHosts(const ReduceSpec& spec, const HostShape& shape);

}  // namespace hororing
