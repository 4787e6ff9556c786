// Shared by the backends: the name of a batch in the timeline, and the world of one rank.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "backend/backend.h"
#include "trace/trace.h"

namespace hororing {

// Bytes of a message between hosts. Open MPI sends that many over TCP at once. A longer message
// waits for the receiver's answer, behind everything that is queued.
constexpr size_t kHostMessage = 32 << 10;

// Bytes of one piece of data that a pipeline passes from rank to rank. Between hosts a piece is a
// message. In memory, pieces smaller than kMin would only add steps; larger parts are cut into four
// pieces, so that the stages overlap.
inline size_t PieceBytes(size_t longest, int hosts) {
  if (hosts > 1) return kHostMessage;
  constexpr size_t kMin = 64 << 10, kCuts = 4;
  return std::max(kMin, (longest + kCuts - 1) / kCuts);
}

// "layer1.weight", or "17 tensors".
std::string TraceLabel(const Batch& batch);

// Records a span of a stage in the loop's row of the timeline, from construction to End, or to its
// destruction if the stage moves the whole batch. Free while the timeline is off.
class StageSpan {
 public:
  StageSpan(TraceSink& trace, Stage stage, const Batch& batch)
      : trace_(trace), batch_(batch), stage_(stage), begin_ns_(trace.enabled() ? NowNs() : 0) {}
  ~StageSpan() {
    if (begin_ns_ != 0) End(batch_.bytes());
  }
  StageSpan(const StageSpan&) = delete;
  void End(size_t bytes) {
    if (begin_ns_ == 0) return;
    trace_.Span(stage_, Track::kLoop, TraceLabel(batch_), std::exchange(begin_ns_, 0), NowNs(),
                static_cast<int64_t>(bytes));
  }

 private:
  TraceSink& trace_;
  const Batch& batch_;
  const Stage stage_;
  TimeNs begin_ns_;  // 0: it has ended, or the timeline is off
};

// kInternal if the sizes that a collective has agreed on do not fit this rank's tensor.
Status CheckSizes(const Batch& batch, const BatchEntry& entry, size_t ranks, size_t rank);

// An allreduce or a reduce-scatter of one rank: only applies the factors.
void ReduceAlone(const Batch& batch, TraceSink& trace);

}  // namespace hororing
