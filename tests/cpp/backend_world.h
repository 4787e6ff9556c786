// Worlds of threads and allreduce cases with their oracle, for the tests of backends.
//
// reduce_test.cc tests the arithmetic itself; here ReduceMany over all inputs at once is the oracle
// for the bits of a sum in rank order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/host_backend.h"
#include "backend/shared_memory_backend.h"
#include "base/clock.h"
#include "check.h"
#include "kernels/reduce.h"
#include "trace/trace.h"
#include "transport/factory.h"
#include "transport/shm/shm_transport.h"

namespace hororing {

using Bytes = std::vector<unsigned char>;
constexpr TimeNs kLimit = 60 * kSecond;  // a hang fails the test

// A backend for `members`, all of one host, over `shared`.
inline std::unique_ptr<SharedMemoryBackend> DirectBackend(ShmTransport& shared,
                                                          const Members& members,
                                                          const AllreduceOptions& options = {}) {
  const auto size = static_cast<size_t>(shared.size());
  return std::make_unique<SharedMemoryBackend>(
      shared, shared, MakeTopology(shared.rank(), std::vector<std::string>(size)), members,
      options);
}

// N ranks as threads, each with both backends.
struct Rank {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<SharedMemoryBackend> direct;
  std::unique_ptr<HostBackend> host;
  TraceSink trace;

  Backend& backend(const std::string& name) {
    return name == "host" ? static_cast<Backend&>(*host) : *direct;
  }
};

class TestWorld {
 public:
  explicit TestWorld(int size, const AllreduceOptions& options = {}) {
    for (auto& transport : MakeInprocWorld(size, 20 * kMicrosecond)) {
      auto rank = std::make_unique<Rank>();
      rank->transport = std::move(transport);
      auto& shared = dynamic_cast<ShmTransport&>(*rank->transport);
      rank->direct = DirectBackend(shared, Members::World(shared.size()), options);
      rank->host = std::make_unique<HostBackend>(*rank->transport, options);
      ranks_.push_back(std::move(rank));
    }
  }
  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& rank(int r) { return *ranks_[static_cast<size_t>(r)]; }

