// The virtual buffer of an allreduce through shared memory, in which a batch's tensors are
// contiguous, each padded to a cache line, and the layout of tensors in it.
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
  size_t begin;
  size_t bytes;
};

struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};

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
      total += RoundUp(bytes, kEntryAlign);
    }
  }

  // Rank r's part of a range that starts at a cache line. Parts differ by at most one line.
  static Range Slice(const Range& range, int rank, int ranks) {
    const size_t lines = range.bytes() / kEntryAlign;
    const size_t n = static_cast<size_t>(ranks), r = static_cast<size_t>(rank);
    return {range.begin + lines * r / n * kEntryAlign,
            range.begin + lines * (r + 1) / n * kEntryAlign};
  }

  // Calls visit(index of the place, at, bytes) for the parts of tensors in `range`, in order; `at`
  // is an offset in the virtual buffer.
  template <typename Visit>
  void ForEachPiece(const Range& range, Visit visit) const {
    if (range.begin >= range.end) return;
    const auto next =
        std::upper_bound(places.begin(), places.end(), range.begin,
                         [](size_t offset, const Place& each) { return offset < each.begin; });
    for (size_t i = static_cast<size_t>(next - places.begin()) - 1;
         i < places.size() && places[i].begin < range.end; ++i) {
      const size_t begin = std::max(range.begin, places[i].begin);
      const size_t end = std::min(range.end, places[i].begin + places[i].bytes);
      if (begin < end) visit(i, begin, end - begin);
    }
  }
};

}  // namespace hororing
