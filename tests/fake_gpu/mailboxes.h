// Moves bytes between the ranks of a fake communicator, through a shared-memory file with a mailbox
// for every ordered pair of ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fake_gpu {

enum Result {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

constexpr size_t kMost = 16;            // ranks
constexpr size_t kBoxBytes = 32 << 10;  // capacity of a mailbox

struct Box {
  std::atomic<uint32_t> bytes;  // 0: empty
  char data[kBoxBytes];
};
struct Shared {
  std::atomic<int32_t> ranks, arrived, mapped;
  Box boxes[kMost][kMost];  // from, to
};

// What one rank sends another; the receiver checks that it expects the same.
struct Header {
  char what[16];
  int64_t bytes;
  int32_t type, op, root;
  int32_t unused = 0;  // instead of padding, which memcmp would compare, too
};

struct Comm {
  Shared* shared = nullptr;
  std::string name;
  int rank = 0, ranks = 1;
  std::atomic<int> state{kInProgress};  // the result of ncclCommGetAsyncError
  std::atomic<bool> aborted{false}, dead{false}, finalized{false};
  std::atomic<int> under_way{0};         // collectives in streams
  std::atomic<bool> start_ended{false};  // of the thread that waits for the other ranks
  // Work of a group that has ended, until ncclCommGetAsyncError is called.
  std::mutex mutex;
  std::vector<std::pair<void*, std::function<void()>>> waiting;
  std::map<int, double> factors;  // of live operations
  int operations = 0;             // created so far
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

// Returns when everything has been moved, or the communicator is aborted.
void MoveAll(Comm& comm, std::vector<Half> halves);
Header HeaderOf(const char* what, size_t bytes, int type, int op = 0, int root = 0);
// Returns the `send` buffers of all ranks; their size is the header's `bytes`.
std::vector<std::vector<char>> Exchange(Comm& comm, const Header& header, const void* send);
// Does the sends and receives of one group at the same time.
void TogetherWith(Comm& comm, const std::vector<Half>& halves);

}  // namespace fake_gpu
