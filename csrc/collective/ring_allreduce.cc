// Ring-allreduce: a reduce-scatter and an all-gather around a ring. Rank r talks to its two
// neighbours only: it sends to r + 1 and receives from r - 1 (modulo N).
//
// Picture, N = 3, chunks a b c of every rank's data, digits for the ranks summed up so far:
//
//                rank 0            rank 1            rank 2
//   begin        a0  b0  c0        a1  b1  c1        a2  b2  c2
//   step 0       a0  b02 c0        a1  b1  c10       a21 b2  c2      received and combined
//   step 1       a0' b   c         a   b'  c         a   b   c'      ' complete
//   gather       a'  b'  c'        a'  b'  c'        a'  b'  c'
//
// Transfers, chunk indices modulo N; step s of the reduce-scatter, s = 0 .. N-2:
//
//   rank r sends    chunk r - 1 - s       (what it has of it so far)
//   rank r receives chunk r - 2 - s       and combines its own contribution with it
//
//           rank 0 sends   rank 1 sends   rank 2 sends        (N = 3)
//   s = 0   c              a              b
//   s = 1   b              c              a
//
// After N-1 steps rank r has received chunk r - 2 - (N-2) = r: chunk r is complete on rank r,
// which finishes it (division, postscale). The all-gather (allgather.cc) brings it to the others,
// so that all ranks hold the bits of the one rank that finished them. What rank r receives in
// step s it sends on in step s + 1, segment by segment: no rank waits for a whole chunk.
//
// Cost per rank: 2(N-1) messages' latency, 2(N-1)/N * S bytes sent and as many received, the
// least possible, and (N-1)/N * S bytes combined.
//
// No deadlock: a wait in step s needs of a neighbour only what it does in steps before s, or in
// step s before that wait.
//
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", J. Parallel Distrib. Comput. 69 (2009) 117-124, doi:10.1016/j.jpdc.2008.09.002.

#include <string>
#include <vector>

#include "collective/allreduce.h"
#include "collective/segments.h"

namespace hororing {
namespace {

// Segments for which receives are posted ahead: one is combined, the others arrive meanwhile.
constexpr size_t kAhead = 4;

class ReduceScatter {
 public:
  ReduceScatter(Transport& transport, const ReduceBuffer& buffer, const std::vector<Span>& chunks,
                size_t segment, std::byte* scratch, TimeNs deadline)
      : transport_(transport),
        spec_(buffer.spec),
        data_(static_cast<std::byte*>(buffer.data)),
        scratch_(scratch),
        element_(ElementSize(buffer.spec.dtype)),
        segment_(segment),
        chunks_(chunks),
        size_(transport.size()),
        next_((transport.rank() + 1) % size_),
        previous_((transport.rank() + size_ - 1) % size_),
        to_post_(chunks, segment, transport.rank() - 2, size_ - 1),
        receives_(transport, deadline),
        sends_(transport, deadline) {}

  Status Run() {
    PostReceives();
    SendOwnChunk();
    RingWalk to_take(chunks_, segment_, transport_.rank() - 2, size_ - 1);
    RingWalk::Place place;
    int step = 0;
    size_t sent_before_step = 0;  // what the successor needs to have received before `step`
    for (size_t taken = 0; to_take.Next(&place); ++taken) {
      if (place.step != step) {
        // Bounds what is under way; the successor is hardly more than one step behind.
        HORORING_RETURN_IF_ERROR(sends_.WaitFirst(sent_before_step));
        sent_before_step = sends_.added();
        step = place.step;
      }
      HORORING_RETURN_IF_ERROR(receives_.WaitOldest());
      Combine(place, taken);
      PostReceives();
    }
    return sends_.WaitAll();
  }

 private:
  std::byte* At(const Span& span) { return data_ + span.begin * element_; }
  std::byte* Slot(size_t number) { return scratch_ + number % kAhead * segment_ * element_; }

  // One more for every one taken, up to kAhead.
  void PostReceives() {
    RingWalk::Place place;
    const size_t target = combined_ + kAhead;
    while (receives_.added() < target && to_post_.Next(&place)) {
      receives_.Add(
          transport_.Receive(previous_, Slot(receives_.added()), place.span.size * element_));
    }
  }

  void SendOwnChunk() {
    RingWalk own(chunks_, segment_, transport_.rank() - 1, 1);
    RingWalk::Place place;
    while (own.Next(&place)) {
      Start(spec_, At(place.span), At(place.span), place.span.size);
      Send(place.span);
    }
  }
  void Send(const Span& span) {
    sends_.Add(transport_.Send(next_, At(span), span.size * element_));
  }

  void Combine(const RingWalk::Place& place, size_t number) {
    std::byte* own = At(place.span);
    Start(spec_, own, own, place.span.size);
    ReduceInto(spec_, own, Slot(number), place.span.size);
    ++combined_;
    if (place.step == size_ - 2) {
      Finish(spec_, size_, own, own, place.span.size);
    } else {
      Send(place.span);
    }
  }

  Transport& transport_;
  const ReduceSpec& spec_;
  std::byte* const data_;
  std::byte* const scratch_;  // kAhead segments
  const size_t element_;
  const size_t segment_;  // elements
  const std::vector<Span>& chunks_;
  const int size_, next_, previous_;
  size_t combined_ = 0;  // segments
  RingWalk to_post_;
  Inflight receives_, sends_;
};

}  // namespace

Status RingAllreduce(Transport& transport, const ReduceBuffer& buffer, Scratch& scratch,
                     TimeNs deadline) {
  const int size = transport.size();
  if (size == 1 || buffer.elements == 0) {
    ReduceMany(buffer.spec, size, buffer.data, &buffer.data, 1, buffer.elements);
    return Status::Ok();
  }
  const size_t element = ElementSize(buffer.spec.dtype);
  const std::vector<Span> chunks = Chunks(buffer.elements, size);
  const size_t largest = LargestSize(chunks);
  const size_t segment = std::min(SegmentBytes(largest * element) / element, largest);
  const size_t scratch_bytes = kAhead * segment * element;
  void* memory = scratch.Reserve(scratch_bytes);
  if (memory == nullptr) {
    return Status(Code::kInternal, "ring allreduce: no memory for a receive buffer of " +
                                       std::to_string(scratch_bytes) + " bytes");
  }
  {
    ReduceScatter reduce_scatter(transport, buffer, chunks, segment,
                                 static_cast<std::byte*>(memory), deadline);
    HORORING_RETURN_IF_ERROR(reduce_scatter.Run());
  }
  return GatherAround(transport, static_cast<std::byte*>(buffer.data), Scaled(chunks, element),
                      nullptr, deadline);
}

}  // namespace hororing
