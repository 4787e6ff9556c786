// The functions of libnccl that csrc/gpu uses. Ranks are threads or processes.
//
// As in the real library, a collective does nothing before its group has ended and, because
// communicators do not block, before ncclCommGetAsyncError is called afterwards. An event that is
// recorded earlier is reached too early.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>

#include "arithmetic.h"
#include "fake_gpu.h"
#include "mailboxes.h"
#include "state.h"

namespace fake_gpu {
namespace {

// The group that this thread has open.
struct Call {
  Comm* comm;
  void* stream;
  std::function<void()> work;
  bool point_to_point = false;
  Half half = {};
};
thread_local int depth = 0;
thread_local std::vector<Call> group;
thread_local std::vector<Comm*> ending;  // aborted in the group

bool Usable(Comm* comm) {
  if (!HasContext()) return false;
  const bool usable = comm != nullptr && !comm->dead && !comm->aborted && comm->state == kSuccess;
  if (!usable) Violation("a collective on a communicator that is not ready or has ended");
  return usable;
}

int EndGroup();

int Put(Call call) {
  if (!Usable(call.comm)) return kInvalidUsage;
  group.push_back(std::move(call));
  if (depth == 0) {
    depth = 1;
    return EndGroup();
  }
  return kSuccess;
}

int Collective(Comm* comm, void* stream, std::function<void()> work) {
  return Put({comm, stream, std::move(work)});
}

int PointToPoint(Comm* comm, void* stream, bool sends, void* data, size_t bytes, int peer) {
  return Put({comm,
              stream,
              {},
              true,
              {sends, peer, static_cast<char*>(data), HeaderOf("sendrecv", bytes, 0)}});
}

// Waits for the communicator's work in streams, as the real library does. Behind a hanging
// collective of another communicator, this never ends.
void Bury(Comm* comm) {
  while (!comm->start_ended || comm->under_way > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  if (comm->aborted) shm_unlink(comm->name.c_str());  // perhaps not all ranks have mapped it
  --counts.communicators;
}

int EndGroup() {
  if (depth == 0) {
    Violation("the end of a group that has not begun");
    return kInvalidUsage;
  }
  if (--depth > 0) return kSuccess;
  for (Comm* comm : std::exchange(ending, {})) Bury(comm);
  std::vector<Half> halves;
  const std::vector<Call> calls = std::move(group);
  group.clear();
  if (calls.empty()) return kSuccess;
  Comm* comm = calls[0].comm;
  std::lock_guard<std::mutex> lock(comm->mutex);
  for (const Call& call : calls) {
    if (call.point_to_point) halves.push_back(call.half);
    if (!call.point_to_point) comm->waiting.emplace_back(call.stream, call.work);
  }
  if (!halves.empty()) {
    comm->waiting.emplace_back(calls[0].stream, [comm, halves] { TogetherWith(*comm, halves); });
  }
  counts.collectives += static_cast<int64_t>(calls.size());
  comm->state = kInProgress;
  return kInProgress;
}

double FactorOf(Comm* comm, int op) {
  if (op < kAvg) return 1;
  if (comm->ranks == 1) Violation("one rank's sum has a factor, which NCCL 2.28 gets wrong");
  if (op < kPreMulSum) return 1;
  const auto found = comm->factors.find(op);
  if (found == comm->factors.end()) Violation("an operation that does not exist or has ended");
  return found == comm->factors.end() ? 1 : found->second;
}

// The rest of a communicator's creation: waits for the other ranks.
void Start(Comm* comm) {
  ++comm->shared->arrived;
  while (comm->shared->arrived < comm->ranks || settings.init_hangs != 0) {
    if (comm->aborted) return;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  comm->state = settings.init_fails != 0 ? kSystemError : kSuccess;
}

int End(Comm* comm, bool abort) {
  if (comm->dead.exchange(true)) {
    Violation("a communicator ends twice");
    return kInvalidUsage;
  }
  if (abort) comm->aborted = true;
  counts.operations -= static_cast<int64_t>(comm->factors.size());
  if (!abort && comm->state == kInProgress) Violation("a communicator ends before it is finalized");
  const bool in_group = depth > 0 && settings.nccl_version >= 22200;
  if (in_group) ending.push_back(comm);
  if (!in_group) Bury(comm);
  return kSuccess;
}

}  // namespace
}  // namespace fake_gpu

using namespace fake_gpu;

#define FAKE __attribute__((visibility("default")))

extern "C" {

struct UniqueId {
  char bytes[128];
};

FAKE int ncclGetVersion(int* version) {
  Visit(__func__);
  *version = static_cast<int>(settings.nccl_version);
  return kSuccess;
}
FAKE const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited or there was a network error"
                                : "the fake says no";
}
FAKE const char* ncclGetLastError(void*) { return "last words of the fake"; }

FAKE int ncclGetUniqueId(UniqueId* id) {
  Visit(__func__);
  std::random_device random;
  const std::string name =
      "/fake_nccl_" + std::to_string(getpid()) + "_" + std::to_string(random());
  *id = {};
  std::memcpy(id->bytes, name.data(), name.size());
  const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  const int sized = ftruncate(file, sizeof(Shared));
  close(file);
  return sized == 0 ? kSuccess : kSystemError;
}

FAKE int ncclCommInitRankConfig(Comm** made, int ranks, UniqueId id, int rank, const void* config) {
  Visit(__func__);
  if (!HasContext()) return kInvalidUsage;
  struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
  } given;
  std::memcpy(&given, config, sizeof given);
  if (given.magic != 0xcafebeef || given.blocking != 0 || ranks > static_cast<int>(kMost)) {
    Violation("the configuration of a communicator");
    return kInvalidArgument;
  }
  static std::mutex mutex;
  static auto* all = new std::vector<Comm*>();  // kept: work in streams may use dead ones
  auto* comm = new Comm();
  {
    std::lock_guard<std::mutex> lock(mutex);
    all->push_back(comm);
  }
  const int file = shm_open(id.bytes, O_RDWR, 0600);
  if (file < 0) return kSystemError;
  comm->shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  // The last rank that needs the name removes it, so a rank that is killed later leaves no file.
  if (++comm->shared->mapped == ranks) shm_unlink(id.bytes);
  comm->name = id.bytes;
  comm->rank = rank;
  comm->ranks = ranks;
  ++counts.communicators;
  // Not joined: the thread that ends the communicator may be abandoned.
  std::thread([comm] {
    Start(comm);
    comm->start_ended = true;
  }).detach();
  *made = comm;
  return kInProgress;
}

FAKE int ncclCommGetAsyncError(Comm* comm, int* error) {
  Visit(__func__);
  if (comm->dead) Violation("an ended communicator is asked for errors");
  std::lock_guard<std::mutex> lock(comm->mutex);
  *error = comm->state;
  if (*error == kInProgress && !comm->waiting.empty()) {
    for (auto& [stream, work] : comm->waiting) {
      ++comm->under_way;
      Enqueue(stream, [comm, carry_out = work] {
        carry_out();
        --comm->under_way;
      });
    }
    comm->waiting.clear();
    comm->state = kSuccess;  // the next call returns it
  } else if (*error == kInProgress && comm->finalized) {
    comm->state = kSuccess;
  }
  if (settings.async_error_after >= 0 && counts.collectives > settings.async_error_after) {
    *error = kRemoteError;
  }
  return kSuccess;
}

FAKE int ncclCommFinalize(Comm* comm) {
  Visit(__func__);
  if (comm->dead || comm->aborted) Violation("an ended communicator is finalized");
  comm->finalized = true;
  comm->state = kInProgress;
  return kInProgress;
}
FAKE int ncclCommDestroy(Comm* comm) {
  Visit(__func__);
  return End(comm, false);
}
FAKE int ncclCommAbort(Comm* comm) {
  Visit(__func__);
  ++counts.aborts;
  return End(comm, true);
}

FAKE int ncclGroupStart() {
  Visit(__func__);
  ++depth;
  return kSuccess;
}
FAKE int ncclGroupEnd() {
  Visit(__func__);
  return EndGroup();
}

FAKE int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, Comm* comm,
                       void* stream) {
  Visit(__func__);
  const double factor = FactorOf(comm, op);
  return Collective(comm, stream, [=] {
    const Header header = HeaderOf("allreduce", count * SizeOf(type), type, op);
    const auto all = Exchange(*comm, header, Multiplied(type, factor, send, count).data());
    Reduce(type, op, all, count, static_cast<char*>(receive));
  });
}

