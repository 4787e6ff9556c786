// Turns a batch into calls of NCCL. Nothing here waits for the device.
//
// For sums of several tensors, one kernel packs the fusion buffer and another one unpacks it. Other
// collectives of several tensors are one group of calls, which NCCL carries out together.
#pragma once

#include "backend/backend.h"
#include "backend/nccl_communicator.h"
#include "base/clock.h"
#include "base/status.h"
#include "trace/trace.h"

namespace hororing {

// Whether NCCL gives the result that the host would give, among `ranks`. It does not for 16-bit
// integers, averages of integers (NCCL's sums of them overflow), Adasum, factors of integers,
// factors that NCCL would round to 16 bits, and factors of Min, Max and Product, which it does not
// have.
bool NcclCan(const Batch& batch, int ranks);

// Whether the fusion buffer helps; the same on all ranks. REQUIRES: NcclCan.
bool WantsFusionBuffer(const Batch& batch);

// Puts `batch` into the device's private stream. REQUIRES: NcclCan.
Status RunByNccl(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                 int ranks, TimeNs deadline, TraceSink& trace);

}  // namespace hororing
