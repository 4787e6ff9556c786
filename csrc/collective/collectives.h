// Collectives that move data without arithmetic, over a Transport. Stateless. All ranks pass
// matching sizes, one for each rank of the transport, and the same root. `segment_bytes`: the
// message size, the same on all ranks; 0: built in.
//
// [Thakur 2005]: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66,
// doi:10.1177/1094342005051521.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/subgroup.h"
#include "transport/transport.h"

namespace hororing {

// Copies `data` of `root` to all ranks: a binomial tree for small ones, else a chain in segments.
Status Broadcast(Transport& transport, int root, void* data, size_t bytes, TimeNs deadline,
                 size_t segment_bytes = 0);

// Options of an all-gather; the same on all ranks.
struct GatherOptions {
  // The same ranks in ring order; null: rank order.
  Subgroup* ring = nullptr;
  size_t segment_bytes = 0;
  // Every rank sends to every other one, instead of around a ring: for hosts with one rank each.
  bool pairwise = false;
};

// Rank r contributes bytes_per_rank[r]; `result`, in rank order, may contain this rank's `input`.
Status AllgatherV(Transport& transport, const void* input,
                  const std::vector<size_t>& bytes_per_rank, void* result, TimeNs deadline,
                  const GatherOptions& options = {});

// Rank r sends send_bytes[q] to rank q and receives receive_bytes[q] from it; both buffers are
// contiguous and in rank order. REQUIRES: send_bytes[q] of rank r is receive_bytes[r] of rank q;
// `input` and `result` do not overlap.
Status AlltoallV(Transport& transport, const void* input, const std::vector<size_t>& send_bytes,
                 void* result, const std::vector<size_t>& receive_bytes, TimeNs deadline,
                 size_t segment_bytes = 0);

}  // namespace hororing
