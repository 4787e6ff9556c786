// Errors of MPI, and memory that MPI may still use after a failure. Only for the thread that runs
// the loop, except that any thread may read broken_here.
#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/status.h"

namespace hororing {

// A transport of this process has lost a peer: MPI_Finalize could wait forever.
extern std::atomic<bool> broken_here;

// `peer`: the rank that the call concerned, or -1.
Status MpiError(const char* call, int error, int peer);

// The ranks of `communicator` that MPI knows to be dead, in no particular order; none if MPI keeps
// no such list.
std::vector<int> KnownDead(MPI_Comm communicator);

// Until this call, MPI reports the dead ranks of `communicator` instead of messages from any rank.
void AcknowledgeDead(MPI_Comm communicator);

// Keeps memory that MPI may still use after a failure, until the process ends.
void LeakUntilExit(std::shared_ptr<void> memory);

}  // namespace hororing
