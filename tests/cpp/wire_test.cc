// Sums of float32 that travel between hosts in 16 bits, among ranks on pretended hosts: bit by bit
// what the scheme says, and near what it stands for.

#include "collective/wire_type.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "backend/factory.h"
#include "backend_world.h"
#include "hosts_world.h"

namespace hororing {
namespace {

constexpr DataType kFloat = DataType::kFloat32;
constexpr WireType kNarrow[] = {WireType::kBfloat16, WireType::kFloat16};
// No latency: what returns, returns. A second of it: slices go whole.
constexpr WireCost kReturns{0, 1e-9}, kWhole{1, 1e-9};

BackendOptions Options(Algorithm algorithm, WireType type, WireCost cost = kReturns) {
  BackendOptions options;
  options.tuning.algorithms.fill(static_cast<uint8_t>(algorithm));
  options.tuning.wires.fill(static_cast<uint8_t>(type));
  options.wire = cost;
  return options;
}

using Backends = std::vector<std::unique_ptr<Backend>>;

// Of every rank, what the factory makes.
std::vector<Backends> MakeAll(HostsWorld& world, const BackendOptions& options) {
  std::vector<Backends> all(static_cast<size_t>(world.size()));
  for (int r = 0; r < world.size(); ++r) {
    CHECK_OK(MakeBackends(options, world.world(r), &all[static_cast<size_t>(r)]));
  }
  return all;
}

int64_t NarrowBytes(const Backends& backends) {
  int64_t bytes = 0;
  for (const auto& backend : backends) {
    if (!backend->on_device()) bytes += backend->narrow_bytes();
  }
  return bytes;
}

void Reduce(HostsWorld& world, std::vector<Backends>& all, Case& c) {
  world.Run([&](int r) {
    TraceSink trace;
    const Batch batch = c.BatchOf(r);
    for (const auto& backend : all[static_cast<size_t>(r)]) {
      if (backend->on_device() || !backend->Supports(batch)) continue;
      CHECK_OK(backend->Run(batch, After(NowNs(), kLimit), trace));
      break;
    }
    CHECK_EQ(world.wire(r).open(), 0u);
  });
}

// Who contributes together: the ranks of each host, or each rank by itself.
using Groups = std::vector<std::vector<int>>;

Groups ByHost(HostsWorld& world) { return world.world(0).topology.ranks_on(); }
Groups ByRank(HostsWorld& world) {
  Groups groups;
  for (int r = 0; r < world.size(); ++r) groups.push_back({r});
  return groups;
}

// What all ranks must hold: each group's sum in float32, rounded; the sum of those in float32,
// divided, scaled and rounded.
Bytes Expected(const Case& c, const Case::Tensor& tensor, const Groups& groups, WireType type) {
  const size_t n = tensor.elements, ranks = tensor.original.size();
  ReduceSpec sum = c.spec;
  sum.op = ReduceOp::kSum;
  sum.postscale = 1;
  std::vector<Bytes> rounded;
  std::vector<const void*> contributions;
  for (const std::vector<int>& group : groups) {
    std::vector<const void*> sources;
    for (const int r : group) sources.push_back(tensor.original[static_cast<size_t>(r)].data());
    Bytes wide(4 * n);
    ReduceMany(sum, 1, wide.data(), sources.data(), static_cast<int>(sources.size()), n);
    rounded.emplace_back(2 * n);
    Narrow(type, 1.0, rounded.back().data(), wide.data(), n);
  }
  for (const Bytes& each : rounded) contributions.push_back(each.data());
  Bytes finished(2 * n), expected(4 * n);
  ReduceMany(OnWire(c.spec, type), static_cast<int>(ranks), finished.data(), contributions.data(),
             static_cast<int>(contributions.size()), n);
  Widen(type, expected.data(), finished.data(), n);
  return expected;
}

// What one rounding to 8 or 11 bits is off at most, relatively.
double Unit(WireType type) { return type == WireType::kBfloat16 ? 0x1p-8 : 0x1p-11; }

// What is wrong with the outputs, or "".
std::string Judge(Case& c, const Groups& groups, WireType type) {
  for (Case::Tensor& tensor : c.tensors) {
    const Bytes expected = Expected(c, tensor, groups, type);
    for (size_t r = 0; r < tensor.inputs.size(); ++r) {
      Guarded& output = tensor.in_place ? tensor.inputs[r] : tensor.outputs[r];
      if (!output.intact()) return "overrun on rank " + std::to_string(r);
      if (!std::equal(expected.begin(), expected.end(), output.data())) {
        return "not as the scheme says on rank " + std::to_string(r);
      }
    }
    // Each contribution and the result are rounded once: a unit of all that was added up, and one
    // of the result, which is no larger; a little of float32 and of subnormal float16.
    const double count = static_cast<double>(tensor.original.size());
    const double scale =
        c.spec.prescale * c.spec.postscale / (c.spec.op == ReduceOp::kAverage ? count : 1);
    for (size_t i = 0; i < tensor.elements; ++i) {
      double sum = 0, size = 0;
      for (const Bytes& original : tensor.original) {
        const double value = ElementAt(kFloat, original.data(), i) * scale;
        sum += value;
        size += std::fabs(value);
      }
      const double got = ElementAt(kFloat, expected.data(), i);
      if (!(std::fabs(got - sum) <= 2.02 * Unit(type) * size + 1e-7)) {
        return "element " + std::to_string(i) + " is " + std::to_string(got) + ", the sum " +
               std::to_string(sum);
      }
    }
  }
  return "";
}

const std::vector<ReduceSpec> kSums = {{kFloat, ReduceOp::kSum, 1, 1},
                                       {kFloat, ReduceOp::kAverage, 1, 1},
                                       {kFloat, ReduceOp::kAverage, 0.3, 1.7}};

// `groups`: who contributes together under these options.
void CheckSums(const Hosts& hosts, const BackendOptions& options, bool by_host, WireType type,
               std::mt19937& random) {
  HostsWorld world(random() % 3 == 0 ? "queue" : "inproc", hosts, {}, 32 << 10);
  auto all = MakeAll(world, options);
  const Groups groups = by_host ? ByHost(world) : ByRank(world);
  int64_t narrow = 0;
  for (const ReduceSpec& spec : kSums) {
    for (const std::vector<size_t>& sizes :
         {std::vector<size_t>{1025 + random() % 3000}, {60000}, {random() % 1000, 0, 1, 5000}}) {
      Case c(spec, sizes, world.size(), random);
      Reduce(world, all, c);
      const std::string what = Text(hosts) + ", " + WireNames(options.tuning) + " by " +
                               Names(options.tuning) + ", " + Describe(spec, sizes, world.size());
      CHECK_EQ(what + ": " + Judge(c, groups, type), what + ": ");
      narrow += static_cast<int64_t>(c.BatchOf(0).bytes());
    }
  }
  for (const Backends& backends : all) CHECK_EQ(NarrowBytes(backends), narrow);
}

TEST(each_host_is_rounded_once_and_so_is_the_sum) {
  std::mt19937 random(hororing_test::Seed());
  for (const Hosts& hosts : kLayouts) {
    for (const WireType type : kNarrow) {
      for (const WireCost& cost : {kReturns, kWhole}) {
        const Algorithm algorithm = random() % 2 == 0 ? Algorithm::kThreePhase : Algorithm::kLeader;
        CheckSums(hosts, Options(algorithm, type, cost), true, type, random);
      }
    }
  }
}

TEST(flat_forms_round_what_each_rank_brings) {
  std::mt19937 random(hororing_test::Seed());
  for (const Hosts& hosts : kLayouts) {
    const WireType type = kNarrow[random() % 2];
    CheckSums(hosts, Options(Algorithm::kRing, type), false, type, random);
    BackendOptions reproducible = Options(Algorithm::kAuto, type);
    reproducible.reproducible = true;
    CheckSums(hosts, reproducible, false, type, random);
  }
}

TEST(reproducible_sums_do_not_depend_on_what_a_tensor_is_fused_with) {
  std::mt19937 random(hororing_test::Seed());
  HostsWorld world("inproc", {0, 0, 1, 2});
  BackendOptions options = Options(Algorithm::kAuto, WireType::kBfloat16);
  options.reproducible = true;
  auto all = MakeAll(world, options);
  // Also one element alone, which would travel in full elsewhere.
  for (const size_t n : {size_t{1}, size_t{1000}, size_t{1 << 16}}) {
    for (const size_t other : {size_t{0}, size_t{7}, size_t{100000}}) {
      Case c(kSums[1], {other, n}, world.size(), random);
      Reduce(world, all, c);
      CHECK_EQ(Judge(c, ByRank(world), WireType::kBfloat16), std::string());
    }
  }
}

TEST(everything_else_stays_as_it_is) {
  std::mt19937 random(hororing_test::Seed());
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2}, Hosts{0, 0, 0}}) {
    HostsWorld world("inproc", hosts);
    auto all = MakeAll(world, Options(Algorithm::kAuto, WireType::kFloat16));
    const bool one_host = hosts.back() == 0;
    for (const ReduceSpec& spec : AllSpecs()) {
      const bool sum = spec.op == ReduceOp::kSum || spec.op == ReduceOp::kAverage;
      // Of what may be narrow, one packet or two may not, nor may what stays on a host.
      const bool small = spec.dtype == kFloat && sum && !one_host;
      Case c(spec, {small ? size_t{1024} : size_t{3000}}, world.size(), random);
      Reduce(world, all, c);
      CHECK_EQ(Describe(spec, {}, world.size()) + ": " + c.Judge(/*exact=*/false),
               Describe(spec, {}, world.size()) + ": ");
    }
    for (const Backends& backends : all) CHECK_EQ(NarrowBytes(backends), int64_t{0});
  }
}

