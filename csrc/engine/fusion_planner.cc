#include "engine/fusion_planner.h"

#include <algorithm>

namespace hororing {
std::vector<std::vector<size_t>> PlanFusion(const std::vector<FusionItem>& items,
                                            int64_t fusion_bytes) {
  struct Open {
    FusionKey key;
    size_t batch;
    int64_t bytes;
  };
  std::vector<std::vector<size_t>> batches;
  std::vector<Open> open;
  for (size_t i = 0; i < items.size(); ++i) {
    const FusionItem& item = items[i];
    const auto bytes = static_cast<int64_t>(RoundUp(static_cast<size_t>(item.bytes), kCacheLine));
    Open* fitting = nullptr;
    for (Open& candidate : open) {
      if (candidate.key == item.key) fitting = &candidate;
    }
    if (fitting != nullptr && fitting->bytes + bytes <= fusion_bytes) {
      batches[fitting->batch].push_back(i);
      fitting->bytes += bytes;
      continue;
    }
    batches.push_back({i});
    const Open fresh{item.key, batches.size() - 1, bytes};
    if (fitting != nullptr) {
      *fitting = fresh;
    } else if (fusion_bytes > 0) {
      open.push_back(fresh);
    }
  }
  for (std::vector<size_t>& batch : batches) {
    for (auto begin = batch.begin(); begin != batch.end();) {
      const ReduceSpec& first = items[*begin].reduce;
      begin = std::stable_partition(begin, batch.end(),
                                    [&](size_t i) { return items[i].reduce == first; });
    }
  }
  return batches;
}

}  // namespace hororing
