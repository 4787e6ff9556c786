// A block of three ranks of one host; each row is a slot (a, b, c: the inputs of ranks 0, 1, 2):
//
//             slice 0   slice 1   slice 2
//   slot 0   [       | PACK a1 | PACK a2 ]      after PACK: slot r has the slices of the others
//   slot 1   [ b0    |         |      b2 ]
//   slot 2   [ c0    |      c1 |         ]
//
//   slot 0   [ sum 0 |    a1   |    a2   ]      after REDUCE: rank r has written the sum of slice r
//   slot 1   [ b0    |  sum 1  |    b2   ]      to its slot; it has read its own input from the
//   slot 2   [ c0    |    c1   |  sum 2  ]      tensor
//
// UNPACK copies the sums of the others' slices to the tensor. Over several hosts, the exchange
// writes the sums into the slot, so an owner unpacks its own slice, too. REDUCE runs first because
// peers wait for it; UNPACK precedes PACK because its data is in the cache.
//
// Per rank and block of S bytes: PACK and UNPACK move (N-1)/N * S, REDUCE reads S, writes 2 S / N.
//
// In place (output == input) is safe: REDUCE writes a slice that it has read, and UNPACK writes
// after PACK has copied the block's other slices. That holds for one tensor: callers must not pass
// memory to a batch twice (capi/requests.cc, TensorTable::Claim).
#include "backend/allreduce_pipeline.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/common.h"
#include "collective/slice_exchange.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace hororing {
namespace {

class AllreducePipeline final : public HostPipeline {
 public:
  // `exchange`: null on one host, or if this rank owns no slices.
  AllreducePipeline(SetSlots& set, const Batch& batch, const AllreducePlan& plan,
                    SliceExchange* exchange, TimeNs deadline, TraceSink& trace)
      : HostPipeline(set, batch, exchange != nullptr, plan.blocks, deadline, trace),
        plan_(plan),
        exchange_(exchange),
        sources_(static_cast<size_t>(size_)),
        widened_(exchange != nullptr ? kReducePiece * plan.layout.widening() : 0) {}

 private:
  bool Finished() const override {
    return consumed_ == end_ && (exchange_ == nullptr || exchange_->idle());
  }

  bool Advance(Status* status) override {
    bool moved = false;
    if (exchange_ != nullptr) {
      *status = exchange_->Step(&moved);
      if (!status->ok()) return true;
      while (reduced_ < first_ + exchange_->completed()) {
        Publish(&SlotProgress::reduced, ++reduced_);
      }
    }
    if (owns_ && summed_ < packed_ && (exchange_ == nullptr || exchange_->CanBegin()) &&
        PeersReached(&SlotProgress::packed, summed_ + 1)) {
      Reduce();
    } else if (consumed_ < (owns_ ? reduced_ : packed_) &&
               PeersReached([this](int peer) { return peer < plan_.owners; },
                            &SlotProgress::reduced, consumed_ + 1)) {
      Unpack();
    } else if (packed_ < end_ && packed_ < consumed_ + depth_ && BlockIsFree(packed_)) {
      // Also depends on this rank itself: its slot receives the sums of the previous block, too.
      Pack();
    } else {
      return moved;
    }
    return true;
  }

  int LaggingOnWire() const override { return exchange_ != nullptr ? exchange_->Lagging() : -1; }
  // Whether the oldest unfinished block waits for `peer`.
  bool Lags(int peer) const override {
    if (consumed_ == packed_) return !BlockIsFree(peer, packed_);
    if (!PeersReached(&SlotProgress::packed, consumed_ + 1)) {
      return !Reached(peer, &SlotProgress::packed, consumed_ + 1);
    }
    return peer < plan_.owners && !Reached(peer, &SlotProgress::reduced, consumed_ + 1);
  }

  void Pack() {
    StageSpan span(trace_, Stage::kPack, batch_);
    const Range block = PieceOf(plan_.total, plan_.block_bytes, packed_);
    std::byte* const block_at = BlockAt(rank_, packed_);
    const Range own = owns_ ? plan_.SliceOf(block, rank_) : Range{block.begin, block.begin};
    for (const Range& part : {Range{block.begin, own.begin}, Range{own.end, block.end}}) {
      ForEachOverlap(plan_.places, part, [&](const Place& place, size_t at, size_t bytes) {
        local_.to_slot().Copy(block_at + (at - block.begin), place.input + (at - place.begin),
                              bytes);
      });
    }
    span.End(block.size());
    Publish(&SlotProgress::packed, ++packed_);
  }

