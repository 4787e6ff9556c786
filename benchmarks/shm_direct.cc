// Speed of the direct allreduce through shared memory, without the engine.
//
//   shm_direct [--ranks N]... [--bytes B]... [--dtype D]... [--tensors T] [--seconds S]
//              [--spin-us U] [--pin 1]
//
// For each number of ranks, size and dtype (default float32), two measurements take turns: in-place
// sums of one tensor (or of T equal ones with that total size) among N processes, and a copy of as
// many bytes by all N processes at once, until the last one is done. Printed are medians and
// 5th percentiles on rank 0, in us. Sizes are those of float32; other dtypes have as many elements.
// An allreduce must read S and write S bytes per rank, as the copy does, so "of limit", copy / sum,
// is the share of the memory bandwidth that it uses. algbw = size / time of the sum. --spin-us is
// 50 by default, or 5 if there are more ranks than cores. --pin binds rank r to core r.

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "backend/shared_memory_backend.h"
#include "base/clock.h"
#include "kernels/half.h"
#include "kernels/reduce.h"
#include "trace/trace.h"
#include "transport/shm/shm_transport.h"

namespace {

using namespace hororing;

struct Options {
  std::vector<int> ranks;
  std::vector<size_t> bytes;
  std::vector<DataType> dtypes;
  size_t tensors = 1;
  double seconds = 1.0;  // per line
  TimeNs spin_ns = -1;
  bool pin = false;
};

// Memory that the processes of one run share, besides the segment.
struct Shared {
  std::atomic<int> wrong{0};
};

bool Reduce(SharedMemoryBackend& backend, void* data, size_t elements, size_t tensors = 1,
            DataType dtype = DataType::kFloat32) {
  static TraceSink trace;
  Batch batch;
  for (size_t t = 0; t < tensors; ++t) {
    const size_t begin = elements * t / tensors;
    BatchEntry entry;
    entry.name = "benchmark";
    entry.elements = elements * (t + 1) / tensors - begin;
    entry.reduce.dtype = dtype;
    entry.input = entry.output = static_cast<std::byte*>(data) + begin * ElementSize(dtype);
    batch.entries.push_back(entry);
  }
  const Status status = backend.Run(batch, After(NowNs(), 20 * kSecond), trace);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok();
}

// Converts small integers, whose sums are exact in every dtype, to the dtype's bytes and back.
void Store(DataType dtype, void* data, size_t i, float value) {
  if (dtype == DataType::kFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<uint16_t*>(data)[i] =
        dtype == DataType::kFloat16 ? FloatToHalf(value) : FloatToBfloat16(value);
  }
}
float Load(DataType dtype, const void* data, size_t i) {
  if (dtype == DataType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == DataType::kFloat16 ? HalfToFloat(bits) : Bfloat16ToFloat(bits);
}

struct Times {
  std::vector<double> us;
  void Add(TimeNs begin) { us.push_back(static_cast<double>(NowNs() - begin) / 1e3); }
  double median() const { return At(0.5); }
  // The 5th percentile: the speed when the machine is quiet.
  double best() const { return At(0.05); }
  double At(double share) const {
    std::vector<double> sorted = us;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size()))];
  }
};

// One dtype: its memory and its times.
struct Contest {
  Contest(DataType of, size_t size) : dtype(of), bytes(size), data(size), copy(size) {}

  DataType dtype;
  size_t bytes;
  std::vector<std::byte> data, copy;
  Times summed, copied;
};

void Print(const Contest& contest, int ranks, int rounds) {
  for (const bool quiet : {false, true}) {
    const auto time = [&](const Times& times) { return quiet ? times.best() : times.median(); };
    std::printf("%5d %11zu %-8s %7s %11.2f %11.2f %8.2f %8.2f %6d\n", ranks, contest.bytes,
                Name(contest.dtype), quiet ? "5 %" : "median", time(contest.summed),
                time(contest.copied), time(contest.copied) / time(contest.summed),
                static_cast<double>(contest.bytes) / time(contest.summed) / 1e3, rounds);
  }
  std::fflush(stdout);
}

