// The functions of libnccl that csrc/device uses. Ranks are threads or processes: a communicator is
// a file of shared memory with a mailbox for every ordered pair of ranks.
//
// As with the real one a collective does nothing before its group has ended and, since
// communicators do not block, before comm_async_error has been asked afterwards: whoever records
// an event earlier sees it come too soon.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/half.h"
#include "fake_gpu.h"
#include "state.h"

namespace fake_gpu {
namespace {

enum Result {
  kSuccess = 0,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};
enum Type {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16
};
enum Op { kSum, kProd, kMax, kMin, kAvg, kPreMulSum };

size_t SizeOf(int type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[type];
}

constexpr size_t kMost = 16;            // ranks
constexpr size_t kBoxBytes = 32 << 10;  // that a mailbox holds at a time

struct Box {
  std::atomic<uint32_t> bytes;  // 0: empty
  char data[kBoxBytes];
};
struct Shared {
  std::atomic<int32_t> ranks, arrived, left;
  Box boxes[kMost][kMost];  // from, to
};

// What one rank sends another; the receiver checks that it expects the same.
struct Header {
  char what[16];
  int64_t bytes;
  int32_t type, op, root, number;
};

struct Comm {
  Shared* shared = nullptr;
  std::string name;
  int rank = 0, ranks = 1;
  std::atomic<int> state{kInProgress};  // what comm_async_error says
  std::atomic<bool> aborted{false}, dead{false};
  std::thread starter;
  // Of a group that has ended, until comm_async_error is asked.
  std::mutex mutex;
  std::vector<std::pair<void*, std::function<void()>>> waiting;
  std::vector<double> factors;  // of operations made here
};

// One half of a transfer: a header, then the bytes.
struct Half {
  bool sends;
  int peer;
  char* data;
  Header header;
  size_t done = 0;  // bytes, the header's included
  size_t total() const { return sizeof header + static_cast<size_t>(header.bytes); }
  Header found = {};
};

// Moves what can be moved; false when nothing could.
bool Move(Comm& comm, Half& half) {
  const size_t me = static_cast<size_t>(comm.rank), peer = static_cast<size_t>(half.peer);
  Box& box = half.sends ? comm.shared->boxes[me][peer] : comm.shared->boxes[peer][me];
  const uint32_t full = box.bytes.load(std::memory_order_acquire);
  if (half.done == half.total() || half.sends != (full == 0)) return false;
  constexpr size_t kHead = sizeof(Header);
  if (half.sends) {
    const bool head = half.done == 0;
    const size_t bytes = head ? kHead : std::min(half.total() - half.done, kBoxBytes);
    std::memcpy(box.data,
                head ? reinterpret_cast<char*>(&half.header) : half.data + half.done - kHead,
                bytes);
    half.done += bytes;
    box.bytes.store(static_cast<uint32_t>(bytes), std::memory_order_release);
    return true;
  }
  if (half.done == 0) {
    std::memcpy(&half.found, box.data, kHead);
    if (std::memcmp(&half.found, &half.header, kHead) != 0) {
      Violation(std::string("ranks disagree: ") + half.found.what + " of " +
                std::to_string(half.found.bytes) + " bytes came, " + half.header.what + " of " +
                std::to_string(half.header.bytes) + " was expected");
      comm.state = kInvalidUsage;
      return false;
    }
  } else {
    std::memcpy(half.data + half.done - kHead, box.data, full);
  }
  half.done += half.done == 0 ? kHead : full;
  box.bytes.store(0, std::memory_order_release);
  return true;
}

// Until all is moved, or the communicator is aborted.
void MoveAll(Comm& comm, std::vector<Half> halves) {
  const bool hangs = settings.hang_after >= 0 && counts.collectives > settings.hang_after;
  for (;;) {
    bool moved = false, done = !hangs;
    // Messages of one pair have one order.
    std::map<std::pair<bool, int>, bool> busy;
    for (Half& half : halves) {
      if (half.done == half.total()) continue;
      bool& pair = busy[{half.sends, half.peer}];
      if (!pair && !hangs) moved |= Move(comm, half);
      pair = true;
      done = false;
    }
    if (done || comm.aborted) return;
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Header HeaderOf(const char* what, size_t bytes, int type, int op = 0, int root = 0) {
  Header header = {};
  std::strncpy(header.what, what, sizeof header.what - 1);
  header.bytes = static_cast<int64_t>(bytes);
  header.type = type;
  header.op = op;
  header.root = root;
  return header;
}

double Load(int type, const char* at) {
  uint16_t half = 0;
  uint32_t bits = 0;
  switch (type) {
    case kInt8: return *reinterpret_cast<const int8_t*>(at);
    case kUint8: return *reinterpret_cast<const uint8_t*>(at);
    case kFloat16:
      std::memcpy(&half, at, 2);
      return static_cast<double>(hororing::HalfToFloat(half));
    case kBfloat16: {
      std::memcpy(&half, at, 2);
      bits = static_cast<uint32_t>(half) << 16;
      float value = 0;
      std::memcpy(&value, &bits, 4);
      return static_cast<double>(value);
    }
    case kFloat32: {
      float value = 0;
      std::memcpy(&value, at, 4);
      return static_cast<double>(value);
    }
    default: {
      double value = 0;
      std::memcpy(&value, at, 8);
      return value;
    }
  }
}

void Store(int type, char* at, double value) {
  uint16_t half = 0;
  const float narrow = static_cast<float>(value);
  switch (type) {
    case kInt8: *at = static_cast<char>(static_cast<int64_t>(value)); return;
    case kUint8: *at = static_cast<char>(static_cast<int64_t>(value)); return;
    case kFloat16:
      half = hororing::FloatToHalf(narrow);
      std::memcpy(at, &half, 2);
      return;
    case kBfloat16: {
      uint32_t bits = 0;
      std::memcpy(&bits, &narrow, 4);
      half = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest even
      std::memcpy(at, &half, 2);
      return;
    }
    case kFloat32: std::memcpy(at, &narrow, 4); return;
    default: std::memcpy(at, &value, 8); return;
  }
}

// Integers of four and eight bytes in their own arithmetic, which wraps around.
template <typename Number, typename Wide>
void ReduceIntegers(int op, const std::vector<std::vector<char>>& inputs, size_t count, char* out) {
  for (size_t i = 0; i < count; ++i) {
    Wide total = 0;
    for (size_t r = 0; r < inputs.size(); ++r) {
      Number number = 0;
      std::memcpy(&number, inputs[r].data() + i * sizeof number, sizeof number);
      const Wide value = static_cast<Wide>(number);
      const Number so_far = static_cast<Number>(total);
      if (r == 0)
        total = value;
      else if (op == kSum || op == kAvg)
        total += value;
      else if (op == kProd)
        total *= value;
      else if ((op == kMax) == (number > so_far))
        total = value;
    }
    Number result = static_cast<Number>(total);
    if (op == kAvg) result = static_cast<Number>(result / static_cast<Number>(inputs.size()));
    std::memcpy(out + i * sizeof result, &result, sizeof result);
  }
}

void Reduce(int type, int op, double factor, const std::vector<std::vector<char>>& inputs,
            size_t count, char* out) {
  if (type == kInt32) return ReduceIntegers<int32_t, uint32_t>(op, inputs, count, out);
  if (type == kInt64) return ReduceIntegers<int64_t, uint64_t>(op, inputs, count, out);
  const size_t size = SizeOf(type);
  for (size_t i = 0; i < count; ++i) {
    double total = 0;
    for (size_t r = 0; r < inputs.size(); ++r) {
      double value = Load(type, inputs[r].data() + i * size);
      if (op >= kPreMulSum) value *= factor;
      if (r == 0)
        total = value;
      else if (op == kSum || op == kAvg || op >= kPreMulSum)
        total += value;
      else if (op == kProd)
        total *= value;
      else
        total = op == kMax ? std::max(total, value) : std::min(total, value);
    }
    if (op == kAvg) total /= static_cast<double>(inputs.size());
    if (op == kAvg && type < kFloat16) total = std::trunc(total);
    Store(type, out + i * size, total);
  }
}

// Every rank's `send` of `bytes`; those of this rank are taken as they are.
std::vector<std::vector<char>> Exchange(Comm& comm, const Header& header, const void* send) {
  std::vector<std::vector<char>> all(static_cast<size_t>(comm.ranks));
  std::vector<Half> halves;
  const char* mine = static_cast<const char*>(send);
  std::vector<char> out(mine, mine + header.bytes);
  for (int peer = 0; peer < comm.ranks; ++peer) {
    std::vector<char>& theirs = all[static_cast<size_t>(peer)];
    theirs.resize(static_cast<size_t>(header.bytes));
    if (peer == comm.rank) theirs = out;
    if (peer == comm.rank) continue;
    halves.push_back({true, peer, out.data(), header});
    halves.push_back({false, peer, theirs.data(), header});
  }
  MoveAll(comm, std::move(halves));
  return all;
}

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

bool Usable(Comm* comm) {
  if (!HasContext()) return false;
  const bool usable = comm != nullptr && !comm->dead && !comm->aborted && comm->state == kSuccess;
  if (!usable) Violation("a collective on a communicator that is not ready, or no more");
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

// All sends and receives of a group go at the same time.
void TogetherWith(Comm& comm, std::vector<Half> halves) {
  std::vector<Half> moved;
  std::vector<const Half*> to_self, from_self;
  for (const Half& half : halves) {
    if (half.peer != comm.rank)
      moved.push_back(half);
    else
      (half.sends ? to_self : from_self).push_back(&half);
  }
  if (to_self.size() != from_self.size()) Violation("sends to itself without receives");
  for (size_t i = 0; i < std::min(to_self.size(), from_self.size()); ++i) {
    std::memcpy(from_self[i]->data, to_self[i]->data,
                static_cast<size_t>(to_self[i]->header.bytes));
  }
  MoveAll(comm, std::move(moved));
}

int EndGroup() {
  if (depth == 0) {
    Violation("a group ends that has not begun");
    return kInvalidUsage;
  }
  if (--depth > 0) return kSuccess;
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
  return op >= kPreMulSum ? comm->factors[static_cast<size_t>(op - kPreMulSum)] : 1;
}

// The rest of a communicator's making: waits for the other ranks.
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
  if (comm->starter.joinable()) comm->starter.join();
  if (++comm->shared->left >= comm->ranks || abort) shm_unlink(comm->name.c_str());
  --counts.communicators;
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
  *version = static_cast<int>(settings.nccl_version);
  return kSuccess;
}
FAKE const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited or there was a network error"
                                : "the fake says no";
}
FAKE const char* ncclGetLastError(void*) { return "last words of the fake"; }

FAKE int ncclGetUniqueId(UniqueId* id) {
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
  static auto* all = new std::vector<Comm*>();  // kept: work in streams may look at dead ones
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
  comm->name = id.bytes;
  comm->rank = rank;
  comm->ranks = ranks;
  ++counts.communicators;
  comm->starter = std::thread([comm] { Start(comm); });
  *made = comm;
  return kInProgress;
}

FAKE int ncclCommGetAsyncError(Comm* comm, int* error) {
  if (comm->dead) Violation("an ended communicator is asked for errors");
  std::lock_guard<std::mutex> lock(comm->mutex);
  *error = comm->state;
  if (*error == kInProgress && !comm->waiting.empty()) {
    for (auto& [stream, work] : comm->waiting) Enqueue(stream, work);
    comm->waiting.clear();
    comm->state = kSuccess;  // to be seen the next time
  }
  if (settings.async_error_after >= 0 && counts.collectives > settings.async_error_after) {
    *error = kRemoteError;
  }
  return kSuccess;
}

FAKE int ncclCommFinalize(Comm* comm) {
  if (comm->dead || comm->aborted) Violation("an ended communicator is finalized");
  return kSuccess;
}
FAKE int ncclCommDestroy(Comm* comm) { return End(comm, false); }
FAKE int ncclCommAbort(Comm* comm) {
  ++counts.aborts;
  return End(comm, true);
}

FAKE int ncclGroupStart() {
  ++depth;
  return kSuccess;
}
FAKE int ncclGroupEnd() { return EndGroup(); }

FAKE int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, Comm* comm,
                       void* stream) {
  const double factor = FactorOf(comm, op);
  return Collective(comm, stream, [=] {
    const auto all = Exchange(*comm, HeaderOf("allreduce", count * SizeOf(type), type, op), send);
    Reduce(type, op, factor, all, count, static_cast<char*>(receive));
  });
}

FAKE int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root,
                       Comm* comm, void* stream) {
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
  const double factor = FactorOf(comm, op);
  return Collective(comm, stream, [=] {
    const Header header = HeaderOf("reduce", count * SizeOf(type), type, op, root);
    const auto all = Exchange(*comm, header, send);
    if (comm->rank == root) Reduce(type, op, factor, all, count, static_cast<char*>(receive));
  });
}

FAKE int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op,
                           Comm* comm, void* stream) {
  const double factor = FactorOf(comm, op);
  return Collective(comm, stream, [=] {
    const size_t bytes = count * SizeOf(type), ranks = static_cast<size_t>(comm->ranks);
    auto all = Exchange(*comm, HeaderOf("reducescatter", bytes * ranks, type, op), send);
    for (auto& each : all) {
      each.erase(each.begin(), each.begin() + static_cast<long>(bytes) * comm->rank);
    }
    Reduce(type, op, factor, all, count, static_cast<char*>(receive));
  });
}

