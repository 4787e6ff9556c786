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
#include "backend/virtual_buffer.h"
#include "collective/slice_exchange.h"
#include "transport/polling.h"

namespace hororing {
namespace {

// Blocks in a slot: while one is packed and another unpacked, the others are on the wire.
constexpr size_t kDepth = 8;
// Smaller blocks would only make more messages; larger batches are cut into at least kCuts, so
// that the wire need not wait for all of them to be packed.
constexpr size_t kLeastBlock = 256 << 10;
constexpr size_t kCuts = 4;
// Reduced at a time: what is added next finds the sum in the first-level cache.
constexpr size_t kReducePiece = 16 << 10;
// Between two looks whether all ranks are alive.
constexpr TimeNs kLookInterval = 2 * kMillisecond;
// Of a rank whose last bytes may still be on the wire: looking moves them, too.
constexpr TimeNs kWireLookInterval = 50 * kMicrosecond;
// How long a rank with nothing on the wire sleeps; its peers on the host ring.
constexpr TimeNs kLongestNap = 5 * kMillisecond;
// MPI rings for nobody.
constexpr TimeNs kLongestWireNap = 100 * kMicrosecond;

// What all ranks compute alike.
struct Plan : VirtualBuffer {
  size_t capacity = 0;  // bytes of one block's room in a slot
  size_t block_bytes = 0;
  uint64_t blocks = 0;
  int owners = 1;

