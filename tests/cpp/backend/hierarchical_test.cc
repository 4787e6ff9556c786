// SharedMemoryBackend's allreduce and the flat algorithms, among ranks on emulated hosts.

#include "backend/shared_memory_backend.h"

#include <memory>
#include <string>
#include <vector>

#include "backend_world.h"
#include "collective/slice_exchange.h"
#include "engine/backends.h"
#include "hosts_world.h"

namespace hororing {
namespace {

// Runs one allreduce. Returns the first error in its results, or "".
std::string Check(HostsWorld& world, std::vector<std::unique_ptr<SharedMemoryBackend>>& backends,
                  const ReduceSpec& spec, const std::vector<size_t>& sizes, std::mt19937& random) {
  Case c(spec, sizes, world.size(), random);
  world.Run([&](int r) {
    TraceSink trace;
    const Batch batch = c.BatchOf(r);
    auto& backend = *backends[static_cast<size_t>(r)];
    CHECK(backend.Supports(batch));
    CHECK_OK(backend.Run(batch, After(NowNs(), kLimit), trace));
    CHECK_EQ(world.wire(r).open(), 0u);
  });
  return c.Judge(/*exact=*/false);
}

std::vector<std::unique_ptr<SharedMemoryBackend>> Backends(HostsWorld& world,
                                                           size_t latency_bytes = 16 << 10) {
  std::vector<std::unique_ptr<SharedMemoryBackend>> backends;
  for (int r = 0; r < world.size(); ++r) {
    backends.push_back(world.Backend(r, latency_bytes));
  }
  return backends;
}

TEST(every_type_and_operation_on_every_layout) {
  std::mt19937 random(hororing_test::Seed());
  size_t number = 0;
  for (const Hosts& hosts : kLayouts) {
    // Slots of 32 KiB: several blocks. No latency: hosts never exchange whole slices.
    HostsWorld world(++number % 3 == 0 ? "queue" : "inproc", hosts, {}, 32 << 10);
    auto backends = Backends(world, 0);
    for (const ReduceSpec& spec : AllreduceSpecs()) {
      const std::vector<size_t> sizes = {random() % 1000, 0, 1, random() % 3000};
      const std::string verdict = Check(world, backends, spec, sizes, random);
      if (verdict.empty()) continue;
      CHECK_EQ(Text(hosts) + ", " + Describe(spec, sizes, world.size()) + ": " + verdict,
               std::string("right"));
    }
  }
}

TEST(every_size_there_and_back_and_whole) {
  std::mt19937 random(hororing_test::Seed());
  const ReduceSpec specs[] = {{DataType::kFloat32, ReduceOp::kAverage, 1, 1},
                              {DataType::kFloat16, ReduceOp::kSum, 1, 1},
                              {DataType::kInt8, ReduceOp::kAverage, 1, 1}};
  for (const Hosts& hosts : kLayouts) {
    for (const size_t latency_bytes : {size_t{0}, size_t{1} << 30}) {  // with many: whole slices
      HostsWorld world("inproc", hosts);
      auto backends = Backends(world, latency_bytes);
      for (const ReduceSpec& spec : specs) {
        for (const size_t n :
             {size_t{0}, size_t{1}, size_t{2}, size_t{31}, size_t{1009}, size_t{60000}}) {
          const std::string verdict = Check(world, backends, spec, {n}, random);
          CHECK_EQ(Text(hosts) + ", " + Describe(spec, {n}, world.size()) + ": " + verdict,
                   Text(hosts) + ", " + Describe(spec, {n}, world.size()) + ": ");
        }
      }
    }
  }
}

TEST(tensors_of_five_types_in_one_batch_get_the_bits_that_they_get_alone) {
  std::mt19937 random(hororing_test::Seed());
  for (const Hosts& hosts : kLayouts) {
    for (const size_t latency_bytes : {size_t{0}, size_t{1} << 30}) {  // with many: whole slices
      HostsWorld world("inproc", hosts);
      auto backends = Backends(world, latency_bytes);
      const auto run = [&](Case& c) {
        world.Run([&](int r) {
          TraceSink trace;
          const Batch batch = c.BatchOf(r);
          CHECK_OK(backends[static_cast<size_t>(r)]->Run(batch, After(NowNs(), kLimit), trace));
          CHECK_EQ(world.wire(r).open(), 0u);
        });
        CHECK_EQ(c.Judge(/*exact=*/false), std::string());
      };
      for (const auto& specs : {kMixedSpecs, kNarrowSpecs}) {
        Case fused(specs, {3, 40009, 1, 0, 65, 17, 2, 30011, 9}, world.size(), random);
        run(fused);
        for (const Case::Tensor& tensor : fused.tensors) {
          Case alone(tensor.spec, {tensor.elements}, world.size(), random);
          alone.tensors[0].original = tensor.original;
          alone.Restore();
          run(alone);
          CHECK(tensor.result(0) == alone.tensors[0].result(0));
        }
      }
    }
  }
}

TEST(large_batches_wrap_around_the_slots) {
  std::mt19937 random(hororing_test::Seed());
  const ReduceSpec sum{DataType::kFloat32, ReduceOp::kSum, 1, 1};
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 1}}) {
    HostsWorld world("inproc", hosts);
    auto backends = Backends(world);
    for (int round = 0; round < (hororing_test::kFew ? 1 : 2); ++round) {
      CHECK_EQ(Check(world, backends, sum, {2500000, 77, 100001}, random), std::string());
    }
  }
}