FAKE int ncclAllGather(const void* send, void* receive, size_t count, int type, Comm* comm,
                       void* stream) {
  return Collective(comm, stream, [=] {
    const size_t bytes = count * SizeOf(type);
    const auto all = Exchange(*comm, HeaderOf("allgather", bytes, type), send);
    for (size_t r = 0; r < all.size(); ++r) {
      std::memcpy(static_cast<char*>(receive) + r * bytes, all[r].data(), bytes);
    }
  });
}

FAKE int ncclSend(const void* send, size_t count, int type, int peer, Comm* comm, void* stream) {
  return PointToPoint(comm, stream, true, const_cast<void*>(send), count * SizeOf(type), peer);
}
FAKE int ncclRecv(void* receive, size_t count, int type, int peer, Comm* comm, void* stream) {
  return PointToPoint(comm, stream, false, receive, count * SizeOf(type), peer);
}

FAKE int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, Comm* comm) {
  if (residence != 1 || type < kFloat16) Violation("a factor that is no float of the host");
  comm->factors.push_back(Load(type, static_cast<const char*>(scalar)));
  *op = kPreMulSum + static_cast<int>(comm->factors.size()) - 1;
  return kSuccess;
}
FAKE int ncclRedOpDestroy(int, Comm*) { return kSuccess; }

FAKE int ncclMemAlloc(void** memory, size_t bytes) {
  ++counts.memory;
  *memory = std::malloc(bytes);
  return HasContext() ? kSuccess : kInvalidUsage;
}
FAKE int ncclMemFree(void* memory) {
  --counts.memory;
  std::free(memory);
  return kSuccess;
}
FAKE int ncclCommRegister(Comm* comm, void*, size_t, void** handle) {
  if (!Usable(comm)) return kInvalidUsage;
  ++counts.registered;
  *handle = comm;
  return kSuccess;
}
FAKE int ncclCommDeregister(Comm* comm, void*) {
  if (comm->dead) Violation("memory is deregistered at an ended communicator");
  --counts.registered;
  return kSuccess;
}

}  // extern "C"
