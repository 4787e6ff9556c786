// A reduce-scatter that combines every element in rank order, in one pass, with a wide accumulator:
// the same bits whatever the element is fused with, and one rounding for 16-bit floats. A pairwise
// exchange sends part c of every rank's data straight to rank c.
//
//                rank 0          rank 1          rank 2
//   begin        a0 b0 c0        a1 b1 c1        a2 b2 c2
//   exchange     a0 a1 a2        b0 b1 b2        c0 c1 c2       in scratch, but for its own
//   combine      a               b               c              ReduceMany, in rank order
//
// In round k = 0, 1, ... rank r sends segment k of part r + i (modulo N) to rank r + i, and
// receives segment k of part r from rank r - i, for i = 1 .. N-1: at each i every rank sends to a
// different one. There are as many rounds as the largest part has segments; shorter parts send
// nothing in the last ones. K rounds are in flight: one is combined while the next ones arrive. The
// scratch holds K (N-1) segments, bounded by kScratchBytes. K is 2, or more for few ranks if
// segments are as long as a message between hosts.
//
// Cost per rank: N-1 messages at once. A rank sends S bytes minus its own part, receives its own
// part N-1 times and combines it N times: (N-1)/N * S and S if the parts are equal.
//
// No deadlock: a wait of round k requires only that others have posted round k, before they wait.
//
// Source: the pairwise exchange of [Thakur 2005] (collectives.h); order and segments are ours.

#include <algorithm>
#include <deque>
#include <vector>

#include "collective/allreduce.h"
#include "collective/segments.h"

namespace hororing {
namespace {

constexpr size_t kRounds = 2;  // under way, of segments of the built-in length
constexpr size_t kScratchBytes = 8 << 20;
constexpr size_t kMinSegmentBytes = 4 << 10;

size_t RoundBytes(size_t part_bytes, int size, size_t depth, size_t wanted) {
  const size_t share = kScratchBytes / depth / static_cast<size_t>(size - 1);
  return std::max(kMinSegmentBytes,
                  std::min(SegmentBytes(part_bytes, wanted), share / kCacheLine * kCacheLine));
}

class Exchange {
 public:
  Exchange(Transport& transport, const ScatterBuffer& buffer, const std::vector<Span>& parts,
           size_t segment, size_t depth, std::byte* scratch, TimeNs deadline)
      : transport_(transport),
        buffer_(buffer),
        scratch_(scratch),
        segment_(segment),
        depth_(depth),
        parts_(parts),
        sources_(static_cast<size_t>(size_)),
        receives_(transport, deadline),
        sends_(transport, deadline) {}

  Status Run() {
    const size_t rounds = (LargestSize(parts_) + segment_ - 1) / segment_;
    for (size_t round = 0; round < std::min(depth_, rounds); ++round) Post(round);
    for (size_t round = 0; round < rounds; ++round) {
      const Span own = Segment(rank_, round);
      if (own.size > 0) {
        HORORING_RETURN_IF_ERROR(receives_.WaitFirst((round + 1) * static_cast<size_t>(size_ - 1)));
        Combine(own, round);
      }
      HORORING_RETURN_IF_ERROR(sends_.WaitFirst(sent_.front()));
      sent_.pop_front();
      if (round + depth_ < rounds) Post(round + depth_);
    }
    return sends_.WaitAll();
  }

 private:
  // Segment `round` of rank `owner`'s part; empty beyond its end.
  Span Segment(int owner, size_t round) const {
    return SegmentOf(parts_[static_cast<size_t>(owner)], round * segment_, segment_);
  }
  // The contribution of the i-th rank before this one, i = 1 .. N-1.
  std::byte* Slot(size_t round, int i) {
    const size_t slot =
        round % depth_ * static_cast<size_t>(size_ - 1) + static_cast<size_t>(i) - 1;
    return scratch_ + slot * segment_;
  }

  void Post(size_t round) {
    const Span own = Segment(rank_, round);
    for (int i = 1; i < size_ && own.size > 0; ++i) {
      const int from = (rank_ + size_ - i) % size_;
      receives_.Add(transport_.Receive(from, Slot(round, i), own.size));
    }
    for (int i = 1; i < size_; ++i) {
      const int to = (rank_ + i) % size_;
      const Span theirs = Segment(to, round);
      if (theirs.size == 0) continue;
      sends_.Add(transport_.Send(to, buffer_.input + theirs.begin, theirs.size));
    }
    sent_.push_back(sends_.added());
  }

  void Combine(const Span& own, size_t round) {
    const size_t done = own.begin - parts_[static_cast<size_t>(rank_)].begin;
    buffer_.layout.ForEachRun(own, [&](const ReduceSpec& spec, size_t at, size_t, size_t elements) {
      sources_[static_cast<size_t>(rank_)] = buffer_.input + own.begin + at;
      for (int i = 1; i < size_; ++i) {
        sources_[static_cast<size_t>((rank_ + size_ - i) % size_)] = Slot(round, i) + at;
      }
      ReduceMany(spec, size_, buffer_.result + done + at, sources_.data(), size_, elements);
    });
  }

  Transport& transport_;
  const ScatterBuffer& buffer_;
  std::byte* const scratch_;  // depth_ * (N-1) segments
  const size_t segment_;      // bytes
  const size_t depth_;        // rounds under way
  const std::vector<Span>& parts_;
  const int size_ = transport_.size(), rank_ = transport_.rank();
  std::vector<const void*> sources_;
  Inflight receives_, sends_;
  std::deque<size_t> sent_;  // by the end of each round under way
};

}  // namespace

Status RankOrderReduceScatter(Transport& transport, const ScatterBuffer& buffer, Scratch& scratch,
                              TimeNs deadline, size_t segment_bytes) {
  const int size = transport.size();
  const size_t unit = buffer.layout.unit();
  const std::vector<Span> parts = ContiguousSpans(buffer.parts);
  const size_t largest = LargestSize(parts);
  if (size == 1 || largest == 0) {
    ReduceAlone(buffer.layout, buffer.result, buffer.input);
    return Status::Ok();
  }
  const size_t depth = segment_bytes == 0 ? kRounds : RoundsUnderWay(static_cast<size_t>(size - 1));
  const size_t segment =
      std::min(RoundBytes(largest, size, depth, segment_bytes) / unit * unit, largest);
  const size_t scratch_bytes = depth * static_cast<size_t>(size - 1) * segment;
  std::byte* memory = nullptr;
  HORORING_RETURN_IF_ERROR(scratch.Reserve(
      scratch_bytes, "rank-order reduce-scatter: no memory for receive buffers", &memory));
  return Exchange(transport, buffer, parts, segment, depth, memory, deadline).Run();
}

}  // namespace hororing
