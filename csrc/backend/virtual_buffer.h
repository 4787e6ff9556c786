// The virtual buffer of an allreduce through shared memory, which holds a batch's tensors
// contiguously, each padded to a cache line, and the layout of its tensors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "backend/backend.h"
#include "backend/common.h"

namespace hororing {

// One tensor in the virtual buffer.
struct Place {
  const std::byte* input;
  std::byte* output;
  ReduceSpec reduce;
  size_t begin, size;
};

struct Range {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

// Calls visit(item, at, size) for the parts of `items` in `range`, in order; `at` is an offset like
// Item::begin. REQUIRES: items are in order, and the first begins no later than the range.
template <typename Item, typename Visit>
void ForEachOverlap(const std::vector<Item>& items, const Range& range, Visit visit) {
  if (range.begin >= range.end) return;
  auto item = std::upper_bound(items.begin(), items.end(), range.begin,
                               [](size_t offset, const Item& each) { return offset < each.begin; });
  for (--item; item != items.end() && item->begin < range.end; ++item) {
    const size_t begin = std::max(range.begin, item->begin);
    const size_t end = std::min(range.end, item->begin + item->size);
    if (begin < end) visit(*item, begin, end - begin);
  }
}

struct VirtualBuffer {
  std::vector<Place> places;  // of the tensors that are not empty
  size_t total = 0;           // bytes

  explicit VirtualBuffer(const Batch& batch) {
    places.reserve(batch.entries.size());
    for (const BatchEntry& entry : batch.entries) {
      const size_t bytes = entry.bytes();
      if (bytes == 0) continue;
      places.push_back({static_cast<const std::byte*>(entry.input),
                        static_cast<std::byte*>(entry.output), entry.reduce, total, bytes});
      total += RoundUp(bytes, kCacheLine);
    }
  }

  // Rank r's part of a range that starts at a cache line. Parts differ by at most one line.
  static Range Slice(const Range& range, int rank, int ranks) {
    const size_t lines = range.size() / kCacheLine;
    const size_t n = static_cast<size_t>(ranks), r = static_cast<size_t>(rank);
    return {range.begin + lines * r / n * kCacheLine,
            range.begin + lines * (r + 1) / n * kCacheLine};
  }
};

}  // namespace hororing
