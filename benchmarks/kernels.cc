// Bandwidth of the reduction kernels, by instruction set.
//
//   kernels [--seconds S]
//
// ReduceMany on one core, in place into the first source. GB/s counts the bytes that the algorithm
// must move: it reads every source and writes the result, (count + 1) * bytes. Sources of 256 KiB
// stay in the second-level cache; those of 64 MiB come from memory. The instruction sets take
// turns, so that a busy machine slows all of them alike. Prints the median over rounds. `copy` is
// memcpy of one source, (1 + 1) * bytes, for comparison.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/reduce.h"

namespace {

using namespace hororing;

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// One round. Repeats for at least a millisecond, so that the clock's resolution does not matter.
double SecondsEach(const std::function<void()>& body) {
  const TimeNs begin = NowNs();
  int64_t times = 0;
  TimeNs now = begin;
  do {
    body();
    ++times;
    now = NowNs();
  } while (now - begin < kMillisecond);
  return static_cast<double>(now - begin) / 1e9 / static_cast<double>(times);
}

void Measure(DataType dtype, ReduceOp op, int count, size_t bytes, double seconds) {
  const std::vector<const char*> sets = {"portable", "avx2", "avx512"};
  // Both operations keep zeros: no overflow and no subnormals, however often they run.
  std::vector<std::vector<char>> memory(static_cast<size_t>(count), std::vector<char>(bytes));
  std::vector<const void*> sources;
  for (const std::vector<char>& each : memory) sources.push_back(each.data());
  const ReduceSpec spec{dtype, op, 1.0, 1.0};
  const size_t n = bytes / ElementSize(dtype);

  std::vector<std::vector<double>> times(sets.size() + 1);
  const TimeNs end = NowNs() + static_cast<TimeNs>(seconds * 1e9);
  do {
    for (size_t s = 0; s < sets.size(); ++s) {
      if (!SetKernels(sets[s])) continue;
      times[s].push_back(SecondsEach(
          [&] { ReduceMany(spec, count, memory[0].data(), sources.data(), count, n); }));
    }
    times.back().push_back(
        SecondsEach([&] { std::memcpy(memory[0].data(), memory[1].data(), bytes); }));
  } while (NowNs() < end);

  std::printf("%-9s %-8s %7d %9zu", Name(dtype), Name(op), count, bytes >> 10);
  for (size_t s = 0; s < times.size(); ++s) {
    const double moved = static_cast<double>(bytes) * (s < sets.size() ? count + 1 : 2);
    if (times[s].empty())
      std::printf(" %9s", "-");
    else
      std::printf(" %9.1f", moved / Median(times[s]) / 1e9);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 0.3;  // per line
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: kernels [--seconds S]\n");
      return 2;
    }
  }
  std::printf("best set here: %s; GB/s\n", KernelsInUse());
  std::printf("%-9s %-8s %7s %9s %9s %9s %9s %9s\n", "dtype", "op", "sources", "KiB each",
              "portable", "avx2", "avx512", "copy");
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBfloat16}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      for (const int count : {2, 3, 4, 8}) {
        for (const size_t bytes : {size_t{256} << 10, size_t{64} << 20}) {
          Measure(dtype, op, count, bytes, seconds);
        }
      }
    }
  }
  return 0;
}
