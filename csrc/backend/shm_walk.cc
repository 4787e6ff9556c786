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
// A tensor in its rank's arena takes no part in PACK and UNPACK: REDUCE of slice r reads all of
// those tensors where they lie, and writes the sum back to each. Per rank and batch of S bytes
// that all have in arenas: S are read and S are written.
//
// A rank does whichever stage can go on, and waits only when none can, so a rank that is late
// (or has lost its core) delays the others only when they have run out of blocks. REDUCE goes
// first because peers wait for it; UNPACK before PACK, because what it touches is in the cache.
//
// In place (output == input) is safe: the output of a block is written by REDUCE, which has
// read that very slice, and by UNPACK, when PACK of the block has copied those slices away. In an
// arena: rank r alone reads slice r of anybody's tensor before it writes there.
#include "backend/shm_walk.h"

#include <algorithm>
#include <cstring>

#include "base/copy.h"
#include "base/reduce.h"

namespace hororing {
namespace {

// Reduced at a time: the result is still in the first-level cache when it is copied on.
constexpr size_t kReducePiece = 16 << 10;

}  // namespace

Walk::Walk(ShmTransport& transport, const Members& members, int place, const Batch& batch,
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

Status Walk::Run() {
  TellPlaces();
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

// True when `counter` of every peer has reached `value`.
bool Walk::PeersReached(Counter counter, uint64_t value) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if ((Progress(peer).*counter).load(std::memory_order_acquire) < value) return false;
  }
  return true;
}

void Walk::Publish(Counter counter, uint64_t value) {
  transport_.to_slot().Settle();
  transport_.to_arenas().Settle();
  (Progress(rank_).*counter).store(value, std::memory_order_release);
}

// The peers whose counter has not, as text.
std::string Walk::Missing(Counter counter, uint64_t value) const {
  std::string ranks;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || (Progress(peer).*counter).load() >= value) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(JobRank(peer));
  }
  return ranks;
}

// The peers that the oldest unfinished block waits for.
std::string Walk::Lagging() const {
  if (consumed_ < reduced_) return Missing(&DirectProgress::reduced, consumed_ + 1);
  if (reduced_ < packed_) {
    const std::string ranks = Missing(&DirectProgress::packed, reduced_ + 1);
    if (!ranks.empty()) return ranks;
  }
  return Missing(&DirectProgress::consumed, reduced_ + 1 - plan_.depth);
}

// Whether what lay in this rank's slot, where block `number` comes, is no longer read.
bool Walk::RoomIsFree(uint64_t number) const {
  return number < FirstBlock(members_) + plan_.depth ||
         PeersReached(&DirectProgress::consumed, number + 1 - plan_.depth);
}

bool Walk::CanPack() const {
  return packed_ < end_ && (plan_.packs_nothing || RoomIsFree(packed_));
}

// A rank that packs nothing may still write sums for others to its slot. (Of a batch's first
// block the peers' packing shows that there is room.)
bool Walk::CanReduce() const {
  return reduced_ < packed_ && PeersReached(&DirectProgress::packed, reduced_ + 1) &&
         (!plan_.packs_nothing || RoomIsFree(reduced_));
}

bool Walk::CanUnpack() const {
  return consumed_ < reduced_ && PeersReached(&DirectProgress::reduced, consumed_ + 1);
}

// Before the first Publish of the batch. Nobody reads the directory of an earlier one any more:
// that ended when all had reduced it.
void Walk::TellPlaces() {
  if (plan_.small) return;
  uint64_t* const directory = segment_.directory(JobRank(rank_));
  const size_t count = std::min(plan_.places.size(), ShmSegment::kDirectoryEntries);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t in_arena = plan_.in_arena[i];
    directory[i] = in_arena == Arena::kElsewhere ? 0 : in_arena + 1;
  }
}

// When all have packed a block, and therefore told.
void Walk::LearnPlaces() {
  const size_t told = std::min(plan_.places.size(), ShmSegment::kDirectoryEntries);
  where_.assign(plan_.places.size() * static_cast<size_t>(size_), nullptr);
  nobody_packs_ = told == plan_.places.size();
  for (int member = 0; member < size_; ++member) {
    const uint64_t* const directory = segment_.directory(JobRank(member));
    std::byte* const arena = segment_.arena(JobRank(member));
    for (size_t i = 0; i < told; ++i) {
      if (directory[i] != 0) {
        Where(i, member) = arena + (directory[i] - 1);
      } else {
        nobody_packs_ = false;
      }
    }
  }
}

