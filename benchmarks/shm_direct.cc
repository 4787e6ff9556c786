// How quick is the direct allreduce through shared memory, without the engine around it?
//
//   shm_direct [--ranks N]... [--bytes B]... [--tensors T] [--seconds S] [--spin-us U]
//
// Per rank count and size: in-place float32 sums of one tensor (or of T equal ones that make up
// the size together) among N processes, and a copy of as many bytes by all N processes at once;
// medians on rank 0 in microseconds. The copy goes to other memory, as a collective through
// copies must at least. algbw = size / time; busbw = algbw * 2 (N-1) / N, as nccl-tests define
// them. Without --spin-us: 50, or 5 where the ranks outnumber the cores.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "backend/shm_direct.h"
#include "base/clock.h"
#include "base/reduce.h"
#include "trace/trace.h"
#include "transport/shm_transport.h"

namespace {

using namespace hororing;

struct Options {
  std::vector<int> ranks;
  std::vector<size_t> bytes;
  size_t tensors = 1;
  double seconds = 1.0;  // per line
  TimeNs spin_ns = -1;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// What the processes of one run say to one another besides the segment.
struct Shared {
  std::atomic<int> wrong{0};
};

bool Reduce(ShmDirectBackend& backend, float* data, size_t elements, size_t tensors = 1) {
  static TraceSink trace;
  Batch batch;
  for (size_t t = 0; t < tensors; ++t) {
    BatchEntry entry;
    entry.name = "benchmark";
    entry.elements = elements * (t + 1) / tensors - elements * t / tensors;
    entry.input = entry.output = data + elements * t / tensors;
    batch.entries.push_back(entry);
  }
  const Status status = backend.Run(batch, After(NowNs(), 20 * kSecond), trace);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok();
}

// One rank's life. Rank 0 prints.
int RunRank(const Options& options, const std::string& name, int rank, int ranks, Shared& shared) {
  std::shared_ptr<ShmSegment> segment;
  const Status attached = ShmSegment::Attach(name, ShmSegment::Geometry::For(ranks), &segment);
  if (!attached.ok()) {
    std::fprintf(stderr, "%s\n", attached.message().c_str());
    return 1;
  }
  segment->rank_state(rank).pid = getpid();
  const bool crowded = ranks > sysconf(_SC_NPROCESSORS_ONLN);
  const TimeNs spin_ns = options.spin_ns >= 0 ? options.spin_ns : (crowded ? 5 : 50) * kMicrosecond;
  ShmTransport transport(segment, rank, spin_ns);
  ShmDirectBackend backend(transport, Members::World(transport.size()));
  for (size_t bytes : options.bytes) {
    const size_t elements = std::max<size_t>(bytes / 4, 1);
    std::vector<float> data(elements), copy(elements);
    float go = 0;
    // All start together, and all agree on the number of rounds.
    const auto rounds_for = [&](double once_s) {
      float rounds = static_cast<float>(std::clamp(options.seconds / once_s / 2, 5.0, 20000.0));
      if (rank != 0) rounds = 0;
      if (!Reduce(backend, &rounds, 1)) return -1;
      return static_cast<int>(rounds);
    };
    const auto seconds_since = [](TimeNs begin) {
      return static_cast<double>(NowNs() - begin) / 1e9;
    };

    for (size_t i = 0; i < elements; ++i) data[i] = static_cast<float>(i % 1000 + 1);
    if (!Reduce(backend, data.data(), elements, options.tensors)) return 1;
    for (size_t i = 0; i < elements; ++i) {
      if (data[i] != static_cast<float>(ranks) * static_cast<float>(i % 1000 + 1)) ++shared.wrong;
    }
    std::fill(data.begin(), data.end(), 0.0f);
    TimeNs begin = NowNs();
    for (int i = 0; i < 3; ++i) {
      if (!Reduce(backend, data.data(), elements, options.tensors)) return 1;
    }
    int rounds = rounds_for(seconds_since(begin) / 3);
    if (rounds < 0) return 1;
    std::vector<double> reduce_us, copy_us;
    for (int i = 0; i < rounds; ++i) {
      begin = NowNs();
      if (!Reduce(backend, data.data(), elements, options.tensors)) return 1;
      reduce_us.push_back(seconds_since(begin) * 1e6);
    }
    std::memcpy(copy.data(), data.data(), bytes);
    for (int i = 0; i < rounds; ++i) {
      if (i % 16 == 0 && !Reduce(backend, &go, 1)) return 1;
      begin = NowNs();
      std::memcpy(copy.data(), data.data(), bytes);
      asm volatile("" : : "r"(copy.data()) : "memory");
      copy_us.push_back(seconds_since(begin) * 1e6);
    }
    if (!Reduce(backend, &go, 1)) return 1;
    if (rank != 0) continue;
    const double t = Median(reduce_us), c = Median(copy_us);
    std::sort(reduce_us.begin(), reduce_us.end());
    const double gbps = static_cast<double>(bytes) / t / 1e3;
    std::printf("%5d %11zu %11.2f %11.2f %11.2f %11.2f %8.2f %8.2f %6d\n", ranks, bytes, t,
                reduce_us.front(), reduce_us[reduce_us.size() * 9 / 10], c, gbps,
                gbps * 2 * (ranks - 1) / ranks, rounds);
    std::fflush(stdout);
  }
  return 0;
}

int RunWorld(const Options& options, int ranks) {
  std::shared_ptr<ShmSegment> segment;
  const Status created = ShmSegment::Create(ShmSegment::Geometry::For(ranks), &segment);
  if (!created.ok()) {
    std::fprintf(stderr, "%s\n", created.message().c_str());
    return 1;
  }
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  Shared* shared = new (memory) Shared;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) _exit(RunRank(options, segment->name(), rank, ranks, *shared));
    children.push_back(child);
  }
  int failed = 0;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed += status != 0;
  }
  segment->Unlink();
  if (shared->wrong > 0) std::fprintf(stderr, "wrong sums: %d\n", shared->wrong.load());
  const int result = failed > 0 || shared->wrong > 0 ? 1 : 0;
  munmap(memory, sizeof(Shared));
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const char* value = argv[i + 1];
    if (flag == "--ranks") {
      options.ranks.push_back(std::atoi(value));
    } else if (flag == "--bytes") {
      options.bytes.push_back(std::strtoull(value, nullptr, 0));
    } else if (flag == "--tensors") {
      options.tensors = std::max<size_t>(std::strtoull(value, nullptr, 0), 1);
    } else if (flag == "--seconds") {
      options.seconds = std::atof(value);
    } else if (flag == "--spin-us") {
      options.spin_ns = static_cast<TimeNs>(std::atof(value) * 1e3);
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
  }
  if (options.ranks.empty()) options.ranks = {2, 4};
  if (options.bytes.empty()) options.bytes = {4, 16 << 10, 1 << 20, 4 << 20, 64 << 20};
  std::printf("kernels %s, times in us\n", KernelsInUse());
  std::printf(
      "ranks       bytes      median         min         p90        copy    algbw    "
      "busbw rounds\n");
  std::fflush(stdout);
  int result = 0;
  for (int ranks : options.ranks) result |= RunWorld(options, ranks);
  return result;
}
