// Both backends over worlds of threads: every result against what rank order gives, bit by bit
// where the backend promises bits. The arithmetic itself is the subject of reduce_test.cc;
// here ReduceMany over all inputs at once is the oracle.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/factory.h"
#include "backend/host_backend.h"
#include "backend/shm_direct.h"
#include "base/clock.h"
#include "base/reduce.h"
#include "check.h"
#include "trace/trace.h"
#include "transport/factory.h"
#include "transport/shm_transport.h"

namespace hororing {
namespace {

using Bytes = std::vector<unsigned char>;
constexpr TimeNs kLimit = 60 * kSecond;  // a hang is a failure, not a hanging test
constexpr int kWorldSizes[] = {1, 2, 3, 5, 8};
constexpr DataType kAllTypes[] = {
    DataType::kUint8,   DataType::kInt8,    DataType::kUint16,  DataType::kInt16,
    DataType::kInt32,   DataType::kInt64,   DataType::kFloat16, DataType::kFloat32,
    DataType::kFloat64, DataType::kBool,    DataType::kBfloat16};

// N ranks as threads, each with both backends.
struct Rank {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<ShmDirectBackend> direct;
  std::unique_ptr<HostBackend> host;
  TraceSink trace;

  Backend& backend(const std::string& name) {
    return name == "host" ? static_cast<Backend&>(*host) : *direct;
  }
};

class TestWorld {
 public:
  explicit TestWorld(int size, bool reproducible = false) {
    for (std::unique_ptr<Transport>& transport : MakeInprocWorld(size, 20 * kMicrosecond)) {
      auto rank = std::make_unique<Rank>();
      rank->transport = std::move(transport);
      auto& shared = dynamic_cast<ShmTransport&>(*rank->transport);
      rank->direct = std::make_unique<ShmDirectBackend>(shared);
      HostBackend::Options options;
      options.reproducible = reproducible;
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

float HalfToFloat(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const float fraction = static_cast<float>(bits & 1023);
  const float size = exponent == 0    ? std::ldexp(fraction, -24)
                     : exponent == 31 ? (fraction > 0 ? NAN : INFINITY)
                                      : std::ldexp(fraction + 1024, exponent - 25);
  return bits >> 15 != 0 ? -size : size;
}

bool IsFloat(DataType dtype) {
  return dtype == DataType::kFloat16 || dtype == DataType::kBfloat16 ||
         dtype == DataType::kFloat32 || dtype == DataType::kFloat64;
}

double ElementAt(DataType dtype, const unsigned char* data, size_t i) {
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
    default:
      std::memcpy(&half, at, 2);
      return static_cast<double>(HalfToFloat(half));
  }
}

// Values of moderate size: positive and negative, none that leaves a format's range.
void Fill(DataType dtype, unsigned char* data, size_t elements, std::mt19937& random) {
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

// One batch as all ranks agree on it; inputs and outputs of all ranks are kept here.
struct Case {
  struct Tensor {
    size_t elements = 0;
    bool in_place = false;
    std::vector<Guarded> inputs, outputs;  // per rank
    std::vector<Bytes> original;           // per rank
  };
  ReduceSpec spec;
  std::vector<Tensor> tensors;

  Case(const ReduceSpec& reduce, const std::vector<size_t>& sizes, int ranks,
       std::mt19937& random)
      : spec(reduce), tensors(sizes.size()) {
    const size_t element = ElementSize(spec.dtype);
    for (size_t t = 0; t < sizes.size(); ++t) {
      Tensor& tensor = tensors[t];
      tensor.elements = sizes[t];
      tensor.in_place = random() % 2 == 0;
      const size_t bytes = sizes[t] * element;
      for (int r = 0; r < ranks; ++r) {
        tensor.inputs.emplace_back(bytes, random() % 8 * element);
        tensor.outputs.emplace_back(bytes, random() % 8 * element);
        unsigned char* data = tensor.inputs.back().data();
        Fill(spec.dtype, data, sizes[t], random);
        tensor.original.emplace_back(data, data + bytes);
      }
    }
  }

  Batch BatchOf(int rank) {
    const size_t r = static_cast<size_t>(rank);
    Batch batch;
    batch.reduce = spec;
    for (size_t t = 0; t < tensors.size(); ++t) {
      BatchEntry entry;
      entry.name = "t" + std::to_string(t);
      entry.input = tensors[t].inputs[r].data();
      entry.output = tensors[t].in_place ? tensors[t].inputs[r].data()
                                         : tensors[t].outputs[r].data();
      entry.elements = tensors[t].elements;
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

  // What is wrong with the outputs, or "".
  std::string Judge(bool exact) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      Tensor& tensor = tensors[t];
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
            (exact || !IsFloat(spec.dtype) || !Close(expected.data(), output, tensor.elements))) {
          return who + ": wrong";
        }
        if (!std::equal(output, output + expected.size(), first)) return who + ": not as rank 0";
      }
    }
    return "";
  }

  // Another order of summation: at most N roundings of values below N * 2 (products: 2^N), in
  // the accumulation type, and one of the result.
  bool Close(const unsigned char* a, const unsigned char* b, size_t elements) const {
    const double unit = spec.dtype == DataType::kFloat64   ? 1e-14
                        : spec.dtype == DataType::kFloat32 ? 1e-5
                        : spec.dtype == DataType::kFloat16 ? 2e-3
                                                           : 2e-2;
    for (size_t i = 0; i < elements; ++i) {
      const double x = ElementAt(spec.dtype, a, i), y = ElementAt(spec.dtype, b, i);
      if (!(std::fabs(x - y) <= unit * (16 + std::fabs(x)))) return false;
    }
    return true;
  }
};

std::string Describe(const ReduceSpec& spec, const std::vector<size_t>& sizes, int ranks) {
  std::string text = std::string(Name(spec.dtype)) + " " + Name(spec.op) + " x" +
                     std::to_string(spec.prescale) + " x" + std::to_string(spec.postscale) +
                     " on " + std::to_string(ranks) + " ranks, sizes";
  for (size_t size : sizes) text += " " + std::to_string(size);
  return text;
}

// Runs the case on a backend of `world`, and fails the test with a text that says where.
void RunCase(TestWorld& world, const std::string& backend, const ReduceSpec& spec,
             const std::vector<size_t>& sizes, bool exact, std::mt19937& random) {
  Case c(spec, sizes, world.size(), random);
  world.Run([&](int r, Rank& rank) {
    const Batch batch = c.BatchOf(r);
    CHECK(rank.backend(backend).Supports(batch));
    CHECK_OK(rank.backend(backend).Run(batch, After(NowNs(), kLimit), rank.trace));
  });
  const std::string verdict = c.Judge(exact);
  if (!verdict.empty()) {
    CHECK_EQ(backend + ", " + Describe(spec, sizes, world.size()) + ": " + verdict,
             std::string("right"));
  }
}

std::vector<size_t> RandomSizes(int ranks, std::mt19937& random) {
  const size_t n = static_cast<size_t>(ranks);
  const size_t choices[] = {0, 1, n - 1, n, n + 1, 7, 63, 64, 65, 127, 1009, 4093, 16381};
  std::vector<size_t> sizes(1 + random() % 20);
  for (size_t& size : sizes) size = choices[random() % std::size(choices)];
  if (random() % 6 == 0) sizes[random() % sizes.size()] = 150001;
  return sizes;
}

std::vector<ReduceSpec> AllSpecs() {
  std::vector<ReduceSpec> specs;
  for (DataType dtype : kAllTypes) {
    for (ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                        ReduceOp::kProduct}) {
      for (bool factors : {false, true}) {
        const ReduceSpec spec{dtype, op, factors ? 0.5 : 1.0, factors ? 1.25 : 1.0};
        if (Check(spec).ok()) specs.push_back(spec);
      }
    }
  }
  return specs;
}

void RandomBatches(const std::string& backend, bool reproducible, bool exact, unsigned seed) {
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  for (int ranks : kWorldSizes) {
    TestWorld world(ranks, reproducible);
    for (const ReduceSpec& spec : AllSpecs()) {
      RunCase(world, backend, spec, RandomSizes(ranks, random), exact, random);
    }
  }
}

TEST(shm_direct_gives_the_bits_of_rank_order) {
  RandomBatches("shm_direct", /*reproducible=*/false, /*exact=*/true, 1);
}

TEST(host_gives_the_bits_of_rank_order_when_reproducible) {
  RandomBatches("host", /*reproducible=*/true, /*exact=*/true, 2);
}

TEST(host_gives_identical_results_on_all_ranks) {
  RandomBatches("host", /*reproducible=*/false, /*exact=*/false, 3);
}

TEST(large_tensors_cross_many_blocks) {
  std::mt19937 random(4);
  for (int ranks : {2, 3, 8}) {
    TestWorld world(ranks);
    for (size_t elements : {size_t{262144}, size_t{1048573}}) {
      for (const ReduceSpec& spec : {ReduceSpec{DataType::kFloat32, ReduceOp::kAverage, 1, 1},
                                     ReduceSpec{DataType::kBfloat16, ReduceOp::kSum, 1, 2}}) {
        RunCase(world, "shm_direct", spec, {elements, 3, elements / 7}, true, random);
        RunCase(world, "host", spec, {elements}, false, random);
      }
    }
  }
}

TEST(every_size_around_the_short_cut_and_the_block_is_right) {
  std::mt19937 random(5);
  TestWorld world(3);
  const ReduceSpec spec{DataType::kInt32, ReduceOp::kSum, 1, 1};
  for (size_t bytes : {32 << 10, 64 << 10, 128 << 10, 192 << 10, 256 << 10, 512 << 10}) {
    for (size_t elements = bytes / 4 - 17; elements <= bytes / 4 + 17; elements += 17) {
      RunCase(world, "shm_direct", spec, {elements}, true, random);
    }
  }
}

TEST(hundreds_of_batches_in_a_row_on_both_backends) {
  std::mt19937 random(6);
  const ReduceSpec spec{DataType::kFloat32, ReduceOp::kAverage, 1, 1};
  for (int ranks : {2, 5}) {
    TestWorld world(ranks);
    std::vector<Case> cases;
    for (int i = 0; i < 6; ++i) cases.emplace_back(spec, RandomSizes(ranks, random), ranks, random);
    for (int round = 0; round < 20; ++round) {
      for (Case& c : cases) c.Restore();
      // No meeting of the threads between batches: a quick rank runs ahead of a slow one.
      world.Run([&](int r, Rank& rank) {
        for (size_t i = 0; i < cases.size(); ++i) {
          const Batch batch = cases[i].BatchOf(r);
          Backend& backend = rank.backend(i % 3 == 2 ? "host" : "shm_direct");
          CHECK_OK(backend.Run(batch, After(NowNs(), kLimit), rank.trace));
        }
      });
      for (size_t i = 0; i < cases.size(); ++i) {
        CHECK_EQ(cases[i].Judge(/*exact=*/i % 3 != 2), std::string());
      }
    }
  }
}

TEST(announced_failure_ends_the_peers_waits_and_names_the_rank) {
  for (const char* backend : {"shm_direct", "host"}) {
    for (size_t elements : {size_t{5}, size_t{300000}}) {
      std::mt19937 random(7);
      TestWorld world(3);
      Case first({DataType::kFloat32, ReduceOp::kSum, 1, 1}, {elements}, 3, random);
      Case second({DataType::kFloat32, ReduceOp::kSum, 1, 1}, {elements}, 3, random);
      world.Run([&](int r, Rank& rank) {
        CHECK_OK(rank.backend(backend).Run(first.BatchOf(r), After(NowNs(), kLimit), rank.trace));
        if (r == 2) return rank.transport->AnnounceFailure("the disk is full");
        const Status status =
            rank.backend(backend).Run(second.BatchOf(r), After(NowNs(), kLimit), rank.trace);
        CHECK(status.code() == Code::kPeerLost);
        CHECK_EQ(status.rank(), 2);
        CHECK(status.message().find("the disk is full") != std::string::npos);
        // Broken once, broken for good, and at once.
        CHECK(!rank.backend(backend)
                   .Run(second.BatchOf(r), After(NowNs(), kLimit), rank.trace)
                   .ok());
      });
    }
  }
}

TEST(silent_peer_ends_in_an_error_at_the_deadline) {
  for (const char* backend : {"shm_direct", "host"}) {
    std::mt19937 random(8);
    TestWorld world(2);
    Case c({DataType::kFloat32, ReduceOp::kSum, 1, 1}, {100000}, 2, random);
    world.Run([&](int r, Rank& rank) {
      if (r == 1) return;
      const TimeNs deadline = After(NowNs(), 50 * kMillisecond);
      const Status status = rank.backend(backend).Run(c.BatchOf(r), deadline, rank.trace);
      CHECK(status.code() == Code::kTransport);
      CHECK(status.message().find("1") != std::string::npos);
      CHECK(NowNs() >= deadline);
    });
  }
}

TEST(meaningless_specs_are_refused) {
  TestWorld world(1);
  Batch batch;
  batch.reduce = {DataType::kBool, ReduceOp::kAverage, 1, 1};
  TraceSink trace;
  CHECK(world.rank(0).direct->Run(batch, kForever, trace).code() == Code::kInvalidArgument);
  CHECK(world.rank(0).host->Run(batch, kForever, trace).code() == Code::kInvalidArgument);
  batch.reduce.op = ReduceOp::kAdasum;
  CHECK(!world.rank(0).direct->Supports(batch));
  CHECK(!world.rank(0).host->Supports(batch));
  batch.kind = Collective::kBroadcast;
  CHECK(!world.rank(0).direct->Supports(batch));
  CHECK(world.rank(0).host->Supports(batch));
}

// The bytes that rank r contributes to tensor t: ragged, sometimes nothing.
Bytes Contribution(int rank, size_t tensor) {
  const size_t bytes = (static_cast<size_t>(rank) * 7 + tensor * 13) % 5 * (tensor + 1) * 100;
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<unsigned char>(static_cast<size_t>(rank) * 31 + tensor * 17 + i);
  }
  return data;
}

TEST(allgather_concatenates_ragged_parts_in_rank_order) {
  for (int ranks : kWorldSizes) {
    for (size_t tensors : {size_t{1}, size_t{2}, size_t{9}}) {
      TestWorld world(ranks);
      std::vector<Bytes> expected(tensors);
      std::vector<std::vector<size_t>> sizes(tensors);
      for (size_t t = 0; t < tensors; ++t) {
        for (int r = 0; r < ranks; ++r) {
          const Bytes part = Contribution(r, t);
          sizes[t].push_back(part.size());
          expected[t].insert(expected[t].end(), part.begin(), part.end());
        }
      }
      world.Run([&](int r, Rank& rank) {
        for (int round = 0; round < 3; ++round) {
          std::vector<Bytes> inputs, outputs;
          for (size_t t = 0; t < tensors; ++t) {
            inputs.push_back(Contribution(r, t));
            outputs.emplace_back(expected[t].size(), static_cast<unsigned char>(0xEE));
          }
          Batch batch;
          batch.kind = Collective::kAllgather;
          batch.reduce.dtype = DataType::kUint8;
          for (size_t t = 0; t < tensors; ++t) {
            BatchEntry entry;
            entry.name = "g" + std::to_string(t);
            entry.input = inputs[t].data();
            entry.output = outputs[t].data();
            entry.elements = inputs[t].size();
            entry.gathered_bytes = sizes[t];
            batch.entries.push_back(entry);
          }
          CHECK_OK(rank.host->Run(batch, After(NowNs(), kLimit), rank.trace));
          for (size_t t = 0; t < tensors; ++t) CHECK(outputs[t] == expected[t]);
        }
      });
    }
  }
}

TEST(allgather_with_sizes_that_do_not_fit_is_refused) {
  TestWorld world(1);
  Batch batch;
  batch.kind = Collective::kAllgather;
  BatchEntry entry;
  entry.elements = 3;
  entry.gathered_bytes = {8};
  batch.entries.push_back(entry);
  TraceSink trace;
  CHECK(world.rank(0).host->Run(batch, kForever, trace).code() == Code::kInternal);
}

TEST(broadcast_brings_the_roots_tensors_to_all_ranks) {
  for (int ranks : kWorldSizes) {
    TestWorld world(ranks);
    // Empty, small ones that travel together, and one that travels alone.
    for (const std::vector<size_t>& sizes :
         std::vector<std::vector<size_t>>{{1000}, {0, 1, 1009, 70000}, {5, 300007, 0, 64}, {0}}) {
      for (int root = 0; root < ranks; ++root) {
        const bool in_place = (root + static_cast<int>(sizes.size())) % 2 == 0;
        world.Run([&](int r, Rank& rank) {
          std::vector<Bytes> inputs, outputs;
          Batch batch;
          batch.kind = Collective::kBroadcast;
          batch.reduce.dtype = DataType::kUint8;
          batch.root = root;
          for (size_t size : sizes) {
            inputs.emplace_back(size, static_cast<unsigned char>(r + 1));
            outputs.emplace_back(size, static_cast<unsigned char>(0xEE));
          }
          for (size_t t = 0; t < sizes.size(); ++t) {
            BatchEntry entry;
            entry.name = "b" + std::to_string(t);
            entry.input = inputs[t].data();
            entry.output = in_place ? inputs[t].data() : outputs[t].data();
            entry.elements = sizes[t];
            batch.entries.push_back(entry);
          }
          CHECK_OK(rank.host->Run(batch, After(NowNs(), kLimit), rank.trace));
          for (size_t t = 0; t < sizes.size(); ++t) {
            const Bytes expected(sizes[t], static_cast<unsigned char>(root + 1));
            CHECK((in_place ? inputs[t] : outputs[t]) == expected);
            if (!in_place) CHECK(inputs[t] == Bytes(sizes[t], static_cast<unsigned char>(r + 1)));
          }
        });
      }
    }
  }
}

TEST(barrier_waits_for_everybody) {
  for (int ranks : kWorldSizes) {
    TestWorld world(ranks);
    std::atomic<int> entered{0};
    world.Run([&](int, Rank& rank) {
      Batch batch;
      batch.kind = Collective::kBarrier;
      for (int round = 1; round <= 20; ++round) {
        ++entered;
        CHECK_OK(rank.host->Run(batch, After(NowNs(), kLimit), rank.trace));
        CHECK(entered >= round * ranks);
      }
    });
  }
}

TEST(timeline_shows_pack_reduce_unpack_with_names_and_bytes) {
  std::mt19937 random(9);
  for (const char* backend : {"shm_direct", "host"}) {
    for (const std::vector<size_t>& sizes :
         std::vector<std::vector<size_t>>{{400000}, {100000, 100000}}) {
      TestWorld world(2);
      Case c({DataType::kFloat32, ReduceOp::kSum, 1, 1}, sizes, 2, random);
      world.Run([&](int r, Rank& rank) {
        rank.trace.Enable(/*mark_cycles=*/false);
        CHECK_OK(rank.backend(backend).Run(c.BatchOf(r), After(NowNs(), kLimit), rank.trace));
        int64_t reduced = 0;
        TimeNs last_end = 0;
        std::vector<std::string> stages;
        for (const TraceEvent& event : rank.trace.Drain()) {
          CHECK(event.track == Track::kLoop);
          CHECK_EQ(event.tensor, std::string(sizes.size() == 1 ? "t0" : "2 tensors"));
          CHECK(event.begin_ns >= last_end);  // one after the other
          CHECK(event.end_ns >= event.begin_ns);
          last_end = event.end_ns;
          if (event.name == "REDUCE") reduced += event.bytes;
          stages.push_back(event.name);
        }
        const int64_t total = sizes.size() == 1 ? 1600000 : 800000;
        CHECK(reduced >= total);         // padding may add a line per tensor
        CHECK(reduced <= total + 128);
        CHECK(std::count(stages.begin(), stages.end(), "REDUCE") >= 1);
        if (std::string(backend) == "shm_direct" || sizes.size() > 1) {
          CHECK_EQ(stages.front(), std::string("PACK"));
          CHECK_EQ(stages.back(), std::string("UNPACK"));
        }
      });
    }
  }
}

TEST(scratch_is_kept_and_within_the_batch_and_a_little_more) {
  std::mt19937 random(10);
  TestWorld world(2);
  const ReduceSpec spec{DataType::kFloat32, ReduceOp::kSum, 1, 1};
  RunCase(world, "host", spec, {500000, 500000, 1000000}, false, random);
  const size_t held = world.rank(0).host->scratch_bytes();
  CHECK(held >= size_t{8000000});
  CHECK(held <= size_t{8000000} * 2 + (5 << 20));
  RunCase(world, "host", spec, {1000, 1000}, false, random);
  CHECK_EQ(world.rank(0).host->scratch_bytes(), held);
}

// A transport without shared memory that never moves a byte.
class PlainTransport final : public Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  const char* name() const override { return "plain"; }
  Request Send(int, const void*, size_t) override { return {}; }
  Request Receive(int, void*, size_t) override { return {}; }
  Status Wait(Request, TimeNs) override { return Status(Code::kTransport, "no wire"); }
  void Post(int, std::string) override {}
  bool Poll(int*, std::string*) override { return false; }
  void Sleep(TimeNs) override {}
  void Wake() override {}
  Status CheckPeers() override { return Status::Ok(); }
  void AnnounceFailure(const std::string&) override {}
  bool Flush(TimeNs) override { return true; }
};

