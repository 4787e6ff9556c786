#include "backend/scatter_pipeline.h"

#include "backend/common.h"
#include "collective/slice_exchange.h"

namespace hororing {
using Extent = ScatterPlan::Part::Extent;

ScatterPlan::ScatterPlan(const SetSlots& set, const Batch& batch)
    : parts(static_cast<size_t>(set.group.size())), element(ElementSize(batch.reduce().dtype)) {
  const HostGroup& group = set.group;
  std::vector<size_t> summed(static_cast<size_t>(group.local_size()), 0);
  std::vector<size_t> done(batch.entries.size(), 0);  // elements of each tensor
  size_t longest = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    const size_t at = static_cast<size_t>(rank);
    Part& part = parts[at];
    part.own = rank == group.group_rank;
    part.owner = group.members.ranks[at];
    const bool here = group.host_of[at] == group.host;
    part.reducer = here ? group.local_of[at] : group.OwnerOn(group.host, group.local_of[at]);
    part.number = summed[static_cast<size_t>(part.reducer)]++;
    for (size_t i = 0; i < batch.entries.size(); ++i) {
      const BatchEntry& entry = batch.entries[i];
      const size_t size = entry.parts[at];
      if (size == 0) continue;
      part.extents.push_back({part.size, size,
                              static_cast<const std::byte*>(entry.input) + done[i] * element,
                              part.own ? static_cast<std::byte*>(entry.output) : nullptr});
      part.size += size;
      done[i] += size;
    }
    longest = std::max(longest, part.size);
  }
  summed_here = summed[static_cast<size_t>(group.local)];
  for (int host = 0; host < group.hosts(); ++host) {
    if (host == group.host) continue;
    senders.push_back(group.JobRank(host, group.OwnerOn(host, group.local)));
  }
  const size_t fits = set.geometry.capacity / parts.size() / kCacheLine * kCacheLine / element;
  const size_t partial = PartialSize(batch.reduce());  // bytes that are sent
  const size_t wanted = PieceBytes(longest * partial, group.hosts()) / partial;
  piece = std::min({longest, RoundUp(wanted, kCacheLine), fits});
  blocks = longest == 0 ? 0 : (longest + piece - 1) / piece;
}

ScatterPipeline::ScatterPipeline(SetSlots& set, const Batch& batch, const ScatterPlan& plan,
                                 std::byte* scratch, TimeNs deadline, TraceSink& trace)
    : HostPipeline(set, batch, set.group.hosts() > 1, plan.blocks, deadline, trace),
      plan_(plan),
      scratch_(scratch),
      receives_(wire_, deadline),
      sends_(wire_, deadline),
      sources_(static_cast<size_t>(size_)),
      widened_(kReducePiece / plan.element * partial_) {}

bool ScatterPipeline::Advance(Status* status) {
  bool moved = false;
  *status = receives_.TakeDone(&moved);
  if (status->ok()) *status = sends_.TakeDone(&moved);
  if (!status->ok()) return true;
  // First the sums that others wait for.
  if (summed_ < begun_ && PeersReached(&SlotProgress::packed, summed_ + 1)) {
    Sum();
  } else if (CanBegin()) {
    Begin();
  } else if (combined_ < summed_ && receives_.FirstOpen(end_) > combined_) {
    Combine();
  } else {
    return moved;
  }
  return true;
}

// False, too, while sums of the previous block at that place are needed or in transit.
std::byte* ScatterPipeline::SumsAt(size_t number, uint64_t block) const {
  const size_t pieces = plan_.summed_here + plan_.senders.size();
  return scratch_ + (static_cast<size_t>(block % depth_) * pieces + number) * sum_bytes_;
}

