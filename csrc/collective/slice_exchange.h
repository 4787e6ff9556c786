// SliceExchange: allreduces of slices among one rank of every host, with several in flight. It is
// the part of an allreduce over several hosts that uses the wire, and never blocks.
//
// A rank contributes the sum of its host, as partial results (kernels/reduce.h), and gets finished
// results. Hosts are summed in order: the bits depend neither on the cuts nor on timing.
//
//                   host 0           host 1           host 2         chunks a b c of one slice
//   begin           a0 b0 c0         a1 b1 c1         a2 b2 c2       sums of each host
//   there           a0 a1 a2         b0 b1 b2         c0 c1 c2       chunk h to host h
//   combine         a                b                c              in the order of the hosts
//   and back        a  b  c          a  b  c          a  b  c        to all others
//
// Each host sends (H-1)/H of the slice as partial results and the same part as finished elements,
// like a ring (the minimum), but with 2 latencies instead of 2(H-1). If a latency costs more than a
// slice's bytes, hosts send the whole slice to every other host, and nothing is returned.
//
// Messages between two ranks match in the order of posting, which must be the same everywhere:
// slice t + lead is sent before slice t is returned and before slice t + lead + 1 is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "collective/allreduce.h"
#include "collective/segments.h"
#include "kernels/reduce.h"
#include "transport/transport.h"

namespace hororing {

// The sum of a host, in the order of its sources: partials[i] = from[0][i] op from[1][i] ..., with
// prescale. `widened` has room for n partial results. `ranks` is as for ReduceMany.
void SumPartials(const ReduceSpec& spec, std::byte* partials, const std::vector<const void*>& from,
                 size_t n, std::byte* widened, const int* ranks = nullptr);

// Whether hosts send whole slices to every other host, so that no results are returned.
bool ExchangesWholeSlices(const Layout& layout, int hosts, size_t latency_bytes);

class SliceExchange {
 public:
  struct Plan {
    std::vector<int> ranks;          // of `wire`: one per host, in the order of the hosts
    int host = 0;                    // of this rank
    const Layout* layout = nullptr;  // of the buffer that the slices are parts of; borrowed
    int divisor = 1;                 // ranks of the set, of all hosts
    bool whole = false;              // send whole slices, and return nothing
    uint64_t slices = 0;             // number of slices
    size_t max_bytes = 0;            // size of the largest slice
    uint64_t depth = 2;              // maximum number of slices in flight, at least 2
  };

  SliceExchange(Transport& wire, Plan plan, TimeNs deadline);
  // The destructor waits for all transfers under way.
  SliceExchange(const SliceExchange&) = delete;

  // Call it first. Returns kInternal if memory is short.
  Status Reserve(Scratch& scratch);
  bool CanBegin() const {
    return begun_ < plan_.slices && begun_ <= returned_ + max_ahead_ &&
           begun_ < completed_ + plan_.depth;
  }
  // REQUIRES: CanBegin(). The place for the host's sum of the next slice, as partial results.
  std::byte* Partial() { return partials_ + begun_ % plan_.depth * partial_room_; }
  // Starts the next slice, whose sum is in Partial(). `result` is written until it is complete.
  void Begin(const Span& span, std::byte* result);
  Status Step(bool* moved);  // Makes progress without blocking. Sets *moved if anything moved.
  // The number of complete slices; they complete in order.
  uint64_t completed() const { return completed_; }
  bool idle() const { return begun_ == completed_; }
  int Lagging() const;  // A rank that this one waits for; -1: none.

 private:
  struct Slice {
    Slice(Transport& wire, TimeNs deadline)
        : there(wire, deadline), back(wire, deadline), sends(wire, deadline) {}

    Span span;
    std::byte* partial;
    std::byte* arrived;  // of the other hosts, in their order
    std::byte* result;
    Inflight there, back, sends;
  };

  int hosts() const { return static_cast<int>(plan_.ranks.size()); }
  const Layout& layout() const { return *plan_.layout; }
  // The part of a slice that a host sums, and its place in the slice's partial results.
  Span PartOf(const Slice& slice, int host) const {
    return plan_.whole ? slice.span : layout().Part(slice.span, hosts(), host);
  }
  size_t PartialAt(const Slice& slice, const Span& part) const {
    return layout().PartialBytes({slice.span.begin, part.begin - slice.span.begin});
  }
  void Combine(Slice& slice);
  void SendBack(Slice& slice);
  void Send(Slice& slice, int host, const std::byte* data, size_t bytes);

  Transport& wire_;
  const Plan plan_;
  const TimeNs deadline_;
  const uint64_t max_ahead_ = plan_.depth / 2;
  // Bytes of the longest slice.
  const size_t partial_room_ = RoundUp(plan_.max_bytes * layout().widening(), kCacheLine);
  const size_t arrival_room_;  // bytes that one host sends
  std::byte* partials_ = nullptr;
  std::byte* arrivals_ = nullptr;
  std::deque<Slice> under_way_;  // slices completed_ .. begun_
  uint64_t begun_ = 0;
  uint64_t returned_ = 0;  // combined, and being returned
  uint64_t completed_ = 0;
};

}  // namespace hororing
