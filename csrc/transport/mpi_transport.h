// MpiTransport: a Transport over an MPI communicator of its own (a duplicate of what it was
// given). Only the folder transport/mpi includes <mpi.h>; it is a library of its own, one for each
// ABI of MPI (libhororing_mpi_openmpi and others), that the core loads only when a job has more
// than one rank: a job of one rank neither needs nor initialises MPI.
//
// It is not linked to MPI: the MPI library that fits must have been loaded before it, with its
// symbols visible (hororing/mpi.py).
//
// Only the loop's thread calls MPI (Wake does not). If the script initialised MPI with less than
// MPI_THREAD_MULTIPLE, creation is refused: two threads inside a SERIALIZED Open MPI crash
// (measured: a segmentation fault in its progress engine).
//
// A peer's death is noticed on its own host, whose ranks tell the others; elsewhere where MPI
// reports it (fault tolerance, "ULFM") or kills the job, which is what mpirun does otherwise. A
// failure that a peer announces is noticed at once, and a peer that is silent while data is due, at
// the deadline. SIGPIPE must be ignored, as Python does: MPI writes to sockets of dead peers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "transport/transport.h"

namespace hororing {

// The ranks that take part.
struct MpiWorld {
  // A communicator as its Fortran handle (mpi4py: comm.py2f()), or kWorld.
  static constexpr int kWorld = -1;
  int communicator = kWorld;
  // If not empty: the sub-job of these ranks of that communicator, in this order. A rank that
  // is not listed gets kInvalidArgument.
  std::vector<int> ranks;
  int launched = 1;  // the fewest processes that there are in kWorld, by what the launcher tells
};

struct MpiInfo {
  std::string library;  // MPI_Get_library_version, first line
  std::string
      thread_level;  // "single", "funneled", "serialized", "multiple"; "" if not initialised
  std::string path;  // of the MPI library that is in use
  bool initialized = false;
};

// The entry points of such a library, resolved with dlsym by transport/factory.cc.
extern "C" {
// Initialises MPI if it is not initialised (asks for MULTIPLE, accepts SERIALIZED), else checks the
// thread level. Waits for the other ranks until `deadline`, as far as MPI lets it: MPI_Init_thread
// and, for `world.ranks`, MPI_Comm_create_group have no deadline.
using HororingMpiOpen = void (*)(const MpiWorld* world, TimeNs spin_ns, TimeNs deadline,
                                 Transport** transport, Status* status);
// Does not initialise MPI.
using HororingMpiDescribe = void (*)(MpiInfo* info);
// Calls MPI_Finalize if HororingMpiOpen had initialised MPI, MPI was not finalised since, and no
// rank has failed (it would wait for that rank). Once per process, at its very end: MPI
// cannot be initialised again.
using HororingMpiFinalize = void (*)();
}

}  // namespace hororing
