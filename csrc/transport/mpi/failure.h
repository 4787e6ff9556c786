// Errors of MPI, and memory that MPI may still use after a failure. Only for the thread that runs
// the loop, except that any thread may read broken_here.
#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/status.h"

namespace hororing {

// Some transport of this process has lost a peer: MPI_Finalize could wait for ever.
extern std::atomic<bool> broken_here;

// `peer`: the rank that the call concerned, or -1.
Status MpiError(const char* call, int error, int peer);

// The ranks of `communicator` that MPI knows to have died, in no order; none where it keeps no such
// list.
std::vector<int> KnownDead(MPI_Comm communicator);

// Before this call MPI reports the dead ranks of `communicator` instead of messages from any rank.
void AcknowledgeDead(MPI_Comm communicator);

// Memory that MPI may still use, after a failure: until the process ends.
void Bury(std::shared_ptr<void> memory);

}  // namespace hororing
