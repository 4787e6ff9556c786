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

}  // namespace hororing
