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

// Whether NCCL can carry it out as the host would, among `ranks`. Not: 16-bit integers, averages of
// integers (NCCL's sums of them overflow), Adasum, and factors other than those of a sum or average
// of floating-point numbers; nor those that 16 bits cannot hold, since NCCL rounds them.
bool NcclFits(const Batch& batch, int ranks);

// Puts `batch` into the device's private stream. REQUIRES: NcclFits.
Status RunByNccl(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                 size_t fusion_bytes, int ranks, TimeNs deadline, TraceSink& trace);

}  // namespace hororing