  void Reduce() {
    StageSpan span(trace_, Stage::kReduce, batch_);
    const Range block = PieceOf(plan_.total, plan_.block_bytes, summed_);
    const Range own = plan_.SliceOf(block, rank_);
    if (exchange_ != nullptr) {
      SumForExchange(block, own);
      ++summed_;
    } else {  // into this rank's output and, unless every rank reduces everything, into its slot
      std::byte* const block_at = BlockAt(rank_, summed_);
      bool finite = true;
      ForEachSum(block, own, [&](const Place& place, size_t at, size_t bytes) {
        std::byte* const result = place.output + (at - place.begin);
        const size_t elements = bytes / ElementSize(place.reduce.dtype);
        if (batch_.findings != nullptr && IsFloatSum(place.reduce)) {
          finite &= SumAndLook(place, result, elements);
        } else {
          ReduceMany(place.reduce, size_, result, sources_.data(), size_, elements);
        }
        local_.to_slot().Copy(block_at + (at - block.begin), result, bytes);
      });
      if (batch_.findings != nullptr) {
        NoteFinite(summed_, finite);
        batch_.findings->any |= !finite;
      }
      reduced_ = ++summed_;
      Publish(&SlotProgress::reduced, reduced_);
    }
    span.End(one_host_ ? block.size() : own.size());
  }

  // Returns whether the sums are finite. Until that is known they are in `sums_`, in the
  // first-level cache: the result may overwrite this rank's input.
  [[gnu::noinline]] bool SumAndLook(const Place& place, void* result, size_t elements) {
    const DataType dtype = place.reduce.dtype;
    sums_.resize(kReducePiece);
    ReduceMany(place.reduce, size_, sums_.data(), sources_.data(), size_, elements);
    const bool finite = AllFinite(dtype, sums_.data(), elements);
    for (int source = 0; !finite && source < size_; ++source) {
      const NonFinite found =
          CountNonFinite(dtype, sources_[static_cast<size_t>(source)], elements);
      if (found) batch_.findings->inputs.push_back({place.output, source, found});
    }
    CopyBytes(result, sums_.data(), elements * ElementSize(dtype));
    return finite;
  }

  // Calls visit(place, at, bytes), with `sources_` set, for pieces of tensors in `range`: as small
  // as the first-level cache, so that the result is still in the cache for its next use.
  template <typename Visit>
  void ForEachSum(const Range& block, const Range& range, Visit visit) {
    ForEachOverlap(plan_.places, range, [&](const Place& place, size_t at, size_t bytes) {
      for (size_t end = at + bytes; at < end; at += kReducePiece) {
        for (int source = 0; source < size_; ++source) {
          sources_[static_cast<size_t>(source)] =
              source == rank_ ? place.input + (at - place.begin)
                              : BlockAt(source, summed_) + (at - block.begin);
        }
        visit(place, at, std::min(kReducePiece, end - at));
      }
    });
  }

  // Not inline: this keeps the code for one host short, which saves a few percent of a 4-byte sum.
  [[gnu::noinline]] void SumForExchange(const Range& block, const Range& own) {
    std::byte* sums = exchange_->Partial();
    size_t filled = own.begin;  // gaps between tensors are padding, which is sent, too
    const auto pad = [&](size_t end) {
      const size_t partial = plan_.layout.PartialBytes(Span{filled, end - filled});
      std::memset(sums, 0, partial);
      sums += partial;
    };
    ForEachSum(block, own, [&](const Place& place, size_t at, size_t bytes) {
      const size_t elements = bytes / ElementSize(place.reduce.dtype);
      pad(at);
      filled = at + bytes;
      SumPartials(place.reduce, sums, sources_, elements, widened_.data(),
                  group_.group_ranks_on[static_cast<size_t>(group_.host)].data());
      sums += elements * PartialSize(place.reduce);
    });
    pad(own.end);
    exchange_->Begin({own.begin, own.size()}, BlockAt(rank_, summed_) + (own.begin - block.begin));
  }