void ScatterPipeline::Begin() {
  StageSpan span(trace_, Stage::kPack, batch_);
  const uint64_t number = begun_++;
  size_t packed = 0;
  for (size_t rank = 0; rank < plan_.parts.size(); ++rank) {
    const ScatterPlan::Part& part = plan_.parts[rank];
    const Range piece = PieceOf(part, number);
    const size_t arriving = part.own ? piece.size() * partial_ : 0;
    for (size_t i = 0; i < plan_.senders.size() && arriving > 0; ++i) {
      const int from = plan_.senders[i];
      receives_.Add(wire_.Receive(from, ArrivalsAt(i, number), arriving), from, number);
    }
    if (part.reducer == rank_) continue;
    std::byte* const block_at = BlockAt(rank_, number) + rank * plan_.piece * plan_.element;
    ForEachOverlap(part.extents, piece, [&](const Extent& extent, size_t at, size_t elements) {
      local_.to_slot().Copy(block_at + (at - piece.begin) * plan_.element,
                            extent.input + (at - extent.begin) * plan_.element,
                            elements * plan_.element);
    });
    packed += piece.size() * plan_.element;
  }
  Publish(&SlotProgress::packed, begun_);
  span.End(packed);
}

void ScatterPipeline::Sum() {
  StageSpan span(trace_, Stage::kReduce, batch_);
  size_t summed = 0;
  for (const ScatterPlan::Part& part : plan_.parts) {
    const size_t elements = PieceOf(part, summed_).size();
    if (part.reducer != rank_ || elements == 0) continue;
    std::byte* const sums = SumsAt(part.number, summed_);
    SumPiece(part, sums);
    summed += elements * plan_.element;
    if (part.own || group_.host_of[static_cast<size_t>(&part - plan_.parts.data())] == group_.host)
      continue;
    sends_.Add(wire_.Send(part.owner, sums, elements * partial_), part.owner, summed_);
  }
  Publish(&SlotProgress::consumed, ++summed_);
  span.End(summed);
}

void ScatterPipeline::SumPiece(const ScatterPlan::Part& part, std::byte* sums) {
  const size_t rank = static_cast<size_t>(&part - plan_.parts.data());
  const size_t step = kReducePiece / plan_.element;
  const Range piece = PieceOf(part, summed_);
  ForEachOverlap(part.extents, piece, [&](const Extent& extent, size_t at, size_t elements) {
    for (size_t end = at + elements; at < end; at += step) {
      const size_t in_slot = rank * plan_.piece + (at - piece.begin);
      for (int source = 0; source < size_; ++source) {
        sources_[static_cast<size_t>(source)] =
            source == rank_ ? extent.input + (at - extent.begin) * plan_.element
                            : BlockAt(source, summed_) + in_slot * plan_.element;
      }
      SumPartials(batch_.reduce(), sums + (at - piece.begin) * partial_, sources_,
                  std::min(step, end - at), widened_.data());
    }
  });
}

void ScatterPipeline::Combine() {
  StageSpan span(trace_, Stage::kReduce, batch_);
  const ScatterPlan::Part& own = plan_.parts[static_cast<size_t>(group_.group_rank)];
  const Range piece = PieceOf(own, combined_);
  const size_t elements = piece.size();
  std::byte* const mine = SumsAt(own.number, combined_);
  const auto source = [&](int host) {
    if (host == group_.host) return mine;
    return ArrivalsAt(static_cast<size_t>(host < group_.host ? host : host - 1), combined_);
  };
  std::byte* const sum = source(0);
  for (int host = 1; host < group_.hosts() && elements > 0; ++host) {
    CombinePartials(batch_.reduce(), sum, sum, source(host), elements);
  }
  ForEachOverlap(own.extents, piece, [&](const Extent& extent, size_t at, size_t count) {
    FinishPartial(batch_.reduce(), group_.size(),
                  extent.output + (at - extent.begin) * plan_.element,
                  sum + (at - piece.begin) * partial_, count);
  });
  ++combined_;
  span.End(elements * plan_.element);
}

int ScatterPipeline::LaggingOnWire() const {
  if (!receives_.empty() && combined_ < summed_) return receives_.oldest().rank;
  return sends_.empty() ? -1 : sends_.oldest().rank;
}

}  // namespace hororing