  Plan(const Batch& batch, size_t slot_bytes, int slice_owners)
      : VirtualBuffer(batch), owners(slice_owners) {
    capacity = slot_bytes / kDepth / kEntryAlign * kEntryAlign;
    const size_t wanted = std::max(kLeastBlock, RoundUp(total / kCuts, kEntryAlign));
    block_bytes = std::min({total, wanted, capacity});
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

// One batch on its way. `first` is the number of its first block.
class Walk {
 public:
  Walk(ShmTransport& local, Transport& wire, const std::vector<int>& ranks, const Batch& batch,
       const Plan& plan, SliceExchange* exchange, uint64_t first, TimeNs deadline, TraceSink& trace)
      : local_(local),
        wire_(wire),
        segment_(local.segment()),
        ranks_(ranks),
        batch_(batch),
        plan_(plan),
        exchange_(exchange),
        trace_(trace),
        rank_(local.rank()),
        size_(local.size()),
        deadline_(deadline),
        end_(first + plan.blocks),
        first_(first),
        packed_(first),
        summed_(first),
        reduced_(first),
        consumed_(first),
        sources_(static_cast<size_t>(size_)),
        widened_(kReducePiece * PartialSize(batch.reduce) / ElementSize(batch.reduce.dtype)),
        next_look_ns_(After(NowNs(), kLookInterval)) {
    for (int each = 0; each < size_; ++each) everybody_.push_back(each);
  }

  Status Run() {
    while (consumed_ < end_ || (exchange_ != nullptr && !exchange_->idle())) {
      Backoff backoff(0, kLongestWireNap), idle(0, kLongestNap);
      for (;;) {
        const uint32_t bell = local_.Bell();
        bool moved = false;
        HORORING_RETURN_IF_ERROR(Advance(&moved));
        if (moved) break;
        HORORING_RETURN_IF_ERROR(LookAtPeers());
        if (!(exchange_ != nullptr ? backoff : idle).Pause(local_, bell, false, deadline_))
          return NoProgress();
      }
    }
    return Status::Ok();
  }

 private:
  using Counter = std::atomic<uint64_t> DirectProgress::*;

  Status Advance(bool* moved) {
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

  DirectProgress& Progress(int rank) const { return segment_.rank_state(rank).direct[0]; }
  bool Reached(int rank, Counter counter, uint64_t value) const {
    return (Progress(rank).*counter).load(std::memory_order_acquire) >= value;
  }
  // True when `counter` of the first `count` ranks but this one has reached `value`.
  bool PeersReached(int count, Counter counter, uint64_t value) const {
    for (int peer = 0; peer < count; ++peer) {
      if (peer != rank_ && !Reached(peer, counter, value)) return false;
    }
    return true;
  }
  void Publish(Counter counter, uint64_t value) {
    (Progress(rank_).*counter).store(value, std::memory_order_release);
    local_.RingWorkers(everybody_);
  }

  // Also of this rank itself: sums of the block that lay there come into its slot, too.
  bool CanPack() const {
    return packed_ < end_ && packed_ < consumed_ + kDepth &&
           (packed_ < kDepth ||
            PeersReached(size_, &DirectProgress::consumed, packed_ + 1 - kDepth));
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
    std::byte* room = Room(rank_, packed_);
    const Range own = exchange_ != nullptr ? plan_.SliceOf(block, rank_) : Range{0, 0};
    for (const Range& part : {Range{block.begin, std::max(own.begin, block.begin)},
                              Range{std::max(own.end, block.begin), block.end}}) {
      plan_.ForEachPiece(part, [&](size_t i, size_t at, size_t bytes) {
        const Place& place = plan_.places[i];
        std::memcpy(room + (at - block.begin), place.input + (at - place.begin), bytes);
      });
    }
    Publish(&DirectProgress::packed, ++packed_);
    span.End(block.bytes());
  }

  void Sum() {
    StageSpan span(trace_, Stage::kReduce, batch_);
    const Range block = plan_.Block(summed_ - first_), own = plan_.SliceOf(block, rank_);
    const size_t element = ElementSize(batch_.reduce.dtype);
    const size_t partial = PartialSize(batch_.reduce);
    std::byte* const sums = exchange_->Partial();
    size_t filled = own.begin;  // what tensors leave out is padding, which travels too
    const auto pad = [&](size_t end) {
      std::memset(sums + (filled - own.begin) / element * partial, 0,
                  (end - filled) / element * partial);
    };
    plan_.ForEachPiece(own, [&](size_t i, size_t at, size_t bytes) {
      const Place& place = plan_.places[i];
      pad(at);
      filled = at + bytes;
      for (size_t done = 0; done < bytes; done += kReducePiece) {
        const size_t part = std::min(kReducePiece, bytes - done);
        for (int source = 0; source < size_; ++source) {
          sources_[static_cast<size_t>(source)] =
              source == rank_ ? place.input + (at + done - place.begin)
                              : Room(source, summed_) + (at + done - block.begin);
        }
        SumPartials(batch_.reduce, sums + (at + done - own.begin) / element * partial, sources_,
                    part / element, widened_.data());
      }
    });
    pad(own.end);
    exchange_->Begin(own.bytes() / element, Room(rank_, summed_) + (own.begin - block.begin));
    ++summed_;
    span.End(own.bytes());
  }

  void Unpack() {
    StageSpan span(trace_, Stage::kUnpack, batch_);
    const Range block = plan_.Block(consumed_ - first_);
    for (int step = 0; step < plan_.owners; ++step) {
      const int owner = (rank_ + step) % plan_.owners;
      const std::byte* from = Room(owner, consumed_);
      plan_.ForEachPiece(plan_.SliceOf(block, owner), [&](size_t i, size_t at, size_t bytes) {
        const Place& place = plan_.places[i];
        std::memcpy(place.output + (at - place.begin), from + (at - block.begin), bytes);
      });
    }
    Publish(&DirectProgress::consumed, ++consumed_);
    span.End(block.bytes());
  }

  Status LookAtPeers() {
    const TimeNs now = NowNs();
    if (now < next_look_ns_) return Status::Ok();
    next_look_ns_ = After(now, exchange_ != nullptr ? kWireLookInterval : kLookInterval);
    return wire_.CheckPeers();
  }

  Status NoProgress() const {
    std::string lagging = exchange_ != nullptr ? exchange_->Lagging() : "";
    const bool unpacks = consumed_ < packed_;
    for (int peer = 0; peer < size_ && lagging.empty(); ++peer) {
      const Counter counter = CanPack() ? &DirectProgress::consumed : &DirectProgress::packed;
      if (peer == rank_) continue;
      if (!Reached(peer, counter, packed_) ||
          (unpacks && peer < plan_.owners && !Reached(peer, &DirectProgress::reduced, packed_))) {
        lagging = std::to_string(ranks_[static_cast<size_t>(peer)]);
      }
    }
    return Status(Code::kTransport,
                  "no progress from rank(s) " + lagging +
                      " until the deadline; they may be stopped, their machine overloaded or the "
                      "network cut (HORORING_TIMEOUT_S sets the limit)",
                  lagging.empty() ? -1 : std::stoi(lagging));
  }

  std::byte* Room(int rank, uint64_t number) const {
    return segment_.slot(rank) + static_cast<size_t>(number % kDepth) * plan_.capacity;
  }

  ShmTransport& local_;
  Transport& wire_;
  ShmSegment& segment_;
  const std::vector<int>& ranks_;  // of the job, by local rank
  const Batch& batch_;
  const Plan& plan_;
  SliceExchange* const exchange_;  // null where this rank owns no slices
  TraceSink& trace_;
  const int rank_;  // and those below: of this host
  const int size_;
  const TimeNs deadline_;
  const uint64_t end_;
  const uint64_t first_;
  // The next block of each stage: consumed_ <= reduced_ <= summed_ <= packed_ for an owner.
  uint64_t packed_;
  uint64_t summed_;
  uint64_t reduced_;
  uint64_t consumed_;
  std::vector<const void*> sources_;
  std::vector<std::byte> widened_;
  std::vector<int> everybody_;
  TimeNs next_look_ns_;
};

HostShape Shared(HostShape shape) {
  shape.shared = true;
  return shape;
}

}  // namespace

HierarchicalBackend::HierarchicalBackend(Transport& wire, ShmTransport& local,
                                         const Topology& topology, const Options& options)
    : wire_(wire),
      local_(local),
      topology_(topology),
      ranks_on_(topology.ranks_on()),
      shape_(Shared(ShapeOf(ranks_on_))),
      options_(options) {}

Algorithm HierarchicalBackend::Choose(const Batch& batch) const {
  if (options_.algorithm != Algorithm::kAuto) return options_.algorithm;
  const size_t elements = batch.bytes() / ElementSize(batch.reduce.dtype);
  return Cheapest(elements, batch.reduce, shape_, options_.wire);
}

bool HierarchicalBackend::Supports(const Batch& batch) const {
  if (batch.kind != Collective::kAllreduce || batch.reduce.op == ReduceOp::kAdasum) return false;
  const Algorithm algorithm = Choose(batch);
  return algorithm == Algorithm::kThreePhase || algorithm == Algorithm::kLeader;
}

Status HierarchicalBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  HORORING_RETURN_IF_ERROR(Check(batch.reduce));
  HORORING_RETURN_IF_ERROR(broken_);
  const Plan plan(batch, local_.segment().geometry().slot_bytes,
                  Choose(batch) == Algorithm::kLeader ? 1 : shape_.least);
  if (plan.blocks == 0) return Status::Ok();
  const size_t host = static_cast<size_t>(topology_.host_of[static_cast<size_t>(topology_.rank)]);
  std::optional<SliceExchange> exchange;
  if (topology_.local_rank < plan.owners) {
    SliceExchange::Plan between;
    for (const std::vector<int>& ranks : ranks_on_) {
      between.ranks.push_back(ranks[static_cast<size_t>(topology_.local_rank)]);
    }
    between.place = static_cast<int>(host);
    between.spec = batch.reduce;
    between.divisor = topology_.size;
    between.slices = plan.blocks;
    between.most_elements = plan.LargestSlice() / ElementSize(batch.reduce.dtype);
    between.whole = GoesWhole(plan.block_bytes / ElementSize(batch.reduce.dtype), batch.reduce,
                              shape_.hosts, options_.wire);
    between.depth = kDepth;
    exchange.emplace(wire_, std::move(between), deadline);
    HORORING_RETURN_IF_ERROR(exchange->Reserve(scratch_));
  }
  const uint64_t first = next_block_;
  next_block_ += plan.blocks;
  broken_ = Walk(local_, wire_, ranks_on_[host], batch, plan, exchange ? &*exchange : nullptr,
                 first, deadline, trace)
                .Run();
  return broken_;
}

size_t HierarchicalBackend::scratch_bytes() const {
  return local_.segment().geometry().slot_bytes + scratch_.bytes();
}

}  // namespace hororing
