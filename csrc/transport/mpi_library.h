// What a library of MPI exports: it makes a MpiTransport, over its own duplicate of an MPI
// communicator. There is one library for each ABI of MPI (libhororing_mpi_openmpi and others), of
// the folder transport/mpi, which alone includes <mpi.h>. The core loads one only if a job has more
// than one rank. It is not linked to MPI: a matching MPI library must be loaded before it, with
// visible symbols (hororing/_engine/mpi.py).
//
// Only the loop's thread calls MPI (Wake does not). If the script initialised MPI with less than
// MPI_THREAD_MULTIPLE, creation is refused: two threads inside a SERIALIZED Open MPI crash
// (measured: a segmentation fault in its progress engine).
//
// The ranks of a dead peer's host notice its death and announce it to the others. On other hosts
// MPI must report it (fault tolerance, "ULFM"), or kill the job, as mpirun does by default. A
// failure that a peer announces is noticed at once; a peer that is silent while data is due, at the
// deadline. Ignore SIGPIPE, as Python does: MPI writes to the sockets of dead peers.
#pragma once

#include <string>
#include <vector>

#include "transport/transport.h"

namespace hororing {

// The ranks that take part.
struct MpiWorld {
  // A communicator as its Fortran handle (mpi4py: comm.py2f()), or kWorld.
  static constexpr int kWorld = -1;
  int communicator = kWorld;
  // If not empty: the sub-job of these ranks, in this order; others get kInvalidArgument.
  std::vector<int> ranks;
  int launched = 1;  // the minimum number of processes in kWorld, according to the launcher
};

struct MpiInfo {
  std::string library;       // MPI_Get_library_version, first line
  std::string thread_level;  // "single", "funneled", "serialized", "multiple"; "": not initialised
  std::string path;          // of the MPI library that is in use
  bool initialized = false;
};

// What that library exports, as `hororing_mpi_functions`; transport/factory.cc finds it with dlsym.
struct MpiFunctions {
  // Initialises MPI if necessary (asks for MULTIPLE, accepts SERIALIZED), else checks the thread
  // level. Waits for the other ranks until `deadline`, as far as MPI permits: MPI_Init_thread and,
  // for `world.ranks`, MPI_Comm_create_group have no deadline.
  Status (*open)(const MpiWorld& world, TimeNs spin_ns, TimeNs deadline, Transport** transport);
  void (*describe)(MpiInfo* info);  // Does not initialise MPI.
  // Calls MPI_Finalize if `open` initialised MPI, it has not been finalised, and no rank has failed
  // (MPI would wait for it). Once per process, at its very end: MPI cannot be initialised again.
  void (*finalize)();
};

}  // namespace hororing
