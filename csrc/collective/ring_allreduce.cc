// Ring-allreduce: a reduce-scatter and an all-gather around a ring. Rank r sends to r + 1 and
// receives from r - 1 (modulo N), and has no other peers.
//
// Picture, N = 3, chunks a b c of every rank's data, digits for the ranks summed up so far:
//
//                rank 0            rank 1            rank 2
//   begin        a0  b0  c0        a1  b1  c1        a2  b2  c2
//   step 0       a0  b02 c0        a1  b1  c10       a21 b2  c2      received and combined
//   step 1       a0' b   c         a   b'  c         a   b   c'      ' complete
//   gather       a'  b'  c'        a'  b'  c'        a'  b'  c'
//
// Transfers, chunk indices modulo N; steps s = 0 .. 2N-3:
//
//   rank r sends    chunk r - 1 - s       (what it has of it so far)
//   rank r receives chunk r - 2 - s       s < N-1: and combines its own contribution with it,
//                                         s = N-2: and finishes it (division, postscale),
//                                         s > N-2: to its place, complete
//
//           rank 0 sends   rank 1 sends   rank 2 sends        (N = 3)
//   s = 0   c              a              b
//   s = 1   b              c              a
//   s = 2   a'             b'             c'
//   s = 3   c'             a'             b'
//
// Chunk r is completed on rank r, so all ranks hold the bits of the rank that finished it. In step
// s + 1 rank r forwards what it received in step s, segment by segment, also between the
// reduce-scatter and the all-gather: no rank waits for a whole chunk, and the wire is never idle.
//
// Cost per rank: 2(N-1) messages; 2(N-1)/N * S bytes sent and received, (N-1)/N * S combined.
//
// No deadlock: a wait in step s requires only what a neighbour does before its own wait of step s.
//
// A receive of step s > N-2 waits for this rank's sends of that chunk, in step s - N + 2 or later.
//
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", J. Parallel Distrib. Comput. 69 (2009) 117-124, doi:10.1016/j.jpdc.2008.09.002.

#include <algorithm>
#include <utility>
#include <vector>

#include "collective/allreduce.h"
#include "collective/segments.h"

namespace hororing {
namespace {

// Segments for which receives are posted ahead: one is combined, the others arrive meanwhile.
constexpr size_t kAhead = 8;

class Ring {
 public:
  Ring(Transport& transport, const ReduceBuffer& buffer, const std::vector<Span>& chunks,
       size_t segment, std::byte* scratch, TimeNs deadline)
      : transport_(transport),
        layout_(buffer.layout),
        data_(buffer.data),
        scratch_(scratch),
        segment_(segment),
        chunks_(chunks),
        to_post_(chunks, segment, transport.rank() - 2, 2 * (size_ - 1)),
        receives_(transport, deadline),
        sends_(transport, deadline) {}

  Status Run() {
    SendOwnChunk();
    RingSchedule to_take(chunks_, segment_, transport_.rank() - 2, 2 * (size_ - 1));
    RingSchedule::Place place;
    size_t sent_before_step = sends_.added();
    for (size_t number = 0; to_take.Next(&place); ++number) {
      if (place.step != step_) {
        // All that is sent in earlier steps; the successor is hardly more than one behind.
        HORORING_RETURN_IF_ERROR(
            sends_.WaitFirst(place.step == step_ + 1 ? sent_before_step : sends_.added()));
        sent_before_step = sends_.added();
        step_ = place.step;
      }
      PostReceives(number + kAhead);
      HORORING_RETURN_IF_ERROR(receives_.WaitOldest());
      if (step_ < size_ - 1) Combine(place.span, Slot(number));
      if (step_ == size_ - 2) Finish(place.span);
      if (step_ < 2 * size_ - 3) Send(place.span);
    }
    return sends_.WaitAll();
  }

 private:
  std::byte* Slot(size_t number) { return scratch_ + number % kAhead * segment_; }

  // Posts the first `target` receives, or as many as have free places.
  void PostReceives(size_t target) {
    while (receives_.added() < target) {
      if (next_to_post_.span.size == 0 && !to_post_.Next(&next_to_post_)) return;
      const int step = next_to_post_.step;
      if (step > size_ - 2 && step > step_ + size_ - 2) return;
      const Span span = std::exchange(next_to_post_.span, {});
      std::byte* const to = step < size_ - 1 ? Slot(receives_.added()) : data_ + span.begin;
      receives_.Add(transport_.Receive(previous_, to, span.size));
    }
  }

  void SendOwnChunk() {
    RingSchedule own(chunks_, segment_, transport_.rank() - 1, 1);
    RingSchedule::Place place;
    while (own.Next(&place)) {
      Start(place.span);
      Send(place.span);
    }
  }
  void Send(const Span& span) { sends_.Add(transport_.Send(next_, At(span), span.size)); }

  // Partial results have the types of the elements.
  void Start(const Span& span) { StartPartial(layout_, span, At(span), At(span)); }
  void Combine(const Span& span, const std::byte* received) {
    Start(span);
    CombinePartials(layout_, span, At(span), At(span), received);
  }
  void Finish(const Span& span) { FinishPartial(layout_, span, size_, At(span), At(span)); }
  std::byte* At(const Span& span) const { return data_ + span.begin; }

  Transport& transport_;
  const Layout& layout_;
  std::byte* const data_;
  std::byte* const scratch_;  // kAhead segments
  const size_t segment_;      // bytes
  const std::vector<Span>& chunks_;
  const int size_ = transport_.size(), next_ = (transport_.rank() + 1) % size_,
            previous_ = (transport_.rank() + size_ - 1) % size_;
  int step_ = 0;
  RingSchedule to_post_;
  RingSchedule::Place next_to_post_;  // taken from to_post_, or empty
  Inflight receives_, sends_;
};

}  // namespace

Status RingAllreduce(Transport& transport, const ReduceBuffer& buffer, Scratch& scratch,
                     TimeNs deadline, size_t segment_bytes) {
  const int size = transport.size();
  if (size == 1 || buffer.layout.bytes() == 0) {
    ReduceAlone(buffer.layout, buffer.data, buffer.data);
    return Status::Ok();
  }
  const size_t unit = buffer.layout.unit();
  const std::vector<Span> chunks = buffer.layout.Parts(size);
  const size_t largest = LargestSize(chunks);
  const size_t bytes = SegmentBytes(largest, segment_bytes);
  const size_t segment = std::clamp(bytes / unit * unit, unit, largest);
  std::byte* memory = nullptr;
  HORORING_RETURN_IF_ERROR(
      scratch.Reserve(kAhead * segment, "ring allreduce: no memory for a receive buffer", &memory));
  return Ring(transport, buffer, chunks, segment, memory, deadline).Run();
}

}  // namespace hororing
