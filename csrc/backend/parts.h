// Several tensors, by rank, for collectives in which each rank has a part of the fusion buffer:
//
//   tensors x, y; 2 ranks       x0 y0 | x1 y1        digit: the rank whose part it is
//
// So the bytes that one rank sends, receives or reduces are contiguous.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "kernels/copy.h"

namespace hororing {

// Calls visit(entry, begin, length) in that order for all non-empty parts. part_of(entry, r) is the
// length of rank r's part, and `begin` its offset in the tensor, both in bytes.
template <typename PartOf, typename Visit>
void ForEachPart(const std::vector<BatchEntry>& entries, size_t ranks, PartOf part_of,
                 Visit visit) {
  std::vector<size_t> done(entries.size(), 0);
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < entries.size(); ++i) {
      const size_t length = part_of(entries[i], r);
      if (length > 0) visit(entries[i], done[i], length);
      done[i] += length;
    }
  }
}

template <typename PartOf>
void PackParts(const std::vector<BatchEntry>& entries, size_t ranks, PartOf part_of,
               std::byte* to) {
  ForEachPart(entries, ranks, part_of, [&](const BatchEntry& entry, size_t begin, size_t length) {
    CopyBytes(to, static_cast<const std::byte*>(entry.input) + begin, length);
    to += length;
  });
}

template <typename PartOf>
void UnpackParts(const std::vector<BatchEntry>& entries, size_t ranks, PartOf part_of,
                 const std::byte* from) {
  ForEachPart(entries, ranks, part_of, [&](const BatchEntry& entry, size_t begin, size_t length) {
    CopyBytes(static_cast<std::byte*>(entry.output) + begin, from, length);
    from += length;
  });
}

}  // namespace hororing