TEST(factory_prefers_shared_memory_and_says_what_is_wrong) {
  const auto names = [](const std::vector<std::unique_ptr<Backend>>& backends) {
    std::string text;
    for (const auto& backend : backends) text += std::string(backend->name()) + " ";
    return text;
  };
  TestWorld world(2);
  Transport& shared = *world.rank(0).transport;
  PlainTransport plain;
  std::vector<std::unique_ptr<Backend>> backends;
  CHECK_OK(MakeBackends("auto", false, shared, &backends));
  CHECK_EQ(names(backends), std::string("shm_direct host "));
  CHECK_OK(MakeBackends("shm_direct", false, shared, &backends));
  CHECK_EQ(names(backends), std::string("shm_direct host "));
  CHECK_OK(MakeBackends("host", true, shared, &backends));
  CHECK_EQ(names(backends), std::string("host "));
  CHECK_OK(MakeBackends("auto", false, plain, &backends));
  CHECK_EQ(names(backends), std::string("host "));
  const Status refused = MakeBackends("shm_direct", false, plain, &backends);
  CHECK(refused.code() == Code::kInvalidArgument);
  CHECK(refused.message().find("plain") != std::string::npos);
  const Status unknown = MakeBackends("fast", false, shared, &backends);
  CHECK(unknown.code() == Code::kInvalidArgument);
  CHECK(unknown.message().find("fast") != std::string::npos);
}

}  // namespace
}  // namespace hororing
