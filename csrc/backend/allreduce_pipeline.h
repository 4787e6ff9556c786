// The allreduce through shared memory, on one host or several. The batch is one virtual buffer (its
// tensors are contiguous, each padded to 64 bytes), which is processed in blocks that fit into the
// cache. Some ranks of each host own a slice of every block; on one host all of them do:
//
//   PACK      rank r copies the slices of others in block k into its slot      packed[r] = k + 1
//   REDUCE    an owner sums its slice of all ranks of the host, in rank order
//   exchange  several hosts: the owners of a slice on all hosts add up their sums, over the wire
//             (collective/slice_exchange.h)                                    reduced[r] = k + 1
//   UNPACK    every rank copies the slices of others to its outputs            consumed[r] = k + 1
//
// No fusion buffer, no pairwise copies, and one rounding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/host_pipeline.h"
#include "backend/virtual_buffer.h"
#include "collective/allreduce.h"

namespace hororing {

// How a batch is cut; the same on all ranks.
struct AllreducePlan {
  // `latency_bytes`: see AllreduceOptions.
  AllreducePlan(const Batch& batch, const SetSlots& set, size_t latency_bytes);

  // An owner's part of a block. Parts differ by at most one cache line.
  Range SliceOf(const Range& block, int owner) const {
    const size_t lines = block.size() / kCacheLine;
    const size_t n = static_cast<size_t>(owners), i = static_cast<size_t>(owner);
    return {block.begin + lines * i / n * kCacheLine,
            block.begin + lines * (i + 1) / n * kCacheLine};
  }
  size_t LargestSlice() const { return SliceOf({0, block_bytes}, owners - 1).size(); }

  std::vector<Place> places;  // of the tensors that are not empty
  size_t total = 0;           // bytes
  int owners;                 // of slices, on each host
  size_t block_bytes = 0;
  uint64_t blocks = 0;
  // Several hosts.
  Layout layout;
  bool whole = true;  // each host sends whole slices to all others
};

// `scratch`: for data on the wire.
Status RunAllreduce(SetSlots& set, const Batch& batch, const AllreducePlan& plan, Scratch& scratch,
                    TimeNs deadline, TraceSink& trace);

}  // namespace hororing