FAKE int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root,
                       Comm* comm, void* stream) {
  Visit(__func__);
  return Collective(comm, stream, [=] {
    const Header header = HeaderOf("broadcast", count * SizeOf(type), type, 0, root);
    std::vector<Half> halves;
    auto* from = const_cast<char*>(static_cast<const char*>(send));
    for (int peer = 0; peer < comm->ranks && comm->rank == root; ++peer) {
      if (peer != root) halves.push_back({true, peer, from, header});
    }
    if (comm->rank != root) halves.push_back({false, root, static_cast<char*>(receive), header});
    if (comm->rank == root && send != receive) std::memcpy(receive, send, count * SizeOf(type));
    MoveAll(*comm, std::move(halves));
  });
}

FAKE int ncclReduce(const void* send, void* receive, size_t count, int type, int op, int root,
                    Comm* comm, void* stream) {
  Visit(__func__);
  const double factor = FactorOf(comm, op);
  return Collective(comm, stream, [=] {
    const Header header = HeaderOf("reduce", count * SizeOf(type), type, op, root);
    const auto all = Exchange(*comm, header, Multiplied(type, factor, send, count).data());
    if (comm->rank == root) Reduce(type, op, all, count, static_cast<char*>(receive));
  });
}

FAKE int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op,
                           Comm* comm, void* stream) {
  Visit(__func__);
  const double factor = FactorOf(comm, op);
  return Collective(comm, stream, [=] {
    const size_t bytes = count * SizeOf(type), ranks = static_cast<size_t>(comm->ranks);
    const Header header = HeaderOf("reducescatter", bytes * ranks, type, op);
    auto all = Exchange(*comm, header, Multiplied(type, factor, send, count * ranks).data());
    for (auto& each : all) {
      each.erase(each.begin(), each.begin() + static_cast<long>(bytes) * comm->rank);
    }
    Reduce(type, op, all, count, static_cast<char*>(receive));
  });
}