TEST(sixteen_bit_floats_are_rounded_once) {
  // 1 + 2^-11 + 2^-11 is exact in float16, but 1 + 2^-11 would be rounded to 1.
  const ReduceSpec sum{DataType::kFloat16, ReduceOp::kSum, 1, 1};
  HostsWorld world("inproc", {0, 0, 1, 1});
  auto backends = Backends(world, 0);
  constexpr size_t kN = 5000;
  const uint16_t inputs[] = {0x3c00, 0x1000, 0x1000, 0x0000};  // 1, 2^-11, 2^-11, 0
  std::vector<std::vector<uint16_t>> data;
  for (const uint16_t value : inputs) data.emplace_back(kN, value);
  world.Run([&](int r) {
    Batch batch;
    BatchEntry entry;
    entry.reduce = sum;
    entry.input = entry.output = data[static_cast<size_t>(r)].data();
    entry.elements = kN;
    batch.entries.push_back(entry);
    TraceSink trace;
    CHECK_OK(backends[static_cast<size_t>(r)]->Run(batch, After(NowNs(), kLimit), trace));
  });
  for (const auto& result : data) {
    for (const uint16_t bits : result) CHECK_EQ(bits, 0x3c01);  // 1 + 2^-10
  }
}

// CheckedTransport and the sanitizers notice requests that are left open, the watchdog a hang.
TEST(a_rank_that_fails_in_any_phase_is_an_error_there_and_no_hang_elsewhere) {
  const ReduceSpec sum{DataType::kFloat32, ReduceOp::kSum, 1, 1};
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 1, 2}}) {
    std::mt19937 random(1);
    const int faulty = 1;
    uint64_t operations = 0;
    const auto run = [&](HostsWorld& world, const std::function<void(int, Status)>& ended) {
      auto backends = Backends(world, 0);
      Case c(sum, {20000}, world.size(), random);
      world.Run([&](int r) {
        TraceSink trace;
        ended(r,
              backends[static_cast<size_t>(r)]->Run(c.BatchOf(r), After(NowNs(), kLimit), trace));
      });
    };
    HostsWorld sound("inproc", hosts, {}, 16 << 10);
    run(sound, [&](int r, const Status& status) {
      CHECK_OK(status);
      if (r == faulty) operations = sound.wire(r).operations();
    });
    CHECK(operations > 0);
    for (uint64_t at = 0; at < operations; at += 1 + operations / 6) {
      Fault fault;
      fault.kind = Fault::Kind::kFail;
      fault.at = at;
      HostsWorld world("inproc", hosts, {faulty, fault}, 16 << 10);
      run(world, [&](int r, const Status& status) {
        CHECK_EQ(world.wire(r).open(), 0u);
        Transport& wire = world.wire(r);
        if (r == faulty) {
          CHECK(status.message().find("injected fault") != std::string::npos);
          wire.AnnounceFailure({status.code(), status.message(), faulty});
        } else if (!status.ok()) {
          CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kTransport));
          CHECK_EQ(status.rank(), faulty);
          wire.AnnounceFailure(status);
        }
      });
    }
  }
}

