// How the collectives divide their data, and how they keep track of messages in flight.
//
//   chunk     one rank's part of the data. Chunk makes chunks whose sizes differ by at most one
//             element; ContiguousSpans takes the sizes from the caller.
//   segment   the part that one message carries: while one is combined, the next ones arrive
//
// Every rank computes the same division from the sizes alone. Empty chunks have no messages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <numeric>
#include <vector>

#include "collective/collectives.h"
#include "transport/transport.h"

namespace hororing {

// In any unit: elements or bytes.
struct Span {
  size_t begin = 0;
  size_t size = 0;
};

// Chunk `index` of `count`: begin = index * floor(total / count) + min(index, total mod count).
inline Span Chunk(size_t total, int count, int index) {
  const size_t parts = static_cast<size_t>(count), i = static_cast<size_t>(index);
  const size_t each = total / parts, larger = total % parts;
  return {i * each + std::min(i, larger), each + (i < larger ? 1 : 0)};
}

// Spans of the given sizes, one after the other.
inline std::vector<Span> ContiguousSpans(const std::vector<size_t>& sizes) {
  std::vector<Span> spans;
  size_t total = 0;
  for (const size_t size : sizes) {
    spans.push_back({total, size});
    total += size;
  }
  return spans;
}

// The next segment of `part`, of which `done` bytes are done; empty at its end.
inline Span SegmentOf(const Span& part, size_t done, size_t segment) {
  const size_t begin = std::min(part.size, done);
  return {part.begin + begin, std::min(segment, part.size - begin)};
}

inline size_t Sum(const std::vector<size_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), size_t{0});
}

inline size_t LargestSize(const std::vector<Span>& spans) {
  size_t largest = 0;
  for (const Span& span : spans) largest = std::max(largest, span.size);
  return largest;
}

// Bytes of a segment for chunks of at most `chunk_bytes`; `wanted` if that is not 0. A step of a
// ring delays by one of kCuts segments. Below 32 KiB, a message costs more than it hides; 256 KiB
// stay in the second-level cache between arrival and combination. Chunks of more than 32 MiB get
// larger segments: at most 128 up to 256 MiB.
inline size_t SegmentBytes(size_t chunk_bytes, size_t wanted = 0) {
  if (wanted != 0) return wanted;
  constexpr size_t kMin = 32 << 10, kDefault = 256 << 10, kMax = 2 << 20;
  constexpr size_t kCuts = 8, kMessages = 128;
  if (chunk_bytes < kCuts * kDefault) return std::max(kMin, chunk_bytes / kCuts / kMin * kMin);
  return std::clamp(chunk_bytes / kMessages / kDefault * kDefault, kDefault, kMax);
}

// Visits the segments of `steps` chunks, downwards from chunk `first` (modulo their number). A ring
// sends them in this order, and the successor receives them in the same order.
class RingSchedule {
 public:
  struct Place {
    int step = 0;
    Span span;
  };

  // `chunks` is borrowed.
  RingSchedule(const std::vector<Span>& chunks, size_t segment, int first, int steps)
      : chunks_(chunks), segment_(segment), first_(first), steps_(steps) {}

  // Returns false at the end, and leaves *place unchanged.
  bool Next(Place* place) {
    const int count = static_cast<int>(chunks_.size());
    for (; step_ < steps_; ++step_, done_ = 0) {
      const int index = ((first_ - step_) % count + count) % count;
      const Span& chunk = chunks_[static_cast<size_t>(index)];
      if (done_ == chunk.size) continue;
      const size_t size = std::min(segment_, chunk.size - done_);
      *place = {step_, {chunk.begin + done_, size}};
      done_ += size;
      return true;
    }
    return false;
  }

 private:
  const std::vector<Span>& chunks_;
  const size_t segment_;
  const int first_;
  const int steps_;
  int step_ = 0;
  size_t done_ = 0;  // of the chunk of step_
};

// Waits for requests in the order in which they were posted, each exactly once. The destructor
// gives up those that are left when a function returns early: its error has waited long enough.
class Inflight {
 public:
  // A request, and data for the caller.
  struct Transfer {
    Transport::Request request;
    int rank = -1;  // of the peer
    uint64_t block = 0;
  };

  Inflight(Transport& transport, TimeNs deadline) : transport_(transport), deadline_(deadline) {}
  // The transport remembers its first error, which the caller is already returning.
  ~Inflight() {
    deadline_ = Transport::kNoWait;
    (void)WaitAll().ok();
  }
  Inflight(const Inflight&) = delete;

  void Add(Transport::Request request, int rank = -1, uint64_t block = 0) {
    transfers_.push_back({request, rank, block});
    ++added_;
  }
  size_t added() const { return added_; }
  bool empty() const { return transfers_.empty(); }
  const Transfer& oldest() const { return transfers_.front(); }

  // REQUIRES: !empty().
  Status WaitOldest() {
    const Transport::Request oldest = transfers_.front().request;
    transfers_.pop_front();
    return transport_.Wait(oldest, deadline_);
  }
  // Waits for the first `count` of all transfers ever added, also after an error, which it returns.
  Status WaitFirst(size_t count) {
    Status first;
    while (added_ - transfers_.size() < count && !empty()) {
      Status status = WaitOldest();
      if (first.ok()) first = std::move(status);
    }
    return first;
  }
  Status WaitAll() { return WaitFirst(added_); }

  // Removes transfers that are done, up to the first that is not; never blocks. *moved: some were.
  Status TakeDone(bool* moved) {
    while (!empty() && transport_.Done(oldest().request)) {
      *moved = true;
      HORORING_RETURN_IF_ERROR(WaitOldest());
    }
    return Status::Ok();
  }
  // The first block with an open transfer; `otherwise` if there is none.
  uint64_t FirstOpen(uint64_t otherwise) const {
    return empty() ? otherwise : std::min(otherwise, oldest().block);
  }

 private:
  Transport& transport_;
  TimeNs deadline_;
  std::deque<Transfer> transfers_;
  size_t added_ = 0;
};

// The number of segments in flight between rank r and each of `others`, if every rank sends to
// every other one. Few, because data queued before a wire delays everything behind it, including
// TCP's acknowledgements; but enough to keep the wire between two ranks busy.
inline size_t RoundsUnderWay(size_t others) {
  constexpr size_t kMin = 2, kSegments = 8;
  return std::max(kMin, kSegments / std::max<size_t>(others, 1));
}

// The second half of several algorithms: chunk r of `data` is complete on rank r, and is copied to
// all ranks. Spans are in bytes; see allgather.cc. REQUIRES: no other transfer touches `data`.
Status GatherChunks(Transport& transport, std::byte* data, const std::vector<Span>& chunks,
                    const GatherOptions& options, TimeNs deadline);

// Pairwise exchange: sends[q] of `from` goes to rank q, receives[q] of `to` comes from it. This
// rank's own part is not copied. Spans are in bytes; see alltoall.cc. `segment_bytes`: the message
// size; 0: parts are not cut.
Status ExchangeParts(Transport& transport, const std::byte* from, const std::vector<Span>& sends,
                     std::byte* to, const std::vector<Span>& receives, TimeNs deadline,
                     size_t segment_bytes);

}  // namespace hororing