TEST(float16_overflows_where_a_host_brings_too_much_and_bfloat16_does_not) {
  for (const WireType type : kNarrow) {
    HostsWorld world("inproc", {0, 0, 1});
    auto all = MakeAll(world, Options(Algorithm::kThreePhase, type));
    std::mt19937 random(1);
    Case c(kSums[1], {2000}, world.size(), random);
    for (Guarded& input : c.tensors[0].inputs) {
      const float large = 40000;
      for (size_t i = 0; i < 2000; ++i) std::memcpy(input.data() + 4 * i, &large, 4);
    }
    Reduce(world, all, c);
    for (int r = 0; r < world.size(); ++r) {
      const double got = ElementAt(
          kFloat, static_cast<const unsigned char*>(c.BatchOf(r).entries[0].output), 1999);
      if (type == WireType::kFloat16) {
        CHECK(std::isinf(got));
      } else {
        CHECK_NEAR(got, 40000, 40000 * 0x1p-7);
      }
    }
  }
}

TEST(half_of_the_bytes_leave_a_host) {
  std::mt19937 random(hororing_test::Seed());
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2, 3}, Hosts{0, 0, 1, 2, 2}}) {
    size_t crossing[2] = {0, 0};
    for (const WireType type : {WireType::kFull, WireType::kBfloat16}) {
      HostsWorld world("queue", hosts);
      auto all = MakeAll(world, Options(Algorithm::kAuto, type, {50e-6, 1 / 25e6}));
      Case c(kSums[0], {300000}, world.size(), random);
      Reduce(world, all, c);
      size_t& bytes = crossing[type == WireType::kFull ? 0 : 1];
      for (int r = 0; r < world.size(); ++r) {
        for (int peer = 0; peer < world.size(); ++peer) {
          const bool crosses = hosts[static_cast<size_t>(peer)] != hosts[static_cast<size_t>(r)];
          if (crosses) bytes += world.wire(r).bytes_to(peer);
        }
      }
    }
    CHECK_NEAR(static_cast<double>(crossing[1]) / static_cast<double>(crossing[0]), 0.5, 0.01);
  }
}