TEST(a_rank_that_does_not_come_is_named_on_its_host_and_on_others) {
  const ReduceSpec sum{DataType::kFloat32, ReduceOp::kSum, 1, 1};
  std::mt19937 random(hororing_test::Seed());
  for (const int absent : {0, 1, 3}) {
    HostsWorld world("inproc", {0, 0, 1, 1});
    auto backends = Backends(world);
    Case c(sum, {1000}, world.size(), random);
    world.Run([&](int r) {
      if (r == absent) return;
      TraceSink trace;
      auto& backend = *backends[static_cast<size_t>(r)];
      const Status status = backend.Run(c.BatchOf(r), After(NowNs(), 50 * kMillisecond), trace);
      CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kTransport));
      CHECK(status.message().find("no progress from rank(s) ") != std::string::npos);
      const bool same_host = r / 2 == absent / 2;
      if (same_host) CHECK_EQ(status.rank(), absent);
      // The slots' counters no longer agree, so the backend stays broken.
      CHECK_EQ(backend.Run(c.BatchOf(r), After(NowNs(), kLimit), trace).message(),
               status.message());
    });
  }
}

TEST(the_factory_offers_it_where_hosts_have_shared_memory) {
  HostsWorld world("queue", {0, 0, 1});
  const auto names = [&](const BackendOptions& options) {
    const World& first = world.world(0);
    std::string text;
    for (const auto& backend : MakeBackends(options, first, *first.transport, Members::World(3))) {
      text += std::string(backend->name()) + " ";
    }
    return text;
  };
  BackendOptions options;
  CHECK_EQ(names(options), std::string("hierarchical host cuda "));
  options.allreduce.reproducible = true;  // the backend still serves collectives without arithmetic
  CHECK_EQ(names(options), std::string("hierarchical host cuda "));
  options.allreduce.reproducible = false;
  options.name = "host";
  CHECK_EQ(names(options), std::string("host cuda "));
}

TEST(a_ring_goes_host_by_host_whatever_the_order_of_the_ranks) {
  // Counts the messages that leave a host.
  std::mt19937 random(hororing_test::Seed());
  const Hosts hosts = {0, 1, 0, 1, 0, 1};
  const ReduceSpec sum{DataType::kFloat32, ReduceOp::kSum, 1, 1};
  HostsWorld world("queue", hosts);
  Case c(sum, {98304}, world.size(), random);  // 64 KiB per rank: two segments
  std::atomic<int> crossing{0};
  world.Run([&](int r) {
    HostBackend backend(*world.world(r).transport, {}, world.world(r).topology.ranks_on());
    TraceSink trace;
    CHECK_OK(backend.Run(c.BatchOf(r), After(NowNs(), kLimit), trace));
    CHECK(backend.algorithm_used() == AlgorithmUsed::kRing);
    for (const int peer : world.wire(r).sent_to()) {
      if (hosts[static_cast<size_t>(peer)] != hosts[static_cast<size_t>(r)]) ++crossing;
    }
  });
  CHECK_EQ(c.Judge(false), std::string());
  // One rank of each host sends to the other host: 2 (N-1) chunks each.
  CHECK_EQ(crossing.load(), 2 * 2 * 2 * (world.size() - 1));
}

TEST(whole_slices_are_exchanged_where_returning_them_costs_more) {
  const auto FloatsOf = [](size_t elements) {
    return Layout({DataType::kFloat32, ReduceOp::kSum, 1, 1}, elements);
  };
  // Two hosts that exchange whole slices send no more bytes, at half the latency.
  CHECK(ExchangesWholeSlices(FloatsOf(1 << 20), 2, 0));
  CHECK(!ExchangesWholeSlices(FloatsOf(1 << 20), 4, 16 << 10));
  CHECK(ExchangesWholeSlices(FloatsOf(100), 4, 16 << 10));
}

}  // namespace
}  // namespace hororing
