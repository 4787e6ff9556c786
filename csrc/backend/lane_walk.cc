#include "backend/lane_walk.h"

#include <utility>

#include "backend/common.h"
#include "base/copy.h"

namespace hororing {

LanePlan::LanePlan(std::vector<Lane> all, const HostGroup& group, size_t capacity, size_t most)
    : lanes(std::move(all)), carries(static_cast<size_t>(group.local_size()), false) {
  std::vector<size_t> carried(carries.size(), 0);
  size_t longest = 0;
  for (const Lane& lane : lanes) {
    const size_t carrier = static_cast<size_t>(lane.carrier);
    place.push_back(carried[carrier]++);
    carries[carrier] = carries[carrier] || lane.bytes > 0;
    longest = std::max(longest, lane.bytes);
  }
  const size_t wanted = RoundUp(PieceBytes(longest, group.hosts()), kEntryAlign);
  piece = std::min({RoundUp(longest, kEntryAlign), wanted,
                    capacity / std::max<size_t>(most, 1) / kEntryAlign * kEntryAlign});
  blocks = longest == 0 ? 0 : (longest + piece - 1) / piece;
}

LaneWalk::LaneWalk(const HostGroup& group, ShmTransport& local, Transport& wire, const Batch& batch,
                   const LanePlan& plan, uint64_t first, TimeNs deadline, TraceSink& trace)
    : HostWalk(group, local, wire, batch,
               std::any_of(plan.lanes.begin(), plan.lanes.end(),
                           [](const Lane& lane) { return lane.from >= 0 || !lane.to.empty(); }),
               first, plan.blocks, deadline, trace),
      plan_(plan),
      receives_(wire, deadline),
      sends_(wire, deadline),
      begun_(first),
      arrived_(first),
      consumed_(first) {}

bool LaneWalk::Finished() const { return consumed_ == end_ && sends_.empty(); }

Status LaneWalk::Advance(bool* moved) {
  HORORING_RETURN_IF_ERROR(TakeArrivals(moved));
  HORORING_RETURN_IF_ERROR(sends_.TakeDone(moved));
  // First what goes over the wire.
  if (CanBegin()) {
    Begin();
  } else if (CanUnpack()) {
    Unpack();
  } else {
    return Status::Ok();
  }
  *moved = true;
  return Status::Ok();
}

Status LaneWalk::TakeArrivals(bool* moved) {
  for (bool taken = true; taken;) {
    WireQueue::Transfer arrived;
    HORORING_RETURN_IF_ERROR(receives_.TakeOldest(&arrived, &taken));
    if (!taken) break;
    *moved = true;
    SendOn(arrived.lane, arrived.block);
  }
  const uint64_t all_here = receives_.FirstOpen(begun_);
  if (arrived_ == all_here) return Status::Ok();
  *moved = true;
  arrived_ = all_here;
  Publish(&DirectProgress::packed, arrived_);
  return Status::Ok();
}

bool LaneWalk::CanBegin() const {
  return begun_ < end_ && begun_ < consumed_ + kDepth && begun_ < sends_.FirstOpen(end_) + kDepth &&
         RoomIsFree(begun_);
}

bool LaneWalk::CanUnpack() const {
  if (consumed_ == arrived_) return false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !plan_.carries[static_cast<size_t>(peer)]) continue;
    if (!Reached(peer, &DirectProgress::packed, consumed_ + 1)) return false;
  }
  return true;
}

size_t LaneWalk::PieceOf(const Lane& lane, uint64_t number) const {
  const size_t begin = static_cast<size_t>(number - first_) * plan_.piece;
  return begin < lane.bytes ? std::min(plan_.piece, lane.bytes - begin) : 0;
}

std::byte* LaneWalk::Place(size_t lane, uint64_t number) const {
  return Room(plan_.lanes[lane].carrier, number) + plan_.place[lane] * plan_.piece;
}

void LaneWalk::SendOn(size_t lane, uint64_t number) {
  const size_t bytes = PieceOf(plan_.lanes[lane], number);
  if (bytes == 0) return;
  for (const int to : plan_.lanes[lane].to) {
    sends_.Add({wire_.Send(to, Place(lane, number), bytes), to, number, lane});
  }
}

// copy(in the piece, in this rank's output, bytes) for what the block holds of the lane.
template <typename Copy>
size_t LaneWalk::ForEachStretch(const Lane& lane, uint64_t number, Copy copy) const {
  const size_t begin = static_cast<size_t>(number - first_) * plan_.piece;
  const size_t end = begin + PieceOf(lane, number);
  if (begin >= end) return 0;
  auto next = std::upper_bound(
      lane.stretches.begin(), lane.stretches.end(), begin,
      [](size_t offset, const Lane::Stretch& each) { return offset < each.begin; });
  for (--next; next != lane.stretches.end() && next->begin < end; ++next) {
    const size_t from = std::max(begin, next->begin);
    const size_t to = std::min(end, next->begin + next->bytes);
    copy(from - begin, next->at + (from - next->begin), to - from);
  }
  return end - begin;
}

void LaneWalk::Begin() {
  StageSpan span(trace_, Stage::kPack, batch_);
  size_t packed = 0;
  const uint64_t number = begun_++;
  for (size_t i = 0; i < plan_.lanes.size(); ++i) {
    const Lane& lane = plan_.lanes[i];
    const size_t bytes = PieceOf(lane, number);
    if (lane.from < 0 || bytes == 0) continue;
    receives_.Add({wire_.Receive(lane.from, Place(i, number), bytes), lane.from, number, i});
  }
  for (size_t i = 0; i < plan_.lanes.size(); ++i) {
    if (!plan_.lanes[i].begins) continue;
    std::byte* const room = Place(i, number);
    packed += ForEachStretch(plan_.lanes[i], number,
                             [&](size_t in_piece, const std::byte* at, size_t bytes) {
                               local_.to_slot().Copy(room + in_piece, at, bytes);
                             });
    local_.to_slot().Settle();
    SendOn(i, number);
  }
  span.End(packed);
}

void LaneWalk::Unpack() {
  StageSpan span(trace_, Stage::kUnpack, batch_);
  size_t unpacked = 0;
  for (size_t i = 0; i < plan_.lanes.size(); ++i) {
    if (plan_.lanes[i].begins) continue;
    const std::byte* const room = Place(i, consumed_);
    unpacked += ForEachStretch(plan_.lanes[i], consumed_,
                               [&](size_t in_piece, std::byte* at, size_t bytes) {
                                 CopyBytes(at, room + in_piece, bytes);
                               });
  }
  Publish(&DirectProgress::consumed, ++consumed_);
  span.End(unpacked);
}

int LaneWalk::LaggingOnWire() const {
  if (!receives_.empty()) return receives_.oldest().rank;
  return sends_.empty() ? -1 : sends_.oldest().rank;
}

bool LaneWalk::Lags(int peer) const {
  if (!RoomIsFree(begun_) && !Reached(peer, &DirectProgress::consumed, begun_ + 1 - kDepth)) {
    return true;
  }
  return plan_.carries[static_cast<size_t>(peer)] &&
         !Reached(peer, &DirectProgress::packed, consumed_ + 1);
}

}  // namespace hororing
