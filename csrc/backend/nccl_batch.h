// What of NCCL a batch becomes. Nothing here waits for the device.
//
// Sums of several tensors are packed into the fusion buffer by one kernel, and unpacked by another;
// all other collectives of several tensors are one group of calls, which NCCL carries out together.
#pragma once

#include "backend/backend.h"
#include "backend/nccl_communicator.h"
#include "base/clock.h"
#include "base/status.h"
#include "trace/trace.h"

namespace hororing {

// Whether NCCL carries it out as the host would, among `ranks`. Not: 16-bit integers, averages of
// integers (NCCL's sums of them overflow), Adasum, factors of integers, factors that NCCL would
// round to 16 bits, and factors of Min, Max and Product, for which it has no operation.
bool NcclCan(const Batch& batch, int ranks);

// Whether the fusion buffer is of use; the same on all ranks. REQUIRES: NcclCan.
bool WantsFusionBuffer(const Batch& batch);

// Puts `batch` into the device's private stream. REQUIRES: NcclCan.
Status RunByNccl(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                 int ranks, TimeNs deadline, TraceSink& trace);

}  // namespace hororing
