#include "backend/channel_pipeline.h"

#include <utility>

#include "backend/common.h"
#include "kernels/copy.h"

namespace hororing {
using Extent = Channel::Extent;

ChannelPlan::ChannelPlan(std::vector<Channel> all, const SetSlots& set, size_t most)
    : channels(std::move(all)), owns(static_cast<size_t>(set.group.local_size()), false) {
  std::vector<size_t> owned(owns.size(), 0);
  size_t longest = 0;
  for (const Channel& channel : channels) {
    const size_t owner = static_cast<size_t>(channel.owner);
    place.push_back(owned[owner]++);
    owns[owner] = owns[owner] || channel.bytes > 0;
    longest = std::max(longest, channel.bytes);
  }
  const size_t wanted = RoundUp(PieceBytes(longest, set.group.hosts()), kCacheLine);
  piece = std::min({RoundUp(longest, kCacheLine), wanted,
                    set.geometry.capacity / std::max<size_t>(most, 1) / kCacheLine * kCacheLine});
  blocks = longest == 0 ? 0 : (longest + piece - 1) / piece;
}

ChannelPipeline::ChannelPipeline(SetSlots& set, const Batch& batch, const ChannelPlan& plan,
                                 TimeNs deadline, TraceSink& trace)
    : HostPipeline(set, batch,
                   std::any_of(plan.channels.begin(), plan.channels.end(),
                               [](const Channel& channel) {
                                 return channel.from >= 0 || !channel.to.empty();
                               }),
                   plan.blocks, deadline, trace),
      plan_(plan),
      receives_(wire_, deadline),
      sends_(wire_, deadline) {}

bool ChannelPipeline::Advance(Status* status) {
  bool moved = false;
  *status = receives_.TakeDone(&moved);
  if (status->ok()) *status = sends_.TakeDone(&moved);
  if (!status->ok()) return true;
  const uint64_t all_here = receives_.FirstOpen(begun_);
  if (arrived_ != all_here) {
    moved = true;
    arrived_ = all_here;
    Publish(&SlotProgress::packed, arrived_);
  }
  // The data for the wire first.
  if (CanBegin()) {
    Begin();
  } else if (CanUnpack()) {
    Unpack();
  } else {
    return moved;
  }
  return true;
}

void ChannelPipeline::Begin() {
  StageSpan span(trace_, Stage::kPack, batch_);
  size_t packed = 0;
  const uint64_t number = begun_++;
  for (size_t i = 0; i < plan_.channels.size(); ++i) {
    const Channel& channel = plan_.channels[i];
    const size_t bytes = PieceOf(channel, number).size();
    if (channel.from < 0 || bytes == 0) continue;
    receives_.Add(wire_.Receive(channel.from, Place(i, number), bytes), channel.from, number);
  }
  for (size_t i = 0; i < plan_.channels.size(); ++i) {
    const Channel& channel = plan_.channels[i];
    if (!channel.begins) continue;
    const Range piece = PieceOf(channel, number);
    ForEachOverlap(channel.extents, piece,
                   [&, to = Place(i, number)](const Extent& extent, size_t at, size_t bytes) {
                     local_.to_slot().Copy(to + (at - piece.begin), extent.at + (at - extent.begin),
                                           bytes);
                   });
    packed += piece.size();
    local_.to_slot().Fence();
    for (const int to : channel.to) {
      if (piece.size() > 0) sends_.Add(wire_.Send(to, Place(i, number), piece.size()), to, number);
    }
  }
  span.End(packed);
}

void ChannelPipeline::Unpack() {
  StageSpan span(trace_, Stage::kUnpack, batch_);
  size_t unpacked = 0;
  for (size_t i = 0; i < plan_.channels.size(); ++i) {
    const Channel& channel = plan_.channels[i];
    if (channel.begins) continue;
    const Range piece = PieceOf(channel, consumed_);
    ForEachOverlap(channel.extents, piece,
                   [&, from = Place(i, consumed_)](const Extent& extent, size_t at, size_t bytes) {
                     CopyBytes(extent.at + (at - extent.begin), from + (at - piece.begin), bytes);
                   });
    unpacked += piece.size();
  }
  Publish(&SlotProgress::consumed, ++consumed_);
  span.End(unpacked);
}

int ChannelPipeline::LaggingOnWire() const {
  if (!receives_.empty()) return receives_.oldest().rank;
  return sends_.empty() ? -1 : sends_.oldest().rank;
}

}  // namespace hororing
