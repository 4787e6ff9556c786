// Broadcast: a binomial tree for small payloads, a pipelined chain for large ones. Places are
// counted from the root: place(r) = (r - root) mod N.
//
//   tree, N = 8                              chain, segments s0 s1 ...
//   place 0 -> 4                             place 0 --s1--> 1 --s0--> 2 -> ... -> N-1
//   place 0 -> 2   4 -> 6
//   place 0 -> 1   2 -> 3   4 -> 5   6 -> 7
//
// Tree: place p > 0 receives from p without its lowest set bit. With b the value of that bit (for
// the root: the smallest power of two that is at least N), it then sends to p + b/2, p + b/4, ...,
// p + 1, if those are below N. All have the data after ceil(log2 N) messages of S bytes.
//
// Chain: place p receives every segment from p - 1 and forwards it to p + 1. The last place has all
// data after N - 2 + K messages of S / K bytes, for K segments.
//
// The chain is chosen if it takes less time by that count (latency is hidden at these sizes): N - 2
// + K < ceil(log2 N) * K. It is also chosen for two ranks, where both take the same time, to bound
// the message size.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", doi:10.1177/1094342005051521 (tree); J. Pjesivac-Grbovic et
// al., "Performance analysis of MPI collective operations", Cluster Comput. 10 (2007) 127-143,
// doi:10.1007/s10586-007-0012-0 (chain).

#include <algorithm>
#include <vector>

#include "collective/collectives.h"
#include "collective/segments.h"

namespace hororing {
namespace {

// Receives posted in advance in the chain.
constexpr size_t kAhead = 16;

Status Tree(Transport& transport, int root, void* data, size_t bytes, TimeNs deadline) {
  const int size = transport.size();
  const int place = (transport.rank() - root + size) % size;
  const auto rank_at = [&](int where) { return (where + root) % size; };
  int bit = 1;
  while (bit < size && (place & bit) == 0) bit *= 2;
  if (place != 0) {
    const Transport::Request request = transport.Receive(rank_at(place - bit), data, bytes);
    HORORING_RETURN_IF_ERROR(transport.Wait(request, deadline));
  }
  Inflight sends(transport, deadline);
  for (bit /= 2; bit > 0; bit /= 2) {
    if (place + bit < size) sends.Add(transport.Send(rank_at(place + bit), data, bytes));
  }
  return sends.WaitAll();
}

Status Chain(Transport& transport, int root, std::byte* data, size_t bytes, size_t segment,
             TimeNs deadline) {
  const int size = transport.size(), rank = transport.rank();
  const int place = (rank - root + size) % size;
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  const size_t segments = (bytes + segment - 1) / segment;
  const auto at = [&](size_t number) { return data + number * segment; };
  const auto size_of = [&](size_t number) { return std::min(segment, bytes - number * segment); };

  Inflight receives(transport, deadline), sends(transport, deadline);
  for (size_t number = 0; number < segments; ++number) {
    if (place > 0) {
      while (receives.added() < std::min(segments, number + kAhead)) {
        const size_t posted = receives.added();
        receives.Add(transport.Receive(previous, at(posted), size_of(posted)));
      }
      HORORING_RETURN_IF_ERROR(receives.WaitOldest());
    }
    if (place < size - 1) {
      sends.Add(transport.Send(next, at(number), size_of(number)));
      // Bounds the transfers in flight. The successor waits for its own successor in the same way.
      if (number >= kAhead) HORORING_RETURN_IF_ERROR(sends.WaitFirst(number + 1 - kAhead));
    }
  }
  return sends.WaitAll();
}

}  // namespace

Status Broadcast(Transport& transport, int root, void* data, size_t bytes, TimeNs deadline,
                 size_t segment_bytes) {
  const int size = transport.size();
  if (size == 1 || bytes == 0) return Status::Ok();
  size_t rounds = 0;
  while ((size_t{1} << rounds) < static_cast<size_t>(size)) ++rounds;
  const size_t segment = SegmentBytes(bytes, segment_bytes);
  const size_t segments = (bytes + segment - 1) / segment;
  const size_t hops = static_cast<size_t>(size - 2);
  if (size == 2 || hops + segments < rounds * segments) {
    return Chain(transport, root, static_cast<std::byte*>(data), bytes, segment, deadline);
  }
  return Tree(transport, root, data, bytes, deadline);
}

}  // namespace hororing
