// A block on a host of three ranks, two of which own slices (a, b, c: their inputs):
//
//             slice 0   slice 1                       slice 0   slice 1
//   slot 0   [       |   a1    ]      exchanged      [ sum 0 |         ]     sums of all hosts
//   slot 1   [  b0   |         ]          ->         [       |  sum 1  ]
//   slot 2   [  c0   |   c1    ]                     [       |         ]
//
// An owner reads its own input from the tensor itself, and nobody reads its slice of its slot
// before the sum is there. In place (output == input) is safe: outputs of a block are written by
// UNPACK, when all ranks of the host have packed it, and its owners have read their own inputs.
//
// A rank does whichever stage can go on, those first for which others wait.
#include "backend/hierarchical.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "backend/common.h"
#include "backend/host_pipeline.h"
#include "backend/virtual_buffer.h"
#include "base/copy.h"
#include "collective/slice_exchange.h"

namespace hororing {
namespace {

// A block between hosts is so large that two owners exchange kHostMessage. Then the wire need not
// wait long for the first block to be packed, nor the ranks for the last one; and as few blocks are
// open at a time, all owners of a host keep one pace: TCP shares a wire unevenly, and whoever is
// last then has it for itself, and cannot fill it. On one host smaller blocks only cost more steps.
constexpr size_t kLocalBlock = 256 << 10;
// Reduced at a time: what is added next finds the sum in the first-level cache.
constexpr size_t kReducePiece = 16 << 10;
// What all ranks compute alike.
struct Plan : VirtualBuffer {
  Layout layout;
  size_t block_bytes = 0;
  uint64_t blocks = 0;
  int owners = 1;
  bool whole = true;  // each host sends all to all others

  // `capacity`: bytes of one block in a slot. `chunk_bytes`: of a block; 0: built in.
  Plan(const Batch& batch, size_t capacity, int slice_owners, int hosts, const WireCost& wire,
       size_t chunk_bytes)
      : VirtualBuffer(batch), owners(slice_owners) {
    for (const Place& place : places) layout.Add(place.reduce, RoundUp(place.bytes, kEntryAlign));
    const size_t partial = std::max<size_t>(layout.volume().partial, 1);
    whole = GoesWhole(layout.volume(), hosts, wire);
    const size_t messages = static_cast<size_t>(owners) * static_cast<size_t>(whole ? 1 : hosts);
    size_t wanted = hosts == 1 ? kLocalBlock : messages * kHostMessage * total / partial;
    if (chunk_bytes != 0) wanted = chunk_bytes;
    block_bytes = std::min({total, RoundUp(wanted, kEntryAlign), capacity});
    blocks = total == 0 ? 0 : (total + block_bytes - 1) / block_bytes;
  }

  Range Block(uint64_t index) const {
    const size_t begin = static_cast<size_t>(index) * block_bytes;
    return {begin, std::min(begin + block_bytes, total)};
  }
  Range SliceOf(const Range& block, int owner) const { return Slice(block, owner, owners); }
  size_t LargestSlice() const {
    return (block_bytes / kEntryAlign + static_cast<size_t>(owners) - 1) /
           static_cast<size_t>(owners) * kEntryAlign;
  }
};

class AllreducePipeline final : public HostPipeline {
 public:
  // `exchange`: null where this rank owns no slices.
  AllreducePipeline(const HostGroup& group, ShmTransport& local, Transport& wire,
                    const Batch& batch, const Plan& plan, SliceExchange* exchange, uint64_t first,
                    TimeNs deadline, TraceSink& trace)
      : HostPipeline(group, local, wire, batch, exchange != nullptr && group.hosts() > 1, first,
                     plan.blocks, deadline, trace),
        plan_(plan),
        exchange_(exchange),
        packed_(first),
        summed_(first),
        reduced_(first),
        consumed_(first),
        sources_(static_cast<size_t>(size_)),
        widened_(kReducePiece * plan.layout.widening()) {}

 private:
  bool Finished() const override {
    return consumed_ == end_ && (exchange_ == nullptr || exchange_->idle());
  }

  Status Advance(bool* moved) override {
    if (exchange_ != nullptr) {
      HORORING_RETURN_IF_ERROR(exchange_->Step(moved));
      while (reduced_ < first_ + exchange_->completed()) {
        Publish(&DirectProgress::reduced, ++reduced_);
      }
    }
    if (CanSum()) {
      Sum();
    } else if (CanUnpack()) {
      Unpack();
    } else if (CanPack()) {
      Pack();
    } else {
      return Status::Ok();
    }
    *moved = true;
    return Status::Ok();
  }

