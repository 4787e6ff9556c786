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

bool ExchangesWholeSlices(const Volume& volume, int hosts, size_t latency_bytes) {
  const size_t others = static_cast<size_t>(hosts - 1);
  const size_t there_and_back =
      others * (volume.partial + volume.bytes) / static_cast<size_t>(hosts);
  return others * volume.partial <= there_and_back + latency_bytes;
}

}  // namespace hororing
