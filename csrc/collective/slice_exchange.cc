#include "collective/slice_exchange.h"

#include <utility>

namespace hororing {
void SumPartials(const ReduceSpec& spec, std::byte* partials, const std::vector<const void*>& from,
                 size_t n, std::byte* widened, const int* ranks) {
  ReduceSpec of = spec;
  if (!NeedsWideAccumulator(spec)) {
    if (of.op == ReduceOp::kAverage) of.op = ReduceOp::kSum;
    of.postscale = 1.0;
    ReduceMany(of, 1, partials, from.data(), static_cast<int>(from.size()), n, ranks);
    return;
  }
  for (size_t i = 0; i < from.size(); ++i) {
    if (spec.weights != nullptr) {
      of.prescale = (*spec.weights)[ranks != nullptr ? static_cast<size_t>(ranks[i]) : i];
    }
    StartPartial(of, i == 0 ? partials : widened, from[i], n);
    if (i > 0) CombinePartials(of, partials, partials, widened, n);
  }
}

bool ExchangesWholeSlices(const Layout& layout, int hosts, size_t latency_bytes) {
  const size_t others = static_cast<size_t>(hosts - 1), partial = layout.partial_bytes();
  const size_t there_and_back = others * (partial + layout.bytes()) / static_cast<size_t>(hosts);
  return others * partial <= there_and_back + latency_bytes;
}

SliceExchange::SliceExchange(Transport& wire, Plan plan, TimeNs deadline)
    : wire_(wire),
      plan_(std::move(plan)),
      deadline_(deadline),
      arrival_room_(plan_.whole ? partial_room_
                                : RoundUp(layout().Part({0, plan_.max_bytes}, hosts(), 0).size *
                                              layout().widening(),
                                          kCacheLine)) {}

Status SliceExchange::Reserve(Scratch& scratch) {
  const size_t bytes =
      plan_.depth * (partial_room_ + static_cast<size_t>(hosts() - 1) * arrival_room_);
  HORORING_RETURN_IF_ERROR(
      scratch.Reserve(bytes, "allreduce between hosts: no memory for partial sums", &partials_));
  arrivals_ = partials_ + plan_.depth * partial_room_;
  return Status::Ok();
}

void SliceExchange::Send(Slice& slice, int host, const std::byte* data, size_t bytes) {
  const int rank = plan_.ranks[static_cast<size_t>(host)];
  if (bytes > 0) slice.sends.Add(wire_.Send(rank, data, bytes), rank);
}

void SliceExchange::Begin(const Span& span, std::byte* result) {
  const size_t others = static_cast<size_t>(hosts() - 1);
  under_way_.emplace_back(wire_, deadline_);
  Slice& slice = under_way_.back();
  slice.span = span;
  slice.partial = Partial();
  slice.arrived = arrivals_ + begun_ % plan_.depth * others * arrival_room_;
  slice.result = result;
  ++begun_;
  const size_t arriving = layout().PartialBytes(PartOf(slice, plan_.host));
  // At each distance every host sends to another one.
  for (int i = 1; i < hosts() && arriving > 0; ++i) {
    const int from = (plan_.host + hosts() - i) % hosts();
    const size_t index = static_cast<size_t>(from < plan_.host ? from : from - 1);
    const int rank = plan_.ranks[static_cast<size_t>(from)];
    slice.there.Add(wire_.Receive(rank, slice.arrived + index * arrival_room_, arriving), rank);
  }
  for (int i = 1; i < hosts(); ++i) {
    const int to = (plan_.host + i) % hosts();
    const Span part = PartOf(slice, to);
    Send(slice, to, slice.partial + PartialAt(slice, part), layout().PartialBytes(part));
  }
}

// Combined in an arrival's memory, because this rank's own sums may still be in transit.
void SliceExchange::Combine(Slice& slice) {
  const Span own = PartOf(slice, plan_.host);
  if (own.size == 0) return;
  const auto source = [&](int host) {
    return host == plan_.host
               ? slice.partial + PartialAt(slice, own)
               : slice.arrived +
                     static_cast<size_t>(host < plan_.host ? host : host - 1) * arrival_room_;
  };
  std::byte* const sum = source(plan_.host == 0 ? 1 : 0);
  CombinePartials(layout(), own, sum, source(0), source(1));
  for (int host = 2; host < hosts(); ++host) CombinePartials(layout(), own, sum, sum, source(host));
  FinishPartial(layout(), own, plan_.divisor, slice.result + (own.begin - slice.span.begin), sum);
}

void SliceExchange::SendBack(Slice& slice) {
  if (plan_.whole) return;
  const Span own = PartOf(slice, plan_.host);
  for (int i = 1; i < hosts(); ++i) {
    const int from = (plan_.host + hosts() - i) % hosts();
    const Span part = PartOf(slice, from);
    const int rank = plan_.ranks[static_cast<size_t>(from)];
    if (part.size == 0) continue;
    slice.back.Add(wire_.Receive(rank, slice.result + (part.begin - slice.span.begin), part.size),
                   rank);
  }
  for (int i = 1; i < hosts(); ++i) {
    Send(slice, (plan_.host + i) % hosts(), slice.result + (own.begin - slice.span.begin),
         own.size);
  }
}

Status SliceExchange::Step(bool* moved) {
  while (returned_ < begun_ && (begun_ > returned_ + max_ahead_ || begun_ == plan_.slices)) {
    Slice& slice = under_way_[static_cast<size_t>(returned_ - completed_)];
    HORORING_RETURN_IF_ERROR(slice.there.TakeDone(moved));
    if (!slice.there.empty()) break;
    Combine(slice);
    SendBack(slice);
    ++returned_;
    *moved = true;
  }
  while (completed_ < returned_) {
    Slice& slice = under_way_.front();
    HORORING_RETURN_IF_ERROR(slice.back.TakeDone(moved));
    if (slice.back.empty()) HORORING_RETURN_IF_ERROR(slice.sends.TakeDone(moved));
    if (!slice.back.empty() || !slice.sends.empty()) break;
    under_way_.pop_front();
    ++completed_;
    *moved = true;
  }
  return Status::Ok();
}

int SliceExchange::Lagging() const {
  for (const Slice& slice : under_way_) {
    for (const auto* transfers : {&slice.there, &slice.back, &slice.sends}) {
      if (!transfers->empty()) return transfers->oldest().rank;
    }
  }
  return -1;
}

}  // namespace hororing