  int LaggingOnWire() const override { return exchange_ != nullptr ? exchange_->Lagging() : -1; }
  bool Lags(int peer) const override {
    const Counter counter = CanPack() ? &DirectProgress::consumed : &DirectProgress::packed;
    return !Reached(peer, counter, packed_) || (consumed_ < packed_ && peer < plan_.owners &&
                                                !Reached(peer, &DirectProgress::reduced, packed_));
  }

  // Also of this rank itself: sums of the block that lay there come into its slot, too.
  bool CanPack() const {
    return packed_ < end_ && packed_ < consumed_ + kDepth && BlockIsFree(packed_);
  }
  bool CanSum() const {
    return exchange_ != nullptr && summed_ < packed_ && exchange_->CanBegin() &&
           PeersReached(size_, &DirectProgress::packed, summed_ + 1);
  }
  bool CanUnpack() const {
    return consumed_ < (exchange_ != nullptr ? reduced_ : packed_) &&
           PeersReached(plan_.owners, &DirectProgress::reduced, consumed_ + 1);
  }

  void Pack() {
    StageSpan span(trace_, Stage::kPack, batch_);
    const Range block = plan_.Block(packed_ - first_);
    std::byte* block_at = BlockAt(rank_, packed_);
    const Range own = exchange_ != nullptr ? plan_.SliceOf(block, rank_) : Range{0, 0};
    for (const Range& part : {Range{block.begin, std::max(own.begin, block.begin)},
                              Range{std::max(own.end, block.begin), block.end}}) {
      plan_.ForEachPiece(part, [&](size_t i, size_t at, size_t bytes) {
        const Place& place = plan_.places[i];
        local_.to_slot().Copy(block_at + (at - block.begin), place.input + (at - place.begin),
                              bytes);
      });
    }
    Publish(&DirectProgress::packed, ++packed_);
    span.End(block.bytes());
  }

  void Sum() {
    StageSpan span(trace_, Stage::kReduce, batch_);
    const Range block = plan_.Block(summed_ - first_), own = plan_.SliceOf(block, rank_);
    std::byte* sums = exchange_->Partial();
    size_t filled = own.begin;  // what tensors leave out is padding, which travels too
    const auto pad = [&](size_t end) {
      const size_t partial = plan_.layout.PartialBytes(Span{filled, end - filled});
      std::memset(sums, 0, partial);
      sums += partial;
    };
    plan_.ForEachPiece(own, [&](size_t i, size_t at, size_t bytes) {
      const Place& place = plan_.places[i];
      const size_t element = ElementSize(place.reduce.dtype);
      pad(at);
      filled = at + bytes;
      for (size_t done = 0; done < bytes; done += kReducePiece) {
        const size_t part = std::min(kReducePiece, bytes - done);
        for (int source = 0; source < size_; ++source) {
          sources_[static_cast<size_t>(source)] =
              source == rank_ ? place.input + (at + done - place.begin)
                              : BlockAt(source, summed_) + (at + done - block.begin);
        }
        SumPartials(place.reduce, sums, sources_, part / element, widened_.data());
        sums += part / element * PartialSize(place.reduce);
      }
    });
    pad(own.end);
    exchange_->Begin({own.begin, own.bytes()}, BlockAt(rank_, summed_) + (own.begin - block.begin));
    ++summed_;
    span.End(own.bytes());
  }

  void Unpack() {
    StageSpan span(trace_, Stage::kUnpack, batch_);
    const Range block = plan_.Block(consumed_ - first_);
    for (int step = 0; step < plan_.owners; ++step) {
      const int owner = (rank_ + step) % plan_.owners;
      const std::byte* from = BlockAt(owner, consumed_);
      plan_.ForEachPiece(plan_.SliceOf(block, owner), [&](size_t i, size_t at, size_t bytes) {
        const Place& place = plan_.places[i];
        CopyBytes(place.output + (at - place.begin), from + (at - block.begin), bytes);
      });
    }
    Publish(&DirectProgress::consumed, ++consumed_);
    span.End(block.bytes());
  }

