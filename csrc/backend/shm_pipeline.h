// ShmPipeline: the pipeline of one batch through the slots, with the stages of
// backend/shm_direct.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/shm_plan.h"
#include "base/clock.h"
#include "base/status.h"
#include "trace/trace.h"
#include "transport/shm_transport.h"

namespace hororing {

class ShmPipeline {
 public:
  // `rank`: of this rank among the members. `first`: the number of the batch's first block.
  ShmPipeline(ShmTransport& transport, const Members& members, int rank, const Batch& batch,
              const Plan& plan, uint64_t first, TimeNs deadline, TraceSink& trace);

  Status Run();

 private:
  using Counter = std::atomic<uint64_t> DirectProgress::*;

  DirectProgress& Progress(int member) const {
    return segment_.rank_state(JobRank(member)).direct[members_.set];
  }
  int JobRank(int member) const { return members_.ranks[static_cast<size_t>(member)]; }
  bool PeersReached(Counter counter, uint64_t value) const;
  void Publish(Counter counter, uint64_t value);
  std::string Missing(Counter counter, uint64_t value) const;
  std::string Lagging() const;

  bool BlockIsFree(uint64_t number) const;
  bool CanPack() const;
  bool CanReduce() const;
  bool CanUnpack() const;
  void Pack();
  void Reduce();
  void Unpack();
  void CopyIn(const Range& range);
  void Combine(const Range& range, uint64_t number);

  std::byte* BlockAt(int member, uint64_t number) const {
    return segment_.slot(JobRank(member)) +
           static_cast<size_t>(number % plan_.depth) * plan_.capacity;
  }
  // The range of block `number` in the virtual buffer.
  Range Block(uint64_t number) const {
    const size_t begin = static_cast<size_t>(number - first_) * plan_.block_bytes;
    return {begin, std::min(begin + plan_.block_bytes, plan_.total)};
  }
  Range Slice(const Range& range, int member) const { return Plan::Slice(range, member, size_); }

  ShmTransport& transport_;
  ShmSegment& segment_;
  const Members& members_;
  const Batch& batch_;
  const Plan& plan_;
  TraceSink& trace_;
  const int rank_;  // like all members: index among the members
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

}  // namespace hororing
