// The collectives that move data without arithmetic, over a Transport. Stateless; all ranks
// call with equal sizes and roots.
#pragma once

#include <cstddef>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "transport/transport.h"

namespace hororing {

// Returns when every rank has entered. Dissemination: ceil(log2 N) rounds of one-byte messages.
Status Barrier(Transport& transport, TimeNs deadline);

// `data` of `root` ends up in `data` of all. A binomial tree for small payloads; a pipelined
// chain in segments for large ones.
Status Broadcast(Transport& transport, int root, void* data, size_t bytes, TimeNs deadline);

// Rank r contributes bytes_per_rank[r]; `result` receives all contributions back to back in
// rank order. `input` may point to this rank's place inside `result`.
Status AllgatherV(Transport& transport, const void* input,
                  const std::vector<size_t>& bytes_per_rank, void* result, TimeNs deadline);

}  // namespace hororing