  const Plan& plan_;
  SliceExchange* const exchange_;
  // The next block of each stage: consumed_ <= reduced_ <= summed_ <= packed_ for an owner.
  uint64_t packed_;
  uint64_t summed_;
  uint64_t reduced_;
  uint64_t consumed_;
  std::vector<const void*> sources_;
  std::vector<std::byte> widened_;
};

HostShape Shared(HostShape shape) {
  shape.shared = true;
  return shape;
}

}  // namespace

HierarchicalBackend::HierarchicalBackend(Transport& wire, ShmTransport& local,
                                         const Topology& topology, const Members& members,
                                         const AllreduceOptions& options)
    : wire_(wire),
      local_(local),
      group_(topology, members),
      shape_(Shared(ShapeOf(group_.group_ranks_on))),
      options_(options),
      algorithm_(options.OnlyAlgorithm()),
      next_block_(FirstBlock(members)) {}

Algorithm HierarchicalBackend::Choose(const Batch& batch) const {
  if (shape_.hosts == 1) return Algorithm::kThreePhase;
  const Algorithm algorithm = options_.AlgorithmFor(batch.bytes());
  if (algorithm != Algorithm::kAuto) return algorithm;
  return Cheapest(VolumeOf(batch), shape_, options_.wire);
}

// Whether all batches over several hosts shall go by the flat algorithms.
bool HierarchicalBackend::Flat() const {
  return shape_.hosts > 1 &&
         (algorithm_ == Algorithm::kRing || algorithm_ == Algorithm::kRecursiveDoubling);
}

bool HierarchicalBackend::Supports(const Batch& batch) const {
  if (Flat()) return false;
  switch (batch.kind) {
    case Collective::kAllreduce: {
      if (batch.is_adasum() || options_.reproducible) return false;
      const Algorithm algorithm = Choose(batch);
      return algorithm == Algorithm::kThreePhase || algorithm == Algorithm::kLeader;
    }
    case Collective::kReducescatter:
      return !options_.reproducible && Fits(batch.kind) &&
             (algorithm_ != Algorithm::kAuto || shape_.hosts == 1 ||
              ScattersByHost(batch.reduce(), shape_));
    case Collective::kAllgather:
    case Collective::kBroadcast: return Fits(batch.kind);
    default: return false;
  }
}

Status HierarchicalBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  algorithm_used_ = AlgorithmUsed::kNotCounted;
  HORORING_RETURN_IF_ERROR(broken_);
  switch (batch.kind) {
    case Collective::kAllgather: broken_ = RunAllgather(batch, deadline, trace); break;
    case Collective::kBroadcast: broken_ = RunBroadcast(batch, deadline, trace); break;
    case Collective::kReducescatter: broken_ = RunReducescatter(batch, deadline, trace); break;
    default: broken_ = RunAllreduce(batch, deadline, trace);
  }
  return broken_;
}

uint64_t HierarchicalBackend::Take(uint64_t blocks) {
  const uint64_t first = next_block_;
  next_block_ += blocks;
  return first;
}

size_t HierarchicalBackend::capacity() const {
  return HostPipeline::Capacity(local_.segment().geometry().slot_bytes);
}

Status HierarchicalBackend::RunAllreduce(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  HORORING_RETURN_IF_ERROR(CheckSpecs(batch));
  const bool by_leader = Choose(batch) == Algorithm::kLeader;
  const Plan plan(batch, capacity(), by_leader ? 1 : shape_.least, shape_.hosts, options_.wire,
                  options_.chunk_bytes);
  if (plan.blocks == 0) return Status::Ok();
  algorithm_used_ = by_leader ? AlgorithmUsed::kLeader : AlgorithmUsed::kThreePhase;
  std::optional<SliceExchange> exchange;
  if (group_.local < plan.owners) {
    SliceExchange::Plan between;
    for (int host = 0; host < group_.hosts(); ++host) {
      between.ranks.push_back(group_.JobRank(host, group_.local));
    }
    between.host = group_.host;
    between.layout = &plan.layout;
    between.divisor = group_.size();
    between.slices = plan.blocks;
    between.most_bytes = plan.LargestSlice();
    between.whole = plan.whole;
    between.depth = HostPipeline::kDepth;
    exchange.emplace(wire_, std::move(between), deadline);
    HORORING_RETURN_IF_ERROR(exchange->Reserve(scratch_));
  }
  return AllreducePipeline(group_, local_, wire_, batch, plan, exchange ? &*exchange : nullptr,
                           Take(plan.blocks), deadline, trace)
      .Run();
}

size_t HierarchicalBackend::scratch_bytes() const {
  const size_t slot = group_.members.set == 0 ? local_.segment().geometry().slot_bytes : 0;
  return slot + scratch_.bytes();
}

}  // namespace hororing
