// Dissemination barrier: in round k rank r sends to r + 2^k and receives from r - 2^k (modulo N).
// After ceil(log2 N) rounds it knows, directly or not, that every rank has arrived. Messages have
// one byte, because over a byte stream an empty message completes before the peer has sent it.
//
// Source: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization", Int.
// J. Parallel Program. 17 (1988) 1-17, doi:10.1007/BF01379320.

#include "collective/collectives.h"

namespace hororing {

Status Barrier(Transport& transport, TimeNs deadline) {
  const int64_t size = transport.size(), rank = transport.rank();
  for (int64_t distance = 1; distance < size; distance *= 2) {
    const int to = static_cast<int>((rank + distance) % size);
    const int from = static_cast<int>((rank + size - distance) % size);
    const char token = 1;
    char heard = 0;
    HORORING_RETURN_IF_ERROR(SendReceive(transport, to, &token, 1, from, &heard, 1, deadline));
  }
  return Status::Ok();
}

}  // namespace hororing
