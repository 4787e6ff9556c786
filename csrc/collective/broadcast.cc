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
// Chain: place p receives every segment from p - 1 and forwards it to p + 1. That is the ring of
// allgather.cc, in which only the root has data. The last place has all data after N - 2 + K
// messages of S / K bytes, for K segments.
//
// The chain is chosen if it takes less time by that count (latency is hidden at these sizes): N - 2
// + K < ceil(log2 N) * K; and for two ranks, where times are equal, to bound the message size.
//
// Source: [Thakur 2005] (collectives.h) for the tree; J. Pjesivac-Grbovic et al., "Performance
// analysis of MPI collective operations", Cluster Comput. 10 (2007) 127-143,
// doi:10.1007/s10586-007-0012-0, for the chain.

#include <vector>

#include "collective/collectives.h"
#include "collective/segments.h"

namespace hororing {
namespace {

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
    std::vector<Span> chunks(static_cast<size_t>(size));
    chunks[static_cast<size_t>(root)] = {0, bytes};
    return GatherChunks(transport, static_cast<std::byte*>(data), chunks, {nullptr, segment},
                        deadline);
  }
  return Tree(transport, root, data, bytes, deadline);
}

}  // namespace hororing
