#include "collective/algorithm.h"

#include <algorithm>
#include <iterator>

namespace hororing {
namespace {

constexpr const char* kNames[] = {"auto", "ring", "recursive_doubling", "three_phase"};

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
  shape.max_ranks = shape.min_ranks = static_cast<int>(ranks_on[0].size());
  for (const std::vector<int>& ranks : ranks_on) {
    const int count = static_cast<int>(ranks.size());
    shape.ranks += count;
    shape.max_ranks = std::max(shape.max_ranks, count);
    shape.min_ranks = std::min(shape.min_ranks, count);
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
  return Status(
      Code::kInvalidArgument,
      "unknown algorithm '" + name + "'; choose auto, ring, recursive_doubling or three_phase");
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

Algorithm CheapestFlat(const Volume& volume, const HostShape& shape, const WireCost& wire) {
  const double bytes = static_cast<double>(volume.bytes);
  const double partial = static_cast<double>(volume.partial);
  const double ranks = shape.ranks, most = shape.max_ranks;
  const double steps = volume.wide ? ranks : 2 * (ranks - 1);
  // In rank order every rank of a host sends to every rank of the others by itself.
  const double sent = volume.wide ? bytes * (most * (ranks - most) + ranks - 1) / ranks
                                  : 2 * bytes * (ranks - 1) / ranks;
  const double ring = steps * wire.alpha_s + sent * wire.beta_s + bytes * kGamma;
  const int between = Log2(shape.hosts), within = Log2(shape.ranks) - between;
  const double doubling = between * (wire.alpha_s + most * partial * wire.beta_s) +
                          within * kLocalAlpha + Log2(shape.ranks) * partial * kGamma;
  return ring < doubling ? Algorithm::kRing : Algorithm::kRecursiveDoubling;
}

}  // namespace hororing
