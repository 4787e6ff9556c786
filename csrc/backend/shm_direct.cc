// A block of three ranks, each slot being one row (a, b, c: the inputs of ranks 0, 1, 2):
//
//             slice 0   slice 1   slice 2
//   slot 0   [       | PACK a1 | PACK a2 ]      after PACK: what the others need of rank r
//   slot 1   [ b0    |         |      b2 ]
//   slot 2   [ c0    |      c1 |         ]
//
//   slot 0   [ sum 0 |    a1   |    a2   ]      after REDUCE: rank r has put the sum of slice r
//   slot 1   [ b0    |  sum 1  |    b2   ]      where nobody needed its input; its own input
//   slot 2   [ c0    |    c1   |  sum 2  ]      it has read from the tensor itself
//
// UNPACK copies the sums of the others' slices to the tensor; that of the own slice was written
// there directly. Per rank and block of S bytes: (N-1)/N * S are written and read by PACK,
// S are read and 2 S / N written by REDUCE, (N-1)/N * S are read and written by UNPACK.
//
// A rank does whichever stage can go on, and waits only when none can, so a rank that is late
// (or has lost its core) delays the others only when they have run out of blocks. REDUCE goes
// first because peers wait for it; UNPACK before PACK, because what it touches is in the cache.
//
// In place (output == input) is safe: the output of a block is written by REDUCE, which has
// read that very slice, and by UNPACK, when PACK of the block has copied those slices away.
#include "backend/shm_direct.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "backend/common.h"

namespace hororing {
namespace {

// Measured with benchmarks/shm_direct.cc on 2 and 4 ranks: 128 KiB costs 10 to 30 % at 64 MiB
// (more waits), 1 MiB up to 50 % where the second-level cache has 1 MiB. Cutting smaller batches
// into more blocks than needed, for the stages to overlap, gains nothing.
constexpr size_t kMaxBlock = 512 << 10;
// Up to here every rank reduces everything itself: one wait for the peers instead of two.
constexpr size_t kSmallBatch = 32 << 10;
// Reduced at a time: the result is still in the first-level cache when it is copied to the slot.
constexpr size_t kReducePiece = 16 << 10;

// One tensor's place in the virtual buffer.
struct Place {
  const std::byte* input;
  std::byte* output;
  size_t begin;
  size_t bytes;
};

struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};

// The number of the first block in a set's life. Above it there is room for 2^40 more.
uint64_t FirstBlock(const Members& members) { return members.generation << 40; }

// What all ranks compute alike from the batch and the segment.
struct Plan {
  std::vector<Place> places;
  size_t total = 0;     // bytes of the virtual buffer
  size_t capacity = 0;  // bytes of one block's room in a slot
  size_t depth = 0;     // such rooms in a slot
  size_t block_bytes = 0;
  uint64_t blocks = 0;
  bool small = false;

  Plan(const Batch& batch, size_t slot_bytes) {
    const size_t element = ElementSize(batch.reduce.dtype);
    places.reserve(batch.entries.size());
    for (const BatchEntry& entry : batch.entries) {
      const size_t bytes = entry.elements * element;
      if (bytes == 0) continue;
      places.push_back({static_cast<const std::byte*>(entry.input),
                        static_cast<std::byte*>(entry.output), total, bytes});
      total += RoundUp(bytes, kEntryAlign);
    }
    capacity = std::min(kMaxBlock, slot_bytes / 2) / kEntryAlign * kEntryAlign;
    depth = slot_bytes / capacity;
    small = total <= std::min(kSmallBatch, capacity);
    block_bytes = std::min(total, capacity);
    blocks = total == 0 ? 0 : (total + block_bytes - 1) / block_bytes;
  }
};

// One batch on its way through the slots. `first` is the number of its first block.
class Walk {
 public:
  Walk(ShmTransport& transport, const Members& members, int place, const Batch& batch,
       const Plan& plan, uint64_t first, TimeNs deadline, TraceSink& trace)
      : transport_(transport),
        segment_(transport.segment()),
        members_(members),
        batch_(batch),
        plan_(plan),
        trace_(trace),
        rank_(place),
        size_(static_cast<int>(members.ranks.size())),
        deadline_(deadline),
        end_(first + plan.blocks),
        first_(first),
        packed_(first),
        reduced_(first),
        consumed_(first),
        sources_(static_cast<size_t>(size_)) {}

  Status Run() {
    while (consumed_ < end_) {
      if (CanReduce()) {
        Reduce();
      } else if (CanUnpack()) {
        Unpack();
      } else if (CanPack()) {
        Pack();
      } else {
        HORORING_RETURN_IF_ERROR(
            transport_.WaitUntil([this] { return CanReduce() || CanUnpack() || CanPack(); },
                                 [this] { return Lagging(); }, deadline_));
      }
    }
    return Status::Ok();
  }

