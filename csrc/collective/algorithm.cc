#include "collective/algorithm.h"

#include <algorithm>
#include <iterator>

namespace hororing {
namespace {

constexpr const char* kNames[] = {"auto", "ring", "recursive_doubling", "three_phase", "leader"};

// Seconds for a message or a wait for the others within a host, and for combining a byte.
constexpr double kLocalAlpha = 5e-6, kGamma = 0.2e-9;

int Log2(int n) {
  int rounds = 0;
  while ((int64_t{1} << rounds) < n) ++rounds;
  return rounds;
}

}  // namespace

HostShape ShapeOf(const std::vector<std::vector<int>>& ranks_on) {
  HostShape shape;
  if (ranks_on.empty()) return shape;
  shape.hosts = static_cast<int>(ranks_on.size());
  shape.ranks = 0;
  shape.most = shape.least = static_cast<int>(ranks_on[0].size());
  for (const std::vector<int>& ranks : ranks_on) {
    const int count = static_cast<int>(ranks.size());
    shape.ranks += count;
    shape.most = std::max(shape.most, count);
    shape.least = std::min(shape.least, count);
  }
  return shape;
}

const char* Name(Algorithm algorithm) { return kNames[static_cast<size_t>(algorithm)]; }

Status Parse(const std::string& name, Algorithm* algorithm) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name != kNames[i]) continue;
    *algorithm = static_cast<Algorithm>(i);
    return Status::Ok();
  }
  return Status(Code::kInvalidArgument,
                "unknown algorithm '" + name +
                    "'; choose auto, ring, recursive_doubling, three_phase or leader");
}

Algorithm AllreduceOptions::AlgorithmFor(size_t bytes) const {
  return algorithms[(bytes > kClassEnds[0] ? 1u : 0u) + (bytes > kClassEnds[1] ? 1u : 0u)];
}

Algorithm AllreduceOptions::OnlyAlgorithm() const {
  return algorithms[0] == algorithms[1] && algorithms[1] == algorithms[2] ? algorithms[0]
                                                                          : Algorithm::kAuto;
}

Status Parse(const std::string& names, AllreduceOptions* options) {
  std::vector<std::string> given(1);
  for (const char each : names) {
    if (each == ',') {
      given.emplace_back();
    } else if (each != ' ') {
      given.back() += each;
    }
  }
  auto& algorithms = options->algorithms;
  if (given.size() == 1) given.resize(algorithms.size(), given[0]);
  if (given.size() != algorithms.size()) {
    return Status(Code::kInvalidArgument, "algorithms '" + names + "': give one, or " +
                                              std::to_string(algorithms.size()) +
                                              " with commas between them, by size of batch");
  }
  for (size_t i = 0; i < given.size(); ++i) {
    HORORING_RETURN_IF_ERROR(Parse(given[i], &algorithms[i]));
  }
  return Status::Ok();
}

std::string Names(const AllreduceOptions& options) {
  const auto& all = options.algorithms;
  const std::string first = Name(all[0]);
  if (all[0] == all[1] && all[1] == all[2]) return first;
  return first + "," + Name(all[1]) + "," + Name(all[2]);
}

void Volume::Add(const ReduceSpec& spec, size_t more) {
  bytes += more;
  partial += more / ElementSize(spec.dtype) * PartialSize(spec);
  wide = wide || NeedsWideAccumulator(spec);
}

bool ExchangesWholeSlices(const Volume& volume, int hosts, const WireCost& wire) {
  const double others = hosts - 1;
  const double bytes = static_cast<double>(volume.bytes);
  const double partial = static_cast<double>(volume.partial);
  const double whole = others * partial;
  const double there_and_back = others / hosts * (partial + bytes);
  return (whole - there_and_back) * wire.beta_s <= wire.alpha_s;
}

// The largest host sends (H-1)/H of S bytes as partial results, or `most` (N - most)/N of them
// unreduced.
bool SumsWithinHosts(const ReduceSpec& spec, const HostShape& shape) {
  if (!shape.shared) return false;
  const double hosts = shape.hosts, ranks = shape.ranks, most = shape.most;
  const double wider =
      static_cast<double>(PartialSize(spec)) / static_cast<double>(ElementSize(spec.dtype));
  return (hosts - 1) / hosts * wider <= most * (ranks - most) / ranks;
}

double Cost(Algorithm algorithm, const Volume& volume, const HostShape& shape,
            const WireCost& wire) {
  const double bytes = static_cast<double>(volume.bytes);
  const double partial = static_cast<double>(volume.partial);
  const double arithmetic = bytes * kGamma;
  const double hosts = shape.hosts, ranks = shape.ranks, most = shape.most;
  switch (algorithm) {
    case Algorithm::kRing: {
      const double steps = volume.wide ? ranks : 2 * (ranks - 1);
      // In rank order, every rank of a host sends to every rank of the other hosts.
      const double sent = volume.wide ? bytes * (most * (ranks - most) + ranks - 1) / ranks
                                      : 2 * bytes * (ranks - 1) / ranks;
      return steps * wire.alpha_s + sent * wire.beta_s + arithmetic;
    }
    case Algorithm::kRecursiveDoubling: {
      const int between = Log2(shape.hosts), within = Log2(shape.ranks) - between;
      return between * (wire.alpha_s + most * partial * wire.beta_s) + within * kLocalAlpha +
             Log2(shape.ranks) * partial * kGamma;
    }
    case Algorithm::kThreePhase:
    case Algorithm::kLeader: {
      const bool leader = algorithm == Algorithm::kLeader;
      const bool whole = ExchangesWholeSlices(volume, shape.hosts, wire);
      const double sent = whole ? (hosts - 1) * partial : (hosts - 1) / hosts * (partial + bytes);
      // A rank that reduces alone keeps the wire waiting.
      return (whole ? 1 : 2) * wire.alpha_s + sent * wire.beta_s + 2 * kLocalAlpha +
             (leader ? most : 1) * arithmetic;
    }
    case Algorithm::kAuto: break;
  }
  return Cost(Cheapest(volume, shape, wire), volume, shape, wire);
}

Algorithm Cheapest(const Volume& volume, const HostShape& shape, const WireCost& wire) {
  Algorithm best = Algorithm::kRecursiveDoubling;
  double least = Cost(best, volume, shape, wire);
  for (const Algorithm each : {Algorithm::kRing, Algorithm::kThreePhase, Algorithm::kLeader}) {
    if (each != Algorithm::kRing && !shape.shared) continue;
    const double cost = Cost(each, volume, shape, wire);
    if (cost >= least) continue;
    best = each;
    least = cost;
  }
  return best;
}

}  // namespace hororing
