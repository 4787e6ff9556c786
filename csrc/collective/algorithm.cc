#include "collective/algorithm.h"

#include <algorithm>

namespace hororing {

HostShape ShapeOf(const std::vector<std::vector<int>>& ranks_on) {
  HostShape shape;
  if (ranks_on.empty()) return shape;
  shape.hosts = static_cast<int>(ranks_on.size());
  shape.max_ranks = shape.min_ranks = static_cast<int>(ranks_on[0].size());
  for (const std::vector<int>& ranks : ranks_on) {
    const int count = static_cast<int>(ranks.size());
    shape.max_ranks = std::max(shape.max_ranks, count);
    shape.min_ranks = std::min(shape.min_ranks, count);
  }
  return shape;
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

}  // namespace hororing