 private:
  using Counter = std::atomic<uint64_t> DirectProgress::*;

  DirectProgress& Progress(int member) const {
    return segment_.rank_state(JobRank(member)).direct[members_.set];
  }
  int JobRank(int member) const { return members_.ranks[static_cast<size_t>(member)]; }

  // True when `counter` of every peer has reached `value`.
  bool PeersReached(Counter counter, uint64_t value) const {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      if ((Progress(peer).*counter).load(std::memory_order_acquire) < value) return false;
    }
    return true;
  }
  void Publish(Counter counter, uint64_t value) {
    (Progress(rank_).*counter).store(value, std::memory_order_release);
  }

  bool CanPack() const {
    return packed_ < end_ && (packed_ < FirstBlock(members_) + plan_.depth ||
                              PeersReached(&DirectProgress::consumed, packed_ + 1 - plan_.depth));
  }
  bool CanReduce() const {
    return reduced_ < packed_ && PeersReached(&DirectProgress::packed, reduced_ + 1);
  }
  bool CanUnpack() const {
    return consumed_ < reduced_ && PeersReached(&DirectProgress::reduced, consumed_ + 1);
  }

  // The peers that the oldest unfinished block waits for, as text.
  std::string Lagging() const {
    const Counter counter = consumed_ < reduced_ ? &DirectProgress::reduced
                            : reduced_ < packed_ ? &DirectProgress::packed
                                                 : &DirectProgress::consumed;
    const uint64_t value = consumed_ < reduced_ ? consumed_ + 1
                           : reduced_ < packed_ ? reduced_ + 1
                                                : packed_ + 1 - plan_.depth;
    std::string ranks;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_ || (Progress(peer).*counter).load() >= value) continue;
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(JobRank(peer));
    }
    return ranks;
  }

  void Pack() {
    StageSpan span(trace_, Stage::kPack, batch_);
    const Range block = Block(packed_);
    if (plan_.small) {
      CopyIn(block);
    } else {
      const Range own = Slice(block, rank_);
      CopyIn({block.begin, own.begin});
      CopyIn({own.end, block.end});
    }
    Publish(&DirectProgress::packed, ++packed_);
    transport_.RingWorkers(members_.ranks);
    span.End(block.bytes());
  }

  void Reduce() {
    StageSpan span(trace_, Stage::kReduce, batch_);
    const Range block = Block(reduced_);
    if (plan_.small) {
      Combine(block, reduced_, /*publish_result=*/false);
      // Nothing is left to unpack.
      Publish(&DirectProgress::reduced, ++reduced_);
      Publish(&DirectProgress::consumed, ++consumed_);
    } else {
      Combine(Slice(block, rank_), reduced_, /*publish_result=*/true);
      Publish(&DirectProgress::reduced, ++reduced_);
    }
    transport_.RingWorkers(members_.ranks);
    span.End(block.bytes());
  }

  void Unpack() {
    StageSpan span(trace_, Stage::kUnpack, batch_);
    const Range block = Block(consumed_);
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      const Range slice = Slice(block, peer);
      const std::byte* from = Room(peer, consumed_);
      ForEachPiece(slice, [&](const Place& place, size_t at, size_t bytes) {
        std::memcpy(place.output + (at - place.begin), from + (at - block.begin), bytes);
      });
    }
    Publish(&DirectProgress::consumed, ++consumed_);
    transport_.RingWorkers(members_.ranks);
    span.End(block.bytes());
  }

  // This rank's input in `range`, which lies in the block to be packed, into its slot.
  void CopyIn(const Range& range) {
    std::byte* room = Room(rank_, packed_);
    const size_t block_begin = Block(packed_).begin;
    ForEachPiece(range, [&](const Place& place, size_t at, size_t bytes) {
      std::memcpy(room + (at - block_begin), place.input + (at - place.begin), bytes);
    });
  }

  // All ranks' inputs in `range` of block `number` into this rank's output, and its slot.
  void Combine(const Range& range, uint64_t number, bool publish_result) {
    const size_t block_begin = Block(number).begin;
    const size_t element = ElementSize(batch_.reduce.dtype);
    ForEachPiece(range, [&](const Place& place, size_t at, size_t bytes) {
      for (size_t done = 0; done < bytes; done += kReducePiece) {
        const size_t part = std::min(kReducePiece, bytes - done);
        const size_t in_place = at + done - place.begin;
        const size_t in_block = at + done - block_begin;
        for (int source = 0; source < size_; ++source) {
          sources_[static_cast<size_t>(source)] =
              source == rank_ ? place.input + in_place : Room(source, number) + in_block;
        }
        std::byte* result = place.output + in_place;
        ReduceMany(batch_.reduce, size_, result, sources_.data(), size_, part / element);
        if (publish_result) std::memcpy(Room(rank_, number) + in_block, result, part);
      }
    });
  }

  std::byte* Room(int rank, uint64_t number) const {
    return segment_.slot(JobRank(rank)) +
           static_cast<size_t>(number % plan_.depth) * plan_.capacity;
  }
  // Where block `number` lies in the virtual buffer.
  Range Block(uint64_t number) const {
    const size_t begin = static_cast<size_t>(number - first_) * plan_.block_bytes;
    return {begin, std::min(begin + plan_.block_bytes, plan_.total)};
  }
  // Rank r's part of a block: equal up to one cache line.
  Range Slice(const Range& block, int rank) const {
    const size_t lines = block.bytes() / kEntryAlign;  // blocks are whole lines: see Plan
    const size_t ranks = static_cast<size_t>(size_), r = static_cast<size_t>(rank);
    return {block.begin + lines * r / ranks * kEntryAlign,
            block.begin + lines * (r + 1) / ranks * kEntryAlign};
  }

  // Calls visit(place, at, bytes) for the parts of tensors that lie in `range`, in order; `at`
  // is an offset in the virtual buffer.
  template <typename Visit>
  void ForEachPiece(const Range& range, Visit visit) const {
    if (range.begin >= range.end) return;
    auto place =
        std::upper_bound(plan_.places.begin(), plan_.places.end(), range.begin,
                         [](size_t offset, const Place& each) { return offset < each.begin; });
    for (--place; place != plan_.places.end() && place->begin < range.end; ++place) {
      const size_t begin = std::max(range.begin, place->begin);
      const size_t end = std::min(range.end, place->begin + place->bytes);
      if (begin < end) visit(*place, begin, end - begin);
    }
  }

  ShmTransport& transport_;
  ShmSegment& segment_;
  const Members& members_;
  const Batch& batch_;
  const Plan& plan_;
  TraceSink& trace_;
  const int rank_;  // and the ranks below: places among the members
  const int size_;
  const TimeNs deadline_;
  const uint64_t end_;
  const uint64_t first_;
  // The next block of each stage: consumed_ <= reduced_ <= packed_.
  uint64_t packed_;
  uint64_t reduced_;
  uint64_t consumed_;
  std::vector<const void*> sources_;
};