FAKE int ncclAllGather(const void* send, void* receive, size_t count, int type, Comm* comm,
                       void* stream) {
  Visit(__func__);
  return Collective(comm, stream, [=] {
    const size_t bytes = count * SizeOf(type);
    const auto all = Exchange(*comm, HeaderOf("allgather", bytes, type), send);
    for (size_t r = 0; r < all.size(); ++r) {
      std::memcpy(static_cast<char*>(receive) + r * bytes, all[r].data(), bytes);
    }
  });
}

FAKE int ncclSend(const void* send, size_t count, int type, int peer, Comm* comm, void* stream) {
  Visit(__func__);
  return PointToPoint(comm, stream, true, const_cast<void*>(send), count * SizeOf(type), peer);
}
FAKE int ncclRecv(void* receive, size_t count, int type, int peer, Comm* comm, void* stream) {
  Visit(__func__);
  return PointToPoint(comm, stream, false, receive, count * SizeOf(type), peer);
}

FAKE int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, Comm* comm) {
  Visit(__func__);
  if (residence != 1 || type < kFloat16) Violation("a factor that is not a float in host memory");
  *op = kPreMulSum + comm->operations++;
  comm->factors[*op] = Load(type, static_cast<const char*>(scalar));
  ++counts.operations;
  return kSuccess;
}
FAKE int ncclRedOpDestroy(int op, Comm* comm) {
  Visit(__func__);
  if (comm->factors.erase(op) == 0)
    Violation("the end of an operation that does not exist or has ended");
  --counts.operations;
  return kSuccess;
}

}  // extern "C"
