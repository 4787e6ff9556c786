// Is it faster to read the private memory of another process than to copy through shared memory? An
// in-place float32 sum of two processes, by two methods that take turns:
//
//   packed   through the segment in cache-sized blocks (csrc/backend/allreduce_pipeline.cc)
//   read     each process reads half of the other's data with process_vm_readv into memory that
//            stays in the cache, adds its own, and then reads the other's sums into its own memory
//
// Prints the median and the fastest round on rank 0, in ms; see docs/adr/0017.

#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/shared_memory_backend.h"
#include "base/clock.h"
#include "base/reduce.h"
#include "trace/trace.h"
#include "transport/shm_transport.h"

namespace {

using namespace hororing;

constexpr size_t kReadAtATime = 128 << 10;  // the fastest of 32, 128 and 512 KiB

struct Peer {
  pid_t pid = 0;
  std::byte* data = nullptr;
};

// One of the two processes.
class Rank {
 public:
  Rank(std::shared_ptr<ShmSegment> segment, int rank, Peer* peers)
      : transport_(std::move(segment), rank, 50 * kMicrosecond),
        backend_(transport_, transport_, MakeTopology(rank, {"", ""}), Members::World(2), {}),
        rank_(static_cast<size_t>(rank)),
        peers_(peers),
        piece_(kReadAtATime / sizeof(float)) {}

  bool Packed(float* data, size_t elements) {
    Batch batch;
    BatchEntry entry;
    entry.elements = elements;
    entry.input = entry.output = data;
    batch.entries.push_back(entry);
    return backend_.Run(batch, After(NowNs(), 20 * kSecond), trace_).ok();
  }

  // REQUIRES: `data` is peers[rank].data and an even number of cache lines.
  bool Read(float* data, size_t elements) {
    const size_t half = elements / 2 * sizeof(float);
    std::byte* const own = reinterpret_cast<std::byte*>(data) + rank_ * half;
    std::byte* const others = reinterpret_cast<std::byte*>(data) + (1 - rank_) * half;
    if (!Meet()) return false;
    for (size_t done = 0; done < half; done += kReadAtATime) {
      const size_t bytes = std::min(kReadAtATime, half - done);
      if (!ReadPeer(rank_ * half + done, piece_.data(), bytes)) return false;
      const void* sources[] = {own + done, piece_.data()};
      ReduceMany(ReduceSpec(), 2, own + done, sources, 2, bytes / sizeof(float));
    }
    return Meet() && ReadPeer((1 - rank_) * half, others, half) && Meet();
  }

  bool Meet() {
    float none = 0;
    return Packed(&none, 1);
  }

 private:
  bool ReadPeer(size_t offset, void* into, size_t bytes) {
    const Peer& peer = peers_[1 - rank_];
    const iovec local{into, bytes}, remote{peer.data + offset, bytes};
    if (process_vm_readv(peer.pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes)) {
      return true;
    }
    std::perror("process_vm_readv");
    return false;
  }

  ShmTransport transport_;
  SharedMemoryBackend backend_;
  TraceSink trace_;
  const size_t rank_;
  Peer* const peers_;
  std::vector<float> piece_;
};

std::string Summary(std::vector<double>& times) {
  std::sort(times.begin(), times.end());
  char text[64];
  std::snprintf(text, sizeof(text), "%9.3f %9.3f", times[times.size() / 2], times.front());
  return text;
}

int RunRank(const std::string& name, int rank, Peer* peers) {
  std::shared_ptr<ShmSegment> segment;
  if (!ShmSegment::Attach(name, ShmSegment::Geometry::For(2), &segment).ok()) return 1;
  segment->rank_state(rank).pid = getpid();
  Rank self(std::move(segment), rank, peers);
  for (const size_t bytes :
       {size_t{64} << 10, size_t{1} << 20, size_t{4} << 20, size_t{64} << 20}) {
    std::vector<float> data(bytes / sizeof(float), 1.0f);
    peers[rank] = {getpid(), reinterpret_cast<std::byte*>(data.data())};
    const int rounds = bytes > (size_t{16} << 20) ? 21 : 201;
    std::vector<double> packed, read;
    const auto timed = [&](std::vector<double>& times, const std::function<bool()>& run) {
      std::fill(data.begin(), data.end(), 1.0f);
      if (!self.Meet()) return false;
      const TimeNs begin = NowNs();
      if (!run()) return false;
      times.push_back(static_cast<double>(NowNs() - begin) / 1e6);
      return std::all_of(data.begin(), data.end(), [](float each) { return each == 2.0f; });
    };
    for (int round = 0; round < rounds; ++round) {
      const bool right = timed(packed, [&] { return self.Packed(data.data(), data.size()); }) &&
                         timed(read, [&] { return self.Read(data.data(), data.size()); });
      if (!right) return 1;
    }
    if (rank == 0) {
      std::printf("%9zu %s %s\n", bytes, Summary(packed).c_str(), Summary(read).c_str());
    }
    if (!self.Meet()) return 1;
  }
  return 0;
}

}  // namespace

int main() {
  std::shared_ptr<ShmSegment> segment;
  if (!ShmSegment::Create(ShmSegment::Geometry::For(2), &segment).ok()) return 1;
  void* const memory =
      mmap(nullptr, 2 * sizeof(Peer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  std::printf("    bytes    packed   fastest      read   fastest\n");
  std::fflush(stdout);
  int failed = 0;
  for (int rank = 0; rank < 2; ++rank) {
    if (fork() != 0) continue;
    const int result = RunRank(segment->name(), rank, static_cast<Peer*>(memory));
    std::fflush(stdout);
    _exit(result);
  }
  for (int rank = 0; rank < 2; ++rank) {
    int status = 0;
    wait(&status);
    failed += status != 0;
  }
  return failed > 0 ? 1 : 0;
}