int PlaceOf(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Until nobody reads this rank's slot any more. No rank waits here for ever: what the readers have
// to do, they can do without this one, which has done its part.
Status WaitForReaders(ShmTransport& transport, TimeNs deadline) {
  const ShmTransport::SlotReaders& readers = transport.slot_readers();
  const auto lagging = [&] {
    std::string ranks;
    for (const int rank : readers.ranks) {
      const RankState& state = transport.segment().rank_state(rank);
      const uint64_t consumed = state.direct[readers.set].consumed.load(std::memory_order_acquire);
      if (consumed < readers.end) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    return ranks;
  };
  return transport.WaitUntil([&] { return lagging().empty(); }, lagging, deadline);
}

}  // namespace

ShmDirectBackend::ShmDirectBackend(ShmTransport& transport, Members members)
    : transport_(transport),
      members_(std::move(members)),
      place_(PlaceOf(transport.rank(), members_.ranks)),
      next_block_(FirstBlock(members_)) {}

bool ShmDirectBackend::HasRoom(const ShmSegment::Geometry& geometry) {
  return geometry.slot_bytes >= 2 * kEntryAlign;
}

bool ShmDirectBackend::Supports(const Batch& batch) const {
  return batch.kind == Collective::kAllreduce && batch.reduce.op != ReduceOp::kAdasum;
}

Status ShmDirectBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  HORORING_RETURN_IF_ERROR(Check(batch.reduce));
  if (members_.ranks.size() == 1) {
    ReduceAlone(batch, trace);
    return Status::Ok();
  }
  HORORING_RETURN_IF_ERROR(broken_);
  const Plan plan(batch, transport_.segment().geometry().slot_bytes);
  const uint64_t first = next_block_;
  next_block_ += plan.blocks;
  ShmTransport::SlotReaders& readers = transport_.slot_readers();
  const bool others = readers.set != members_.set || readers.generation != members_.generation;
  if (others) broken_ = WaitForReaders(transport_, deadline);
  if (!broken_.ok() || plan.blocks == 0) return broken_;
  broken_ = Walk(transport_, members_, place_, batch, plan, first, deadline, trace).Run();
  readers = {members_.ranks, members_.set, members_.generation, next_block_};
  return broken_;
}

size_t ShmDirectBackend::scratch_bytes() const {
  return members_.set == 0 ? transport_.segment().geometry().slot_bytes : 0;
}

}  // namespace hororing