void Walk::Pack() {
  if (plan_.packs_nothing) {
    packed_ = end_;
  } else {
    StageSpan span(trace_, Stage::kPack, batch_);
    const Range block = Block(packed_);
    if (plan_.small) {
      CopyIn(block);
    } else {
      const Range own = Slice(block, rank_);
      CopyIn({block.begin, own.begin});
      CopyIn({own.end, block.end});
    }
    ++packed_;
    span.End(block.bytes());
  }
  Publish(&DirectProgress::packed, packed_);
  transport_.RingWorkers(members_.ranks);
}

void Walk::Reduce() {
  StageSpan span(trace_, Stage::kReduce, batch_);
  Range range = Block(reduced_);
  if (plan_.small) {
    Combine(range, reduced_);
    // Nothing is left to unpack.
    Publish(&DirectProgress::reduced, ++reduced_);
    Publish(&DirectProgress::consumed, ++consumed_);
  } else {
    if (reduced_ == first_) LearnPlaces();
    if (nobody_packs_) range = {0, plan_.total};
    Combine(Slice(range, rank_), reduced_);
    reduced_ = nobody_packs_ ? end_ : reduced_ + 1;
    Publish(&DirectProgress::reduced, reduced_);
  }
  transport_.RingWorkers(members_.ranks);
  span.End(range.bytes());
}

void Walk::Unpack() {
  if (nobody_packs_) {
    consumed_ = end_;
  } else if (plan_.packs_nothing) {
    ++consumed_;
  } else {
    StageSpan span(trace_, Stage::kUnpack, batch_);
    const Range block = Block(consumed_);
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      const std::byte* const from = Room(peer, consumed_);
      plan_.ForEachPiece(Slice(block, peer), [&](size_t i, size_t at, size_t bytes) {
        const Place& place = plan_.places[i];
        if (plan_.in_arena[i] != Arena::kElsewhere) return;
        CopyBytes(place.output + (at - place.begin), from + (at - block.begin), bytes);
      });
    }
    ++consumed_;
    span.End(block.bytes());
  }
  Publish(&DirectProgress::consumed, consumed_);
  transport_.RingWorkers(members_.ranks);
}

// This rank's input in `range`, which lies in the block to be packed, into its slot.
void Walk::CopyIn(const Range& range) {
  std::byte* const room = Room(rank_, packed_);
  const size_t block_begin = Block(packed_).begin;
  plan_.ForEachPiece(range, [&](size_t i, size_t at, size_t bytes) {
    const Place& place = plan_.places[i];
    if (plan_.in_arena[i] != Arena::kElsewhere) return;
    transport_.to_slot().Copy(room + (at - block_begin), place.input + (at - place.begin), bytes);
  });
}

// All ranks' inputs in `range`, of block `number` as far as they are packed, into this rank's
// output and, unless all reduce everything, to wherever the others look for the result.
void Walk::Combine(const Range& range, uint64_t number) {
  const size_t block_begin = Block(number).begin;
  const size_t element = ElementSize(batch_.reduce.dtype);
  plan_.ForEachPiece(range, [&](size_t i, size_t at, size_t bytes) {
    const Place& place = plan_.places[i];
    for (size_t done = 0; done < bytes; done += kReducePiece) {
      const size_t part = std::min(kReducePiece, bytes - done);
      const size_t in_place = at + done - place.begin;
      const size_t in_block = at + done - block_begin;
      for (int source = 0; source < size_; ++source) {
        const std::byte* const tensor = source == rank_ ? place.input
                                        : plan_.small   ? nullptr
                                                        : Where(i, source);
        sources_[static_cast<size_t>(source)] =
            tensor != nullptr ? tensor + in_place : Room(source, number) + in_block;
      }
      std::byte* const result = place.output + in_place;
      ReduceMany(batch_.reduce, size_, result, sources_.data(), size_, part / element);
      if (plan_.small) continue;
      bool in_slot = false;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        std::byte* const tensor = Where(i, peer);
        in_slot = in_slot || tensor == nullptr;
        if (tensor != nullptr) transport_.to_arenas().Copy(tensor + in_place, result, part);
      }
      if (in_slot) transport_.to_slot().Copy(Room(rank_, number) + in_block, result, part);
    }
  });
}

}  // namespace hororing
