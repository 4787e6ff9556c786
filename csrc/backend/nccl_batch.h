// What of NCCL a batch becomes. Nothing here waits for the device.
//
// Sums of several tensors are packed into the fusion buffer by one kernel, and unpacked by another,
// which scale and cast as well where NCCL's own factors would be less exact;
// all other collectives of several tensors are one group of calls, which NCCL carries out together.
#pragma once

#include "backend/backend.h"
#include "backend/nccl_communicator.h"
#include "base/clock.h"
#include "base/status.h"
#include "trace/trace.h"

namespace hororing {

// How NCCL can carry it out as the host would.
enum class NcclWay {
  kNot,
  kPlain,   // with its own operations
  kScaled,  // our kernels scale before and after, 16-bit floats as float32
};
// Among `ranks`. kNot: 16-bit integers, averages of integers (NCCL's sums of them overflow),
// Adasum, and factors of integers. Where NCCL would round factors to 16 bits, or has none (of Min,
// Max and Product), kernels are needed: `scales`, of all ranks.
NcclWay NcclWayOf(const Batch& batch, int ranks, bool scales);

// Of the fusion buffer, so that batches can be scaled there.
constexpr size_t kLeastScalingBytes = 4 << 10;

// Whether the fusion buffer is of use; the same on all ranks.
bool WantsFusionBuffer(const Batch& batch, NcclWay way);
// Whether there is room to scale `batch`, which takes a row of the fusion buffer for each rank that
// gets a part, and one more.
bool FitsScaled(const Batch& batch, int ranks, size_t fusion_bytes);

// What NCCL sums with, factors included. REQUIRES: kPlain.
Status OpOf(const ReduceSpec& spec, int ranks, NcclCommunicator& communicator, NcclOp* op);
// And where kernels scale.
NcclOp PlainOp(ReduceOp op);
// How the kernels take tensors into the fusion buffer and back, and what they are there.
struct Widening {
  DeviceCast in, out;
  DataType dtype;
};
Widening WideningOf(DataType dtype);

// Puts `batch` into the device's private stream. REQUIRES: `way`, not kNot, is that of NcclWayOf,
// and if it is kScaled, FitsScaled in the fusion buffer of `communicator`.
Status RunByNccl(const Batch& batch, NcclWay way, NcclCommunicator& communicator,
                 const Device& device, int ranks, TimeNs deadline, TraceSink& trace);

}  // namespace hororing
