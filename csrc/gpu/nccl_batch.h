// Turns a batch into calls of NCCL. Nothing here waits for the device.
//
// For sums of several tensors, one kernel packs the fusion buffer and another one unpacks it. A
// batch of several types is one group of calls, one per run of a type; so are other collectives of
// several tensors. NCCL carries out a group together.
#pragma once

#include "backend/backend.h"
#include "gpu/nccl_communicator.h"
#include "trace/trace.h"

namespace hororing {

// Whether NCCL gives the same result for this entry as the host, among `ranks`. It does not for
// 16-bit integers, averages of integers (NCCL's sums overflow), Adasum, factors of integers,
// factors of 16-bit floats that are no powers of two, factors of Min, Max and Product, which NCCL
// lacks, and factors of one rank.
bool NcclSupports(Collective kind, const ReduceSpec& spec, int ranks);

// Whether the fusion buffer helps; the same on all ranks. REQUIRES: NcclSupports, for all entries.
bool WantsFusionBuffer(const Batch& batch);

// Puts `batch` into the device's private stream. REQUIRES: NcclSupports, for all entries.
Status RunByNccl(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                 int ranks, TimeNs deadline, TraceSink& trace);

}  // namespace hororing
