// Places in the virtual buffer of an allreduce through shared memory, which holds a batch's tensors
// contiguously, each padded to a cache line.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/reduce.h"

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

}  // namespace hororing
