// All-to-all by pairwise exchange: in step i = 1 .. N-1 rank r sends to r + i and receives from r -
// i (modulo N), so at each step every rank sends to a different one.
//
//                rank 0          rank 1          rank 2
//   input        a0 a1 a2        b0 b1 b2        c0 c1 c2        digit: the rank it is for
//   own part     a0 .  .         .  b1 .         .  .  c2        copied
//   step 1       a0 .  c0        a1 b1 .         .  b2 c2        from r - 1
//   step 2       a0 b0 c0        a1 b1 c1        a2 b2 c2        from r - 2
//
// Parts may differ in size; empty ones need no message. Up to kAhead requests are in flight, so a
// step with small parts does not wait for one with large parts.
//
// Between hosts, parts are cut into segments: round k = 0, 1, ... has the steps above with segment
// k of every part, and RoundsUnderWay rounds are in flight. Then all flows on a wire have the same
// pace, and none fills the queue. If whole parts were sent at once, they would share wires
// unevenly, and the last ones would have a wire to themselves.
//
// Cost per rank: N-1 messages, or their segments, of which several overlap. All bytes but this
// rank's own part are sent once and received once, which is the minimum.
//
// No deadlock: a rank waits for the transfers of a step only after posting both of its own, and
// only after waiting for all earlier steps. Of all waiting ranks, consider one whose step (in the
// order of rounds) is lowest: its peer is at that step or a later one, so it has posted its half.
//
// Source: the long-message all-to-all of [Thakur 2005] (collectives.h).

#include <algorithm>
#include <vector>

#include "collective/collectives.h"
#include "collective/segments.h"
#include "kernels/copy.h"

namespace hororing {
constexpr size_t kAhead = 8, kMaxAhead = 64;  // requests

Status ExchangeParts(Transport& transport, const std::byte* from, const std::vector<Span>& sends,
                     std::byte* to, const std::vector<Span>& receives, TimeNs deadline,
                     size_t segment_bytes) {
  const size_t size = sends.size(), rank = static_cast<size_t>(transport.rank());
  const size_t longest = std::max(LargestSize(sends), LargestSize(receives));
  const size_t segment = segment_bytes == 0 ? longest : segment_bytes;
  size_t ahead = kAhead;
  if (segment_bytes != 0) {
    ahead = std::clamp(2 * (size - 1) * RoundsUnderWay(size - 1), kAhead, kMaxAhead);
  }
  Inflight inflight(transport, deadline);
  for (size_t done = 0; done < longest; done += segment) {
    for (size_t i = 1; i < size; ++i) {
      const size_t target = (rank + i) % size, source = (rank + size - i) % size;
      const Span out = SegmentOf(sends[target], done, segment);
      const Span in = SegmentOf(receives[source], done, segment);
      if (in.size > 0) {
        inflight.Add(transport.Receive(static_cast<int>(source), to + in.begin, in.size));
      }
      if (out.size > 0) {
        inflight.Add(transport.Send(static_cast<int>(target), from + out.begin, out.size));
      }
      if (inflight.added() > ahead) {
        HORORING_RETURN_IF_ERROR(inflight.WaitFirst(inflight.added() - ahead));
      }
    }
  }
  return inflight.WaitAll();
}

Status AlltoallV(Transport& transport, const void* input, const std::vector<size_t>& send_bytes,
                 void* result, const std::vector<size_t>& receive_bytes, TimeNs deadline,
                 size_t segment_bytes) {
  const size_t rank = static_cast<size_t>(transport.rank());
  const std::byte* from = static_cast<const std::byte*>(input);
  std::byte* to = static_cast<std::byte*>(result);
  const std::vector<Span> sends = ContiguousSpans(send_bytes),
                          receives = ContiguousSpans(receive_bytes);
  if (sends[rank].size > 0) {
    CopyBytes(to + receives[rank].begin, from + sends[rank].begin, sends[rank].size);
  }
  return ExchangeParts(transport, from, sends, to, receives, deadline, segment_bytes);
}

}  // namespace hororing
