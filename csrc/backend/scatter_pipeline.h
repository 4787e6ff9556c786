// ScatterPipeline: reduce-scatter over several hosts. For each rank of another host, one rank of
// this host sums its host's parts for that rank and sends the sum there. This is an all-gather
// (backend/channel_pipeline.h) in reverse.
//
//   2 hosts x 2 ranks, parts a b c d for ranks 0 1 2 3, digits: ranks that are summed
//
//                   rank 0        rank 1        rank 2        rank 3
//   PACK            the parts that others of the host sum, into the slot
//   REDUCE          a01 c01       b01 d01       a23 c23       b23 d23
//   over the wire   a23 from 2    b23 from 3    c01 from 0    d01 from 1
//   combine         a0123         b0123         c0123         d0123
//
// Parts are cut into pieces; block n holds the n-th piece of every part.
//
// Numerics: as in backend/shared_memory_backend.h. The bits are those of three phases.
//
// Cost per host: (H-1)/H S sent as partial results, and the same amount received.
#pragma once

#include <cstddef>
#include <vector>

#include "backend/host_pipeline.h"
#include "collective/allreduce.h"

namespace hororing {

// Equal on all ranks, except for the addresses.
struct ScatterPlan {
  // The parts of all tensors for one rank, contiguous. Units: elements.
  struct Part {
    struct Extent {
      size_t begin;  // in the part
      size_t size;
      const std::byte* input;
      std::byte* output;  // null in other ranks' parts
    };
    std::vector<Extent> extents;
    size_t size = 0;
    int reducer = 0;    // local rank on this host
    int owner = 0;      // rank of the job
    bool own = false;   // it is this rank's part
    size_t number = 0;  // index among the parts that the reducer sums
  };
  std::vector<Part> parts;   // by group rank
  std::vector<int> senders;  // per other host, in order: the rank that sums this rank's part
  size_t summed_here = 0;    // number of parts that this rank sums
  size_t element = 1;        // bytes
  size_t piece = 0;          // elements of a part in one block
  uint64_t blocks = 0;

  ScatterPlan(const SetSlots& set, const Batch& batch);
  static constexpr size_t kMinBytes = 4 << 10;  // REQUIRES of capacity / ranks
  // For each block in flight: sums and received parts.
  size_t scratch_bytes(const ReduceSpec& spec) const {
    return (summed_here + senders.size()) * RoundUp(piece * PartialSize(spec), kCacheLine);
  }
};

class ScatterPipeline final : public HostPipeline {
 public:
  ScatterPipeline(SetSlots& set, const Batch& batch, const ScatterPlan& plan, std::byte* scratch,
                  TimeNs deadline, TraceSink& trace);

 private:
  bool Finished() const override { return combined_ == end_ && sends_.empty(); }
  bool Advance(Status* status) override;
  int LaggingOnWire() const override;
  bool Lags(int peer) const override {
    return !BlockIsFree(peer, begun_) ||
           (summed_ < begun_ && !Reached(peer, &SlotProgress::packed, summed_ + 1));
  }

  bool CanBegin() const {
    return begun_ < end_ && begun_ < combined_ + depth_ &&
           begun_ < sends_.FirstOpen(end_) + depth_ && BlockIsFree(begun_);
  }
  void Begin();
  void Sum();
  void SumPiece(const ScatterPlan::Part& part, std::byte* sums);
  void Combine();
  // In elements.
  Range PieceOf(const ScatterPlan::Part& part, uint64_t number) const {
    return HostPipeline::PieceOf(part.size, plan_.piece, number);
  }
  std::byte* SumsAt(size_t number, uint64_t block) const;
  std::byte* ArrivalsAt(size_t number, uint64_t block) const {
    return SumsAt(plan_.summed_here + number, block);
  }

  const ScatterPlan& plan_;
  const size_t partial_ = PartialSize(batch_.reduce());  // bytes of one
  // Bytes of the partial results of a piece.
  const size_t sum_bytes_ = RoundUp(plan_.piece * partial_, kCacheLine);
  std::byte* const scratch_;
  Inflight receives_, sends_;
  // The next block of each stage: combined_ <= summed_ <= begun_.
  uint64_t begun_ = first_, summed_ = first_, combined_ = first_;
  std::vector<const void*> sources_;
  std::vector<std::byte> widened_;
};

}  // namespace hororing
