// Allreduce on both backends over worlds of threads. Every result is compared with that of rank
// order, bit by bit if the backend promises these bits.

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backend_world.h"
#include "check.h"
#include "engine/backends.h"

namespace hororing {
namespace {

const auto kWorldSizes = hororing_test::AllOrFew<int>({1, 2, 3, 5, 8}, {2, 3});

std::vector<size_t> RandomSizes(int ranks, std::mt19937& random) {
  const size_t n = static_cast<size_t>(ranks);
  const size_t choices[] = {0, 1, n - 1, n, n + 1, 7, 63, 64, 65, 127, 1009, 4093, 16381};
  std::vector<size_t> sizes(1 + random() % 20);
  for (size_t& size : sizes) size = choices[random() % std::size(choices)];
  if (random() % 6 == 0) sizes[random() % sizes.size()] = 150001;
  return sizes;
}

void RandomBatches(const std::string& backend, bool reproducible, bool exact) {
  std::mt19937 random(hororing_test::Seed());
  for (int ranks : kWorldSizes) {
    AllreduceOptions options;
    options.reproducible = reproducible;
    TestWorld world(ranks, options);
    for (const ReduceSpec& spec : AllreduceSpecs()) {
      if (random() % 2 == 0) continue;  // each run takes every spec with some of the world sizes
      RunCase(world, backend, spec, RandomSizes(ranks, random), exact, random);
    }
  }
}

TEST(shm_direct_gives_the_bits_of_rank_order) {
  RandomBatches("shm_direct", /*reproducible=*/false, /*exact=*/true);
}

TEST(host_gives_the_bits_of_rank_order_when_reproducible) {
  RandomBatches("host", /*reproducible=*/true, /*exact=*/true);
}

TEST(host_gives_identical_results_on_all_ranks) {
  RandomBatches("host", /*reproducible=*/false, /*exact=*/false);
}

TEST(large_tensors_cross_many_blocks) {
  std::mt19937 random(hororing_test::Seed());
  for (int ranks : hororing_test::AllOrFew<int>({2, 3, 8}, {3})) {
    TestWorld world(ranks);
    for (size_t elements : {size_t{262144}, ranks < 8 ? size_t{1048573} : size_t{300007}}) {
      for (const ReduceSpec& spec : {ReduceSpec{DataType::kFloat32, ReduceOp::kAverage, 1, 1},
                                     ReduceSpec{DataType::kBfloat16, ReduceOp::kSum, 1, 2}}) {
        RunCase(world, "shm_direct", spec, {elements, 3, elements / 7}, true, random);
        RunCase(world, "host", spec, {elements}, false, random);
      }
    }
  }
}

TEST(tensors_of_five_types_in_one_batch_are_reduced_each_by_its_own) {
  std::mt19937 random(hororing_test::Seed());
  const std::vector<size_t> small = {3, 1, 7, 0, 65, 1, 2}, large = {40009, 1, 30011, 17, 70001, 3};
  for (int ranks : {1, 2, 3}) {
    TestWorld world(ranks);
    AllreduceOptions options;
    options.reproducible = true;
    TestWorld in_rank_order(ranks, options);
    for (const auto& sizes : {small, large, RandomSizes(ranks, random)}) {
      for (const auto& specs : {kMixedSpecs, kNarrowSpecs}) {
        RunCase(world, "shm_direct", specs, sizes, true, random);
        RunCase(world, "host", specs, sizes, false, random);
        RunCase(in_rank_order, "host", specs, sizes, true, random);
      }
    }
  }
}

TEST(every_size_around_the_short_cut_and_the_block_is_right) {
  std::mt19937 random(hororing_test::Seed());
  for (int ranks : {2, 3}) {  // two ranks never take the short cut
    TestWorld world(ranks);
    const ReduceSpec spec{DataType::kInt32, ReduceOp::kSum, 1, 1};
    for (size_t bytes : {128, 32 << 10, 64 << 10, 128 << 10, 192 << 10, 256 << 10, 512 << 10}) {
      for (size_t elements = bytes / 4 - 17; elements <= bytes / 4 + 17; elements += 17) {
        RunCase(world, "shm_direct", spec, {elements}, true, random);
      }
    }
  }
}

// Every element of the inputs that is not finite is noted once, on some rank, with the right rank;
// all ranks know whether a result is affected.
TEST(sums_that_are_not_finite_are_found_with_the_ranks_to_blame) {
  constexpr size_t kElements = 400'000;  // several blocks
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int ranks : {2, 3}) {
    TestWorld world(ranks);
    const size_t n = static_cast<size_t>(ranks);
    for (const bool in_place : {false, true}) {
      for (int round = 0; round < 12; ++round) {
        std::vector<Findings> findings(n);
        std::vector<int64_t> expected(n, 0);
        std::vector<std::vector<float>> inputs(n, std::vector<float>(kElements, 1.0f));
        std::vector<std::vector<float>> outputs = inputs;
        for (size_t r = 0; r < n && round % 2 != 0; ++r) {
          for (size_t at : {size_t{0}, kElements / 2, kElements - 1}) {
            if ((static_cast<size_t>(round) + r) % 3 == 0) continue;
            inputs[r][at] = nan;
            ++expected[r];
          }
        }
        world.Run([&](int rank, Rank& on) {
          const size_t r = static_cast<size_t>(rank);
          Batch batch;
          batch.findings = &findings[r];
          BatchEntry entry;
          entry.input = inputs[r].data();
          entry.output = in_place ? inputs[r].data() : outputs[r].data();
          entry.elements = kElements;
          entry.reduce = {DataType::kFloat32, ReduceOp::kAverage};
          batch.entries = {entry};
          CHECK(on.direct->LooksAt(batch));
          CHECK(on.direct->Run(batch, After(NowNs(), kLimit), on.trace).ok());
        });
        std::vector<int64_t> found(n, 0);
        for (const Findings& each : findings) {
          CHECK_EQ(each.any, round % 2 != 0);
          for (const Findings::Part& part : each.inputs) {
            CHECK_EQ(part.elements.infinite, 0);
            found[static_cast<size_t>(part.rank)] += part.elements.nan;
          }
        }
        CHECK(found == expected);
      }
    }
  }
}

TEST(hundreds_of_batches_in_a_row_on_both_backends) {
  std::mt19937 random(hororing_test::Seed());
  const ReduceSpec spec{DataType::kFloat32, ReduceOp::kAverage, 1, 1};
  for (int ranks : {2, 5}) {
    TestWorld world(ranks);
    std::vector<Case> cases;
    for (int i = 0; i < 6; ++i) cases.emplace_back(spec, RandomSizes(ranks, random), ranks, random);
    for (int round = 0; round < (hororing_test::kFew ? 5 : 20); ++round) {
      for (Case& c : cases) c.Restore();
      // The threads do not synchronize between batches: a fast rank runs ahead of a slow one.
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

TEST(process_sets_that_overlap_take_turns_in_the_slots) {
  std::mt19937 random(hororing_test::Seed());
  // The last one reuses the number of a removed set.
  const std::vector<Members> sets = {
      Members::World(4), {{0, 1, 2}, 1, 0}, {{1, 3}, 2, 0}, {{2, 3}, 2, 1}};
  TestWorld world(4);
  std::vector<std::pair<size_t, std::unique_ptr<Case>>> jobs;
  for (size_t i = 0; i < 40; ++i) {
    const size_t set = i < 20 ? random() % 3 : random() % 2 * 3;
    jobs.emplace_back(
        set, std::make_unique<Case>(ReduceSpec{DataType::kFloat64, ReduceOp::kAverage, 1, 1},
                                    std::vector<size_t>{1 + random() % 200000, random() % 9000},
                                    static_cast<int>(sets[set].ranks.size()), random));
  }
  world.Run([&](int r, Rank& rank) {
    auto& shared = dynamic_cast<ShmTransport&>(*rank.transport);
    std::vector<std::unique_ptr<SharedMemoryBackend>> backends;
    for (const Members& members : sets) {
      backends.push_back(DirectBackend(shared, members));
    }
    for (auto& [set, c] : jobs) {
      const std::vector<int>& ranks = sets[set].ranks;
      const auto place = std::find(ranks.begin(), ranks.end(), r);
      if (place == ranks.end()) continue;
      CHECK_OK(backends[set]->Run(c->BatchOf(static_cast<int>(place - ranks.begin())),
                                  After(NowNs(), kLimit), rank.trace));
    }
  });
  for (auto& [set, c] : jobs) CHECK_EQ(c->Judge(/*exact=*/true), std::string());
}

TEST(announced_failure_ends_the_peers_waits_and_names_the_rank) {
  for (const char* backend : {"shm_direct", "host"}) {
    for (size_t elements : {size_t{5}, size_t{300000}}) {
      std::mt19937 random(hororing_test::Seed());
      TestWorld world(3);
      Case first({DataType::kFloat32, ReduceOp::kSum, 1, 1}, {elements}, 3, random);
      Case second({DataType::kFloat32, ReduceOp::kSum, 1, 1}, {elements}, 3, random);
      world.Run([&](int r, Rank& rank) {
        CHECK_OK(rank.backend(backend).Run(first.BatchOf(r), After(NowNs(), kLimit), rank.trace));
      });
      // A failure ends the waits for everything that is not complete yet.
      world.Run([&](int r, Rank& rank) {
        if (r == 2)
          return rank.transport->AnnounceFailure({Code::kPeerLost, "the disk is full", 2});
        const Status status =
            rank.backend(backend).Run(second.BatchOf(r), After(NowNs(), kLimit), rank.trace);
        CHECK(status.code() == Code::kPeerLost);
        CHECK_EQ(status.rank(), 2);
        CHECK(status.message().find("the disk is full") != std::string::npos);
        // Once broken, every later call fails at once.
        CHECK(
            !rank.backend(backend).Run(second.BatchOf(r), After(NowNs(), kLimit), rank.trace).ok());
      });
    }
  }
}

TEST(silent_peer_ends_in_an_error_at_the_deadline) {
  for (const char* backend : {"shm_direct", "host"}) {
    std::mt19937 random(hororing_test::Seed());
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

TEST(what_no_backend_runs_is_refused) {
  TestWorld world(1);
  Batch batch;
  batch.entries.resize(1);
  TraceSink trace;
  for (const Collective kind :
       {Collective::kJoin, Collective::kAddProcessSet, Collective::kRemoveProcessSet}) {
    batch.kind = kind;
    CHECK(world.rank(0).host->Run(batch, kForever, trace).code() == Code::kInternal);
  }
}

TEST(shm_direct_leaves_all_but_elementwise_allreduces_to_the_host_backend) {
  TestWorld world(1);
  Batch batch;
  batch.entries.resize(1);
  CHECK(world.rank(0).direct->Supports(batch));
  batch.entries[0].reduce.op = ReduceOp::kAdasum;
  CHECK(!world.rank(0).direct->Supports(batch));
  CHECK(world.rank(0).host->Supports(batch));
  batch.entries[0].reduce.op = ReduceOp::kSum;
  for (const Collective kind : {Collective::kAllgather, Collective::kBroadcast,
                                Collective::kAlltoall, Collective::kReducescatter}) {
    batch.kind = kind;
    CHECK(!world.rank(0).direct->Supports(batch));
    CHECK(world.rank(0).host->Supports(batch));
  }
}

// Compares runs with one another: adasum_test.cc has the oracle.
TEST(adasum_gives_a_tensor_the_same_bits_alone_and_fused_in_place_or_not) {
  std::mt19937 random(hororing_test::Seed());
  for (int ranks : {1, 2, 4, 8}) {
    TestWorld world(ranks);
    for (const DataType dtype :
         {DataType::kFloat16, DataType::kBfloat16, DataType::kFloat32, DataType::kFloat64}) {
      const ReduceSpec spec{dtype, ReduceOp::kAdasum, 0.5, 3};
      const auto run = [&](Case& c) {
        world.Run([&](int r, Rank& rank) {
          CHECK_OK(rank.host->Run(c.BatchOf(r), After(NowNs(), kLimit), rank.trace));
        });
      };
      Case fused(spec, {0, 1, 1009, 7, 30011}, ranks, random);
      run(fused);
      for (const Case::Tensor& tensor : fused.tensors) {
        Case alone(spec, {tensor.elements}, ranks, random);
        alone.tensors[0].original = tensor.original;
        alone.Restore();
        run(alone);
        for (size_t r = 0; r < tensor.original.size(); ++r) {
          CHECK(tensor.result(r) == alone.tensors[0].result(0));
          CHECK(alone.tensors[0].result(r) == alone.tensors[0].result(0));
        }
      }
    }
  }
}

TEST(adasum_of_unlike_pairs_is_refused_with_the_number_of_ranks) {
  std::mt19937 random(hororing_test::Seed());
  TestWorld world(3);
  Case c({DataType::kFloat32, ReduceOp::kAdasum, 1, 1}, {5}, 3, random);
  world.Run([&](int r, Rank& rank) {
    const Status status = rank.host->Run(c.BatchOf(r), After(NowNs(), kLimit), rank.trace);
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find("3 ranks") != std::string::npos);
  });
}

TEST(timeline_shows_pack_reduce_unpack_with_names_and_bytes) {
  std::mt19937 random(hororing_test::Seed());
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
        CHECK(reduced >= total);  // padding may add a line per tensor
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
  std::mt19937 random(hororing_test::Seed());
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
  bool Done(Request) override { return true; }
  void Post(int, std::string) override {}
  bool Poll(int*, std::string*) override { return false; }
  void Sleep(TimeNs) override {}
  void Wake() override {}
  Status CheckPeers() override { return Status::Ok(); }
  void AnnounceFailure(const Status&) override {}
  bool Flush(TimeNs) override { return true; }
};

TEST(factory_prefers_shared_memory_and_says_what_is_wrong) {
  const auto names = [](const std::vector<std::unique_ptr<Backend>>& backends) {
    std::string text;
    for (const auto& backend : backends) text += std::string(backend->name()) + " ";
    return text;
  };
  const auto options = [](const char* name, bool reproducible) {
    BackendOptions chosen;
    chosen.name = name;
    chosen.allreduce.reproducible = reproducible;
    return chosen;
  };
  World shared, plain;
  std::vector<std::unique_ptr<Transport>> ranks = MakeInprocWorld(2, 0);
  shared.transport = std::move(ranks[0]);
  plain.transport = std::make_unique<PlainTransport>();
  shared.topology = plain.topology = MakeTopology(0, {"a", "a"});
  const auto made = [&](const char* name, bool reproducible, const World& world) {
    const BackendOptions chosen = options(name, reproducible);
    return names(MakeBackends(chosen, world, *world.transport, Members::World(2)));
  };
  CHECK_EQ(made("auto", false, shared), std::string("shm_direct host cuda "));
  CHECK_EQ(made("host", true, shared), std::string("host cuda "));
  CHECK_EQ(made("auto", false, plain), std::string("host cuda "));
}

}  // namespace
}  // namespace hororing
