// The virtual buffer of the direct allreduce (backend/shm_direct.h): a batch's tensors back to
// back, each padded to a cache line; what lies where in it, and how it is cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/common.h"
#include "transport/arena.h"

namespace hororing {

// One tensor in the virtual buffer.
struct Place {
  const std::byte* input;
  std::byte* output;
  size_t begin;
  size_t bytes;
  uint64_t in_arena;  // where it is reduced in place in this rank's arena; or Arena::kElsewhere
};

struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};

// All but `in_arena` is the same on all ranks.
struct Plan {
  std::vector<Place> places;
  size_t total = 0;     // bytes of the virtual buffer
  size_t capacity = 0;  // bytes of one block's room in a slot
  size_t depth = 0;     // such rooms in a slot
  size_t block_bytes = 0;
  uint64_t blocks = 0;
  bool small = false;          // each rank reduces everything itself
  size_t bytes_in_arena = 0;   // of this rank's tensors that are not packed
  bool packs_nothing = false;  // all of them

  // `arena` may be null.
  Plan(const Batch& batch, size_t slot_bytes, const Arena* arena);

  // Rank r's part of a range that begins with a cache line: equal up to one line.
  static Range Slice(const Range& range, int rank, int ranks) {
    const size_t lines = range.bytes() / kEntryAlign;
    const size_t n = static_cast<size_t>(ranks), r = static_cast<size_t>(rank);
    return {range.begin + lines * r / n * kEntryAlign,
            range.begin + lines * (r + 1) / n * kEntryAlign};
  }

  // Calls visit(index of the place, at, bytes) for the parts of tensors that lie in `range`, in
  // order; `at` is an offset in the virtual buffer.
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