  void Unpack() {
    StageSpan span(trace_, Stage::kUnpack, batch_);
    const Range block = PieceOf(plan_.total, plan_.block_bytes, consumed_);
    for (int step = one_host_ ? 1 : 0; step < plan_.owners; ++step) {
      const int owner = (rank_ + step) % plan_.owners;
      const std::byte* const from = BlockAt(owner, consumed_);
      ForEachOverlap(plan_.places, plan_.SliceOf(block, owner),
                     [&](const Place& place, size_t at, size_t bytes) {
                       CopyBytes(place.output + (at - place.begin), from + (at - block.begin),
                                 bytes);
                     });
      if (batch_.findings != nullptr) batch_.findings->any |= !IsFinite(owner, consumed_);
    }
    span.End(block.size());
    Publish(&SlotProgress::consumed, ++consumed_);
  }

  const AllreducePlan& plan_;
  SliceExchange* const exchange_;
  const bool one_host_ = group_.hosts() == 1, owns_ = rank_ < plan_.owners;
  // The next block of each stage: consumed_ <= reduced_ <= summed_ <= packed_ for an owner.
  uint64_t packed_ = first_, summed_ = first_, reduced_ = first_, consumed_ = first_;
  std::vector<const void*> sources_;
  std::vector<std::byte> widened_, sums_;
};

}  // namespace

AllreducePlan::AllreducePlan(const Batch& batch, const SetSlots& set, size_t latency_bytes)
    : owners(set.group.least_local_size()) {
  places.reserve(batch.entries.size());
  for (const BatchEntry& entry : batch.entries) {
    const size_t bytes = entry.bytes();
    if (bytes == 0) continue;
    places.push_back({static_cast<const std::byte*>(entry.input),
                      static_cast<std::byte*>(entry.output), entry.reduce, total, bytes});
    total += RoundUp(bytes, kCacheLine);
  }
  if (total == 0) return;
  const int hosts = set.group.hosts();
  const size_t capacity = set.geometry.capacity;
  size_t wanted = SlotGeometry::kMaxLocalBlock;
  if (hosts > 1) {
    // Between hosts, a block is so large that two owners exchange kHostMessage. Then the wire waits
    // briefly for the first block to be packed, and the ranks for the last one. Few blocks are open
    // at a time, so all owners of a host keep the same pace. TCP shares a wire unevenly; otherwise
    // the last owner would have the wire to itself and could not fill it.
    for (const Place& place : places) layout.Add(place.reduce, RoundUp(place.size, kCacheLine));
    whole = ExchangesWholeSlices(layout, hosts, latency_bytes);
    const size_t messages = static_cast<size_t>(owners) * static_cast<size_t>(whole ? 1 : hosts);
    wanted = messages * kHostMessage * total / layout.partial_bytes();
  }
  block_bytes = std::min({total, RoundUp(wanted, kCacheLine), capacity});
  blocks = (total + block_bytes - 1) / block_bytes;
}

Status RunAllreduce(SetSlots& set, const Batch& batch, const AllreducePlan& plan, Scratch& scratch,
                    TimeNs deadline, TraceSink& trace) {
  const HostGroup& group = set.group;
  if (group.hosts() == 1 || group.local >= plan.owners) {
    return AllreducePipeline(set, batch, plan, nullptr, deadline, trace).Run();
  }
  SliceExchange::Plan between;
  for (int host = 0; host < group.hosts(); ++host) {
    between.ranks.push_back(group.JobRank(host, group.local));
  }
  between.host = group.host;
  between.layout = &plan.layout;
  between.divisor = group.size();
  between.slices = plan.blocks;
  between.max_bytes = plan.LargestSlice();
  between.whole = plan.whole;
  between.depth = set.geometry.depth;
  SliceExchange exchange(set.wire, std::move(between), deadline);
  HORORING_RETURN_IF_ERROR(exchange.Reserve(scratch));
  return AllreducePipeline(set, batch, plan, &exchange, deadline, trace).Run();
}

}  // namespace hororing
