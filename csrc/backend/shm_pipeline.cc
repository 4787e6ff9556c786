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
#include "backend/shm_pipeline.h"

#include <algorithm>
#include <cstring>

#include "base/copy.h"
#include "base/reduce.h"

namespace hororing {
namespace {

// Reduced at a time: the result is still in the first-level cache when it is copied on.
constexpr size_t kReducePiece = 16 << 10;

}  // namespace

ShmPipeline::ShmPipeline(ShmTransport& transport, const Members& members, int rank,
                         const Batch& batch, const Plan& plan, uint64_t first, TimeNs deadline,
                         TraceSink& trace)
    : transport_(transport),
      segment_(transport.segment()),
      members_(members),
      batch_(batch),
      plan_(plan),
      trace_(trace),
      rank_(rank),
      size_(static_cast<int>(members.ranks.size())),
      deadline_(deadline),
      end_(first + plan.blocks),
      first_(first),
      packed_(first),
      reduced_(first),
      consumed_(first),
      sources_(static_cast<size_t>(size_)) {}

Status ShmPipeline::Run() {
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
bool ShmPipeline::PeersReached(Counter counter, uint64_t value) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if ((Progress(peer).*counter).load(std::memory_order_acquire) < value) return false;
  }
  return true;
}

void ShmPipeline::Publish(Counter counter, uint64_t value) {
  transport_.to_slot().Fence();
  (Progress(rank_).*counter).store(value, std::memory_order_release);
}

// The peers whose counter has not, as text.
std::string ShmPipeline::Missing(Counter counter, uint64_t value) const {
  std::string ranks;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || (Progress(peer).*counter).load() >= value) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(JobRank(peer));
  }
  return ranks;
}

// The peers that the oldest unfinished block waits for.
std::string ShmPipeline::Lagging() const {
  if (consumed_ < reduced_) return Missing(&DirectProgress::reduced, consumed_ + 1);
  if (reduced_ < packed_) {
    const std::string ranks = Missing(&DirectProgress::packed, reduced_ + 1);
    if (!ranks.empty()) return ranks;
  }
  return Missing(&DirectProgress::consumed, reduced_ + 1 - plan_.depth);
}

// Whether what lay in this rank's slot, where block `number` comes, is no longer read.
bool ShmPipeline::BlockIsFree(uint64_t number) const {
  return number < FirstBlock(members_) + plan_.depth ||
         PeersReached(&DirectProgress::consumed, number + 1 - plan_.depth);
}

bool ShmPipeline::CanPack() const { return packed_ < end_ && BlockIsFree(packed_); }

bool ShmPipeline::CanReduce() const {
  return reduced_ < packed_ && PeersReached(&DirectProgress::packed, reduced_ + 1);
}

bool ShmPipeline::CanUnpack() const {
  return consumed_ < reduced_ && PeersReached(&DirectProgress::reduced, consumed_ + 1);
}

void ShmPipeline::Pack() {
  StageSpan span(trace_, Stage::kPack, batch_);
  const Range block = Block(packed_);
  if (plan_.small) {
    CopyIn(block);
  } else {
    const Range own = Slice(block, rank_);
    CopyIn({block.begin, own.begin});
    CopyIn({own.end, block.end});
  }
  span.End(block.bytes());
  Publish(&DirectProgress::packed, ++packed_);
  transport_.RingWorkers(members_.ranks);
}

void ShmPipeline::Reduce() {
  StageSpan span(trace_, Stage::kReduce, batch_);
  const Range block = Block(reduced_);
  if (plan_.small) {
    Combine(block, reduced_);
    // Nothing is left to unpack.
    Publish(&DirectProgress::reduced, ++reduced_);
    Publish(&DirectProgress::consumed, ++consumed_);
  } else {
    Combine(Slice(block, rank_), reduced_);
    Publish(&DirectProgress::reduced, ++reduced_);
  }
  transport_.RingWorkers(members_.ranks);
  span.End(block.bytes());
}

void ShmPipeline::Unpack() {
  StageSpan span(trace_, Stage::kUnpack, batch_);
  const Range block = Block(consumed_);
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    const std::byte* const from = BlockAt(peer, consumed_);
    plan_.ForEachPiece(Slice(block, peer), [&](size_t i, size_t at, size_t bytes) {
      const Place& place = plan_.places[i];
      CopyBytes(place.output + (at - place.begin), from + (at - block.begin), bytes);
    });
  }
  span.End(block.bytes());
  Publish(&DirectProgress::consumed, ++consumed_);
  transport_.RingWorkers(members_.ranks);
}

// This rank's input in `range`, which lies in the block to be packed, into its slot.
void ShmPipeline::CopyIn(const Range& range) {
  std::byte* const block_at = BlockAt(rank_, packed_);
  const size_t block_begin = Block(packed_).begin;
  plan_.ForEachPiece(range, [&](size_t i, size_t at, size_t bytes) {
    const Place& place = plan_.places[i];
    transport_.to_slot().Copy(block_at + (at - block_begin), place.input + (at - place.begin),
                              bytes);
  });
}

// All ranks' inputs in `range`, of block `number`, into this rank's output and, unless all reduce
// everything, into its slot for the others.
void ShmPipeline::Combine(const Range& range, uint64_t number) {
  const size_t block_begin = Block(number).begin;
  plan_.ForEachPiece(range, [&](size_t i, size_t at, size_t bytes) {
    const Place& place = plan_.places[i];
    const size_t element = ElementSize(place.reduce.dtype);
    for (size_t done = 0; done < bytes; done += kReducePiece) {
      const size_t part = std::min(kReducePiece, bytes - done);
      const size_t in_tensor = at + done - place.begin;
      const size_t in_block = at + done - block_begin;
      for (int source = 0; source < size_; ++source) {
        sources_[static_cast<size_t>(source)] =
            source == rank_ ? place.input + in_tensor : BlockAt(source, number) + in_block;
      }
      std::byte* const result = place.output + in_tensor;
      ReduceMany(place.reduce, size_, result, sources_.data(), size_, part / element);
      if (!plan_.small) transport_.to_slot().Copy(BlockAt(rank_, number) + in_block, result, part);
    }
  });
}

}  // namespace hororing