// Runs one rank. Rank 0 prints.
int RunRank(const Options& options, const std::string& name, int rank, int ranks, Shared& shared) {
  std::shared_ptr<ShmSegment> segment;
  const Status attached = ShmSegment::Attach(name, ShmSegment::Geometry::For(ranks), &segment);
  if (!attached.ok()) {
    std::fprintf(stderr, "%s\n", attached.message().c_str());
    return 1;
  }
  if (options.pin) {
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(static_cast<size_t>(rank % sysconf(_SC_NPROCESSORS_ONLN)), &core);
    sched_setaffinity(0, sizeof core, &core);
  }
  const bool crowded = ranks > sysconf(_SC_NPROCESSORS_ONLN);
  const TimeNs spin_ns = options.spin_ns >= 0 ? options.spin_ns : (crowded ? 5 : 50) * kMicrosecond;
  ShmTransport transport(segment, rank, spin_ns);
  const Topology topology =
      MakeTopology(rank, std::vector<std::string>(static_cast<size_t>(ranks)));
  SharedMemoryBackend backend(transport, transport, topology, Members::World(ranks), {});
  float go = 0;
  for (size_t bytes : options.bytes) {
    const size_t elements = std::max<size_t>(bytes / 4, 1);
    std::vector<Contest> contests;
    for (const DataType dtype : options.dtypes) {
      contests.emplace_back(dtype, elements * ElementSize(dtype));
    }
    const auto reduce = [&](Contest& contest) {
      return Reduce(backend, contest.data.data(), elements, options.tensors, contest.dtype);
    };
    for (Contest& contest : contests) {
      void* const tensor = contest.data.data();
      const auto value = [](size_t i) { return static_cast<float>(i % 31 + 1); };
      for (size_t i = 0; i < elements; ++i) Store(contest.dtype, tensor, i, value(i));
      if (!reduce(contest)) return 1;
      for (size_t i = 0; i < elements; ++i) {
        if (Load(contest.dtype, tensor, i) != static_cast<float>(ranks) * value(i)) ++shared.wrong;
      }
      std::memset(tensor, 0, contest.bytes);
    }
    const TimeNs warm_up = NowNs();
    for (int i = 0; i < 3; ++i) {
      for (Contest& contest : contests) {
        if (!reduce(contest)) return 1;
      }
    }
    // All agree on the number of rounds.
    const double once_s = static_cast<double>(NowNs() - warm_up) / 3e9;
    float rounds = static_cast<float>(std::clamp(options.seconds / once_s / 2, 5.0, 20000.0));
    if (rank != 0) rounds = 0;
    if (!Reduce(backend, &rounds, 1)) return 1;
    for (int i = 0; i < static_cast<int>(rounds); ++i) {
      for (Contest& contest : contests) {
        TimeNs begin = NowNs();
        if (!reduce(contest)) return 1;
        contest.summed.Add(begin);
        if (!Reduce(backend, &go, 1)) return 1;
        begin = NowNs();
        std::memcpy(contest.copy.data(), contest.data.data(), contest.bytes);
        asm volatile("" : : "r"(contest.copy.data()) : "memory");
        if (!Reduce(backend, &go, 1)) return 1;  // waits until all have copied
        contest.copied.Add(begin);
      }
    }
    for (Contest& contest : contests) {
      if (rank == 0) Print(contest, ranks, static_cast<int>(rounds));
    }
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
    } else if (flag == "--dtype") {
      const DataType known[] = {DataType::kFloat32, DataType::kFloat16, DataType::kBfloat16};
      const auto* const found =
          std::find_if(std::begin(known), std::end(known),
                       [&](DataType each) { return std::strcmp(Name(each), value) == 0; });
      if (found == std::end(known)) {
        std::fprintf(stderr, "no dtype %s here\n", value);
        return 2;
      }
      options.dtypes.push_back(*found);
    } else if (flag == "--tensors") {
      options.tensors = std::max<size_t>(std::strtoull(value, nullptr, 0), 1);
    } else if (flag == "--seconds") {
      options.seconds = std::atof(value);
    } else if (flag == "--pin") {
      options.pin = std::atoi(value) != 0;
    } else if (flag == "--spin-us") {
      options.spin_ns = static_cast<TimeNs>(std::atof(value) * 1e3);
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
  }
  if (options.ranks.empty()) options.ranks = {2, 4};
  if (options.dtypes.empty()) options.dtypes = {DataType::kFloat32};
  if (options.bytes.empty()) options.bytes = {4, 16 << 10, 1 << 20, 4 << 20, 64 << 20};
  std::printf("kernels %s, times in us\n", KernelsInUse());
  std::printf(
      "ranks       bytes dtype         of         sum        copy of limit    algbw rounds\n");
  std::fflush(stdout);
  int result = 0;
  for (int ranks : options.ranks) result |= RunWorld(options, ranks);
  return result;
}
