// All-gather around a ring: rank r sends to r + 1 and receives from r - 1 (modulo N).
//
//              rank 0        rank 1        rank 2
//   begin      a             . b           . . c
//   step 0     a . c         a b           . b c
//   step 1     a b c         a b c         a b c
//
// Step s = 0 .. N-2, chunk indices modulo N:
//
//   rank r sends    chunk r - s
//   rank r receives chunk r - 1 - s, to its place
//
// In step s + 1 a rank forwards what it received in step s, segment by segment. Chunks may differ
// in size; empty ones need no message. Cost per rank: the latency of N-1 messages; all other ranks'
// bytes are received once, and all chunks but one are sent once.
//
// If every rank has its own wire, each rank may instead send its chunk directly to all others, by
// the pairwise exchange of alltoall.cc: the same bytes on every wire, and one latency. That
// exchange bounds the bytes in flight per peer, whereas a ring's first step sends a whole chunk at
// once, which fills the queues before the wires.
//
// Source: [Thakur 2005] (collectives.h), with segments.

#include <vector>

#include "collective/collectives.h"
#include "collective/segments.h"
#include "kernels/copy.h"

namespace hororing {
// Receives posted in advance: each has its own place, so it costs only a request.
constexpr size_t kAhead = 16;

Status GatherChunks(Transport& transport, std::byte* data, const std::vector<Span>& chunks,
                    const GatherOptions& options, TimeNs deadline) {
  const int size = transport.size(), rank = transport.rank();
  if (size == 1) return Status::Ok();
  if (options.pairwise) {
    const std::vector<Span> own(chunks.size(), chunks[static_cast<size_t>(rank)]);
    return ExchangeParts(transport, data, own, data, chunks, deadline, options.segment_bytes);
  }
  if (options.ring != nullptr) {
    std::vector<Span> in_order;
    for (const int r : options.ring->ranks()) in_order.push_back(chunks[static_cast<size_t>(r)]);
    return GatherChunks(*options.ring, data, in_order, {nullptr, options.segment_bytes}, deadline);
  }
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  const size_t segment = SegmentBytes(LargestSize(chunks), options.segment_bytes);

  Inflight receives(transport, deadline), sends(transport, deadline);
  RingSchedule to_post(chunks, segment, rank - 1, size - 1);
  RingSchedule to_take(chunks, segment, rank - 1, size - 1);
  RingSchedule::Place place;
  const auto post_receives = [&](size_t target) {
    while (receives.added() < target && to_post.Next(&place)) {
      receives.Add(transport.Receive(previous, data + place.span.begin, place.span.size));
    }
  };
  const auto send = [&] {
    sends.Add(transport.Send(next, data + place.span.begin, place.span.size));
  };

  post_receives(kAhead);
  for (RingSchedule own(chunks, segment, rank, 1); own.Next(&place);) send();
  int step = 0;
  size_t sent_before_step = 0;  // the successor must have received this much before `step`
  for (size_t taken = 1; to_take.Next(&place); ++taken) {
    if (place.step != step) {
      // Bounds the bytes in flight, as in ring_allreduce.cc.
      HORORING_RETURN_IF_ERROR(sends.WaitFirst(sent_before_step));
      sent_before_step = sends.added();
      step = place.step;
    }
    HORORING_RETURN_IF_ERROR(receives.WaitOldest());
    if (place.step < size - 2) send();
    post_receives(taken + kAhead);
  }
  return sends.WaitAll();
}

Status AllgatherV(Transport& transport, const void* input,
                  const std::vector<size_t>& bytes_per_rank, void* result, TimeNs deadline,
                  const GatherOptions& options) {
  const size_t rank = static_cast<size_t>(transport.rank());
  const std::vector<Span> chunks = ContiguousSpans(bytes_per_rank);
  if (LargestSize(chunks) == 0) return Status::Ok();
  std::byte* data = static_cast<std::byte*>(result);
  if (chunks[rank].size > 0 && data + chunks[rank].begin != input) {
    CopyBytes(data + chunks[rank].begin, input, chunks[rank].size);
  }
  return GatherChunks(transport, data, chunks, options, deadline);
}

}  // namespace hororing