TEST(half_of_the_bytes_may_make_another_algorithm_the_cheapest) {
  const ReduceSpec sum = kSums[0];
  const HostShape shape{2, 8, 4, 4, true};
  const WireCost slow{100e-6, 40e-9};
  const double full = Cost(Algorithm::kThreePhase, 4 << 20, sum, shape, slow);
  const double half = Cost(Algorithm::kThreePhase, 4 << 20, sum, shape, slow, WireType::kBfloat16);
  CHECK_NEAR(full / half, 2.0, 0.05);
  // Rank order with half of the bytes, against recursive doubling, which has all of them.
  const HostShape flat{4, 4, 1, 1, false};
  CHECK(Cheapest(1400, sum, flat, slow) == Algorithm::kRecursiveDoubling);
  CHECK(Cheapest(4000, sum, flat, slow, WireType::kBfloat16) == Algorithm::kRing);
  CHECK(!CanNarrow(Algorithm::kRecursiveDoubling));
  CHECK(CanNarrow(Algorithm::kAuto));
}

TEST(recursive_doubling_sends_all_bits) {
  std::mt19937 random(hororing_test::Seed());
  HostsWorld world("inproc", {0, 0, 1, 2});
  auto all = MakeAll(world, Options(Algorithm::kAuto, WireType::kFull));
  Tuning tuning;  // as a search may try it
  tuning.algorithms.fill(static_cast<uint8_t>(Algorithm::kRecursiveDoubling));
  tuning.wires.fill(static_cast<uint8_t>(WireType::kBfloat16));
  for (Backends& backends : all) {
    for (auto& backend : backends) backend->Tune(tuning);
  }
  Case c(kSums[0], {5000}, world.size(), random);
  Reduce(world, all, c);
  CHECK_EQ(c.Judge(/*exact=*/false), std::string());
  for (const Backends& backends : all) CHECK_EQ(NarrowBytes(backends), int64_t{0});
}