  // body(r, rank) on one thread per rank.
  void Run(const std::function<void(int, Rank&)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) threads.emplace_back([&, r] { body(r, rank(r)); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Memory for one tensor that starts `shift` elements after a cache line, between guards.
class Guarded {
 public:
  Guarded(size_t bytes, size_t shift_bytes) : bytes_(bytes) {
    memory_.assign(kGuard + shift_bytes + bytes + kGuard + 64, 0xA5);
    const size_t misfit = reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    begin_ = kGuard + (64 - misfit) % 64 + shift_bytes;
  }
  unsigned char* data() { return memory_.data() + begin_; }
  bool intact() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && memory_[i] != 0xA5) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 128;
  Bytes memory_;
  size_t bytes_, begin_ = 0;
};

inline float HalfToFloat(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const float fraction = static_cast<float>(bits & 1023);
  const float size = exponent == 0    ? std::ldexp(fraction, -24)
                     : exponent == 31 ? (fraction > 0 ? NAN : INFINITY)
                                      : std::ldexp(fraction + 1024, exponent - 25);
  return bits >> 15 != 0 ? -size : size;
}

inline bool IsFloat(DataType dtype) {
  return dtype == DataType::kFloat16 || dtype == DataType::kBfloat16 ||
         dtype == DataType::kFloat32 || dtype == DataType::kFloat64;
}

inline double ElementAt(DataType dtype, const unsigned char* data, size_t i) {
  const unsigned char* at = data + i * ElementSize(dtype);
  uint16_t half = 0;
  switch (dtype) {
    case DataType::kFloat64: {
      double value = 0;
      std::memcpy(&value, at, 8);
      return value;
    }
    case DataType::kFloat32: {
      float value = 0;
      std::memcpy(&value, at, 4);
      return static_cast<double>(value);
    }
    case DataType::kBfloat16: {
      std::memcpy(&half, at, 2);
      const uint32_t wide = static_cast<uint32_t>(half) << 16;
      float value = 0;
      std::memcpy(&value, &wide, 4);
      return static_cast<double>(value);
    }
    default: std::memcpy(&half, at, 2); return static_cast<double>(HalfToFloat(half));
  }
}

// Moderate values of both signs, whose sums and products stay in the type's range.
inline void Fill(DataType dtype, unsigned char* data, size_t elements, std::mt19937& random) {
  for (size_t i = 0; i < elements; ++i) {
    const int value = static_cast<int>(random() % 4001) - 2000;
    unsigned char* at = data + i * ElementSize(dtype);
    const float real = static_cast<float>(value) / 1024;
    uint32_t bits = 0;
    std::memcpy(&bits, &real, 4);
    switch (dtype) {
      case DataType::kBool: *at = static_cast<unsigned char>(value & 1); break;
      case DataType::kUint8:
      case DataType::kInt8: *at = static_cast<unsigned char>(value % 50); break;
      case DataType::kUint16:
      case DataType::kInt16: {
        const auto small = static_cast<int16_t>(value);
        std::memcpy(at, &small, 2);
        break;
      }
      case DataType::kInt32: std::memcpy(at, &value, 4); break;
      case DataType::kInt64: {
        const int64_t wide = static_cast<int64_t>(value) * 1000003;
        std::memcpy(at, &wide, 8);
        break;
      }
      case DataType::kFloat16: {  // +-[1, 2): the fraction is random
        const auto half = static_cast<uint16_t>((value < 0 ? 0xBC00 : 0x3C00) | (value & 1023));
        std::memcpy(at, &half, 2);
        break;
      }
      case DataType::kBfloat16: {
        const auto top = static_cast<uint16_t>(bits >> 16);
        std::memcpy(at, &top, 2);
        break;
      }
      case DataType::kFloat32: std::memcpy(at, &real, 4); break;
      case DataType::kFloat64: {
        const double wide = value / 1021.0;
        std::memcpy(at, &wide, 8);
        break;
      }
    }
  }
}

inline const auto kAllTypes = hororing_test::AllOrFew<DataType>(
    {DataType::kUint8, DataType::kInt8, DataType::kUint16, DataType::kInt16, DataType::kInt32,
     DataType::kInt64, DataType::kFloat16, DataType::kFloat32, DataType::kFloat64, DataType::kBool,
     DataType::kBfloat16},
    {DataType::kFloat16, DataType::kFloat32, DataType::kInt64});

// Marks a spec: a Case replaces it by its own weights, one per rank.
inline const std::vector<double> kWeighted;

// Every valid combination of dtype and op, with and without factors.
inline std::vector<ReduceSpec> AllSpecs() {
  std::vector<ReduceSpec> specs;
  for (DataType dtype : kAllTypes) {
    for (ReduceOp op :
         {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (bool factors : {false, true}) {
        const ReduceSpec spec{dtype, op, factors ? 0.5 : 1.0, factors ? 1.25 : 1.0};
        if (Check(spec).ok()) specs.push_back(spec);
      }
    }
  }
  return specs;
}

// AllSpecs, and weighted averages.
inline std::vector<ReduceSpec> AllreduceSpecs() {
  std::vector<ReduceSpec> specs = AllSpecs();
  for (const ReduceSpec& spec : AllSpecs()) {
    if (spec.op != ReduceOp::kAverage || !IsFloat(spec.dtype)) continue;
    specs.push_back(spec);
    specs.back().weights = &kWeighted;
  }
  return specs;
}

// One batch that all ranks agree on, with the inputs and outputs of all ranks.
struct Case {
  struct Tensor {
    ReduceSpec spec;
    size_t elements = 0;
    bool in_place = false;
    std::vector<Guarded> inputs, outputs;  // per rank
    std::vector<Bytes> original;           // per rank

    Bytes result(size_t rank) const {
      Guarded memory = in_place ? inputs[rank] : outputs[rank];
      CHECK(memory.intact());
      return Bytes(memory.data(), memory.data() + original[rank].size());
    }
  };
  std::vector<Tensor> tensors;
  std::unique_ptr<std::vector<double>> weights = std::make_unique<std::vector<double>>();

  Case(const ReduceSpec& spec, const std::vector<size_t>& sizes, int ranks, std::mt19937& random)
      : Case(std::vector<ReduceSpec>{spec}, sizes, ranks, random) {}
  // Tensors take the specs in turn.
  Case(const std::vector<ReduceSpec>& specs, const std::vector<size_t>& sizes, int ranks,
       std::mt19937& random)
      : tensors(sizes.size()) {
    double sum = 0;
    for (int r = 0; r < ranks; ++r) {
      weights->push_back(random() % 3 == 0 ? 0 : static_cast<double>(random() % 1000) / 1000);
      sum += weights->back();
    }
    weights->push_back(sum > 0 ? sum : 1);
    for (size_t t = 0; t < sizes.size(); ++t) {
      Tensor& tensor = tensors[t];
      ReduceSpec& spec = tensor.spec = specs[t % specs.size()];
      if (spec.weights != nullptr) spec.weights = weights.get();
      const size_t element = ElementSize(spec.dtype);
      tensor.elements = sizes[t];
      tensor.in_place = random() % 2 == 0;
      const size_t bytes = sizes[t] * element;
      for (int r = 0; r < ranks; ++r) {
        tensor.inputs.emplace_back(bytes, random() % 8 * element);
        tensor.outputs.emplace_back(bytes, random() % 8 * element);
        unsigned char* data = tensor.inputs.back().data();
        Fill(spec.dtype, data, sizes[t], random);
        const bool counts = spec.weights == nullptr || (*weights)[static_cast<size_t>(r)] > 0;
        if (!counts) std::fill_n(data, bytes, 0xff);  // NaN
        tensor.original.emplace_back(data, data + bytes);
      }
    }
  }

  Batch BatchOf(int rank) {
    const size_t r = static_cast<size_t>(rank);
    Batch batch;
    for (size_t t = 0; t < tensors.size(); ++t) {
      BatchEntry entry;
      entry.name = "t" + std::to_string(t);
      entry.input = tensors[t].inputs[r].data();
      entry.output =
          tensors[t].in_place ? tensors[t].inputs[r].data() : tensors[t].outputs[r].data();
      entry.elements = tensors[t].elements;
      entry.reduce = tensors[t].spec;
      if (entry.reduce.weights != nullptr) entry.reduce.prescale = (*weights)[r];
      batch.entries.push_back(entry);
    }
    return batch;
  }

  void Restore() {
    for (Tensor& tensor : tensors) {
      for (size_t r = 0; r < tensor.inputs.size(); ++r) {
        std::copy(tensor.original[r].begin(), tensor.original[r].end(), tensor.inputs[r].data());
      }
    }
  }

  // Returns the first error in the outputs, or "".
  std::string Judge(bool exact) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      Tensor& tensor = tensors[t];
      const ReduceSpec& spec = tensor.spec;
      const size_t ranks = tensor.inputs.size();
      std::vector<const void*> sources;
      for (const Bytes& source : tensor.original) sources.push_back(source.data());
      Bytes expected(tensor.original[0].size());
      ReduceMany(spec, static_cast<int>(ranks), expected.data(), sources.data(),
                 static_cast<int>(ranks), tensor.elements);
      const std::string where = "tensor " + std::to_string(t);
      for (size_t r = 0; r < ranks; ++r) {
        const unsigned char* output =
            tensor.in_place ? tensor.inputs[r].data() : tensor.outputs[r].data();
        const std::string who = where + " of rank " + std::to_string(r);
        if (!tensor.inputs[r].intact() || !tensor.outputs[r].intact()) return who + ": overrun";
        if (!tensor.in_place && !std::equal(tensor.original[r].begin(), tensor.original[r].end(),
                                            tensor.inputs[r].data())) {
          return who + ": input changed";
        }
        const unsigned char* first =
            tensor.in_place ? tensor.inputs[0].data() : tensor.outputs[0].data();
        if (!std::equal(expected.begin(), expected.end(), output) &&
            (exact || !IsFloat(spec.dtype) ||
             !Close(spec.dtype, expected.data(), output, tensor.elements))) {
          return who + ": wrong";
        }
        if (!std::equal(output, output + expected.size(), first)) return who + ": not as rank 0";
      }
    }
    return "";
  }

  // In another order of summation, N values below N * 2 (products: 2^N) are rounded at most N times
  // in the accumulation type, and the result once.
  static bool Close(DataType dtype, const unsigned char* a, const unsigned char* b,
                    size_t elements) {
    const double unit = dtype == DataType::kFloat64   ? 1e-14
                        : dtype == DataType::kFloat32 ? 1e-5
                        : dtype == DataType::kFloat16 ? 2e-3
                                                      : 2e-2;
    for (size_t i = 0; i < elements; ++i) {
      const double x = ElementAt(dtype, a, i), y = ElementAt(dtype, b, i);
      if (!(std::fabs(x - y) <= unit * (16 + std::fabs(x)))) return false;
    }
    return true;
  }
};

// Five types, with averages and factors. Partial results take twice the memory of bfloat16, and
// eight times that of uint8 averages.
inline const std::vector<ReduceSpec> kMixedSpecs = {
    {DataType::kBfloat16, ReduceOp::kAverage, 1, 1},
    {DataType::kFloat32, ReduceOp::kAverage, 0.5, 3},
    {DataType::kInt64, ReduceOp::kSum, 1, 1},
    {DataType::kFloat64, ReduceOp::kMax, 1, 1},
    {DataType::kUint8, ReduceOp::kAverage, 1, 1},
};
// None of these needs a wide accumulator.
inline const std::vector<ReduceSpec> kNarrowSpecs = {
    {DataType::kFloat64, ReduceOp::kSum, 1, 1}, {DataType::kFloat32, ReduceOp::kAverage, 1, 1},
    {DataType::kInt64, ReduceOp::kSum, 1, 1},   {DataType::kInt32, ReduceOp::kProduct, 1, 1},
    {DataType::kBool, ReduceOp::kSum, 1, 1},
};

inline std::string Describe(const ReduceSpec& spec, const std::vector<size_t>& sizes, int ranks) {
  std::string text = std::string(Name(spec.dtype)) + " " + Name(spec.op) + " x" +
                     std::to_string(spec.prescale) + " x" + std::to_string(spec.postscale) +
                     " on " + std::to_string(ranks) + " ranks, sizes";
  for (size_t size : sizes) text += " " + std::to_string(size);
  return text;
}

// Runs the case on a backend of `world`; a failure names the backend, the spec and the sizes.
inline void RunCase(TestWorld& world, const std::string& backend,
                    const std::vector<ReduceSpec>& specs, const std::vector<size_t>& sizes,
                    bool exact, std::mt19937& random) {
  Case c(specs, sizes, world.size(), random);
  world.Run([&](int r, Rank& rank) {
    const Batch batch = c.BatchOf(r);
    CHECK(rank.backend(backend).Supports(batch));
    CHECK_OK(rank.backend(backend).Run(batch, After(NowNs(), kLimit), rank.trace));
  });
  const std::string verdict = c.Judge(exact);
  if (!verdict.empty()) {
    CHECK_EQ(backend + ", " + Describe(specs[0], sizes, world.size()) + ": " + verdict,
             std::string("right"));
  }
}
inline void RunCase(TestWorld& world, const std::string& backend, const ReduceSpec& spec,
                    const std::vector<size_t>& sizes, bool exact, std::mt19937& random) {
  RunCase(world, backend, std::vector<ReduceSpec>{spec}, sizes, exact, random);
}

}  // namespace hororing