TEST(wires_are_given_for_all_sizes_or_by_size) {
  Tuning tuning;
  CHECK_EQ(WireNames(tuning), std::string("full"));
  CHECK_OK(ParseWires("float16", &tuning));
  CHECK_EQ(WireNames(tuning), std::string("float16"));
  CHECK_OK(ParseWires("full, bfloat16,float16", &tuning));
  CHECK_EQ(WireNames(tuning), std::string("full,bfloat16,float16"));
  CHECK(WireFor(tuning, 64 << 10, kSums[0], false) == WireType::kFull);
  CHECK(WireFor(tuning, 4 << 20, kSums[0], false) == WireType::kBfloat16);
  CHECK(WireFor(tuning, (4 << 20) + 1, kSums[0], false) == WireType::kFloat16);
  CHECK(WireFor(tuning, 5 << 20, {DataType::kFloat64, ReduceOp::kSum, 1, 1}, false) ==
        WireType::kFull);
  CHECK(WireFor(tuning, 5 << 20, {kFloat, ReduceOp::kMax, 1, 1}, false) == WireType::kFull);
  CHECK(WireFor(tuning, 5 << 20, {kFloat, ReduceOp::kAdasum, 1, 1}, false) == WireType::kFull);
  for (const char* wrong : {"full,full", "full,,full", "", "auto", "a,b,c,d", "float32"}) {
    CHECK(!ParseWires(wrong, &tuning).ok());
  }
}

TEST(what_cannot_be_narrow_is_refused_with_the_way_out) {
  HostsWorld world("queue", {0, 0, 1});
  const auto refused = [&](const BackendOptions& options, const char* word) {
    const Status status = CheckBackends(options, world.world(0));
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kInvalidArgument));
    CHECK(status.message().find("HORORING_WIRE=") != std::string::npos);
    CHECK(status.message().find(word) != std::string::npos);
  };
  BackendOptions options = Options(Algorithm::kRecursiveDoubling, WireType::kBfloat16);
  refused(options, "HORORING_ALGORITHM=recursive_doubling");
  options.tuning.algorithms = {static_cast<uint8_t>(Algorithm::kRecursiveDoubling), 0, 0};
  refused(options, "recursive_doubling,auto,auto");
  options.tuning.wires[0] = 0;
  CHECK_OK(CheckBackends(options, world.world(0)));
  options.tuning.algorithms = {};
  options.reproducible = true;
  refused(options, "HORORING_REPRODUCIBLE=1");
  options.tuning.wires[0] = options.tuning.wires[1];
  CHECK_OK(CheckBackends(options, world.world(0)));
  options.cuda.way = DeviceWay::kNccl;
  refused(options, "HORORING_GPU=hierarchical");
}

TEST(a_rank_that_fails_is_an_error_there_and_no_hang_elsewhere) {
  std::mt19937 random(1);
  for (uint64_t at = 0; at < 30; at += 3) {
    Fault fault;
    fault.kind = Fault::Kind::kFail;
    fault.at = at;
    HostsWorld world("inproc", {0, 0, 1, 1, 2}, {1, fault}, 16 << 10);
    auto all = MakeAll(world, Options(Algorithm::kLeader, WireType::kBfloat16));
    for (Backends& backends : all) {
      Tuning tuning = Options(Algorithm::kThreePhase, WireType::kBfloat16).tuning;
      if (at % 2 == 0) tuning.algorithms.fill(static_cast<uint8_t>(Algorithm::kRing));
      for (auto& backend : backends) backend->Tune(tuning);
    }
    Case c(kSums[0], {20000}, world.size(), random);
    world.Run([&](int r) {
      TraceSink trace;
      const Batch batch = c.BatchOf(r);
      Status status;
      for (const auto& backend : all[static_cast<size_t>(r)]) {
        if (backend->on_device() || !backend->Supports(batch)) continue;
        status = backend->Run(batch, After(NowNs(), kLimit), trace);
        break;
      }
      CHECK_EQ(world.wire(r).open(), 0u);
      if (!status.ok()) world.wire(r).AnnounceFailure(status.message(), 1);
    });
  }
}

}  // namespace
}  // namespace hororing
