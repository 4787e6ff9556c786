// The direct allreduce on tensors in arenas, in private memory, and on both at once, over worlds of
// threads: every bit against what rank order gives.

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/common.h"
#include "backend_world.h"
#include "check.h"
#include "transport/arena.h"

namespace hororing {
namespace {

constexpr size_t kArenaBytes = 64 << 20;

// Who has a tensor in its arena, and is to reduce it in place there.
enum class In { kNobody, kEverybody, kByTensor, kByRank, kAnybody };

// A case whose tensors lie in arenas as told. The rest is where the case has put it.
class ArenaCase {
 public:
  ArenaCase(TestWorld& world, const std::vector<int>& ranks, const ReduceSpec& spec,
            const std::vector<size_t>& sizes, In in, std::mt19937& random)
      : case_(spec, sizes, static_cast<int>(ranks.size()), random),
        element_(ElementSize(spec.dtype)) {
    const bool by_rank = random() % 2 == 0;
    for (size_t r = 0; r < ranks.size(); ++r) {
      arenas_.push_back(world.rank(ranks[r]).transport->arena());
      memory_.emplace_back(sizes.size(), nullptr);
      shifts_.emplace_back(sizes.size(), 0);
      for (size_t t = 0; t < sizes.size(); ++t) {
        const bool inside = in == In::kEverybody || (in == In::kByTensor && t % 2 == 0) ||
                            (in == In::kByRank && (r % 2 == 0) == by_rank) ||
                            (in == In::kAnybody && random() % 2 == 0);
        if (!inside || sizes[t] == 0) continue;
        void* memory = nullptr;
        CHECK_OK(arenas_[r]->Allocate(sizes[t] * element_ + 3 * kGuard, &memory));
        memory_[r][t] = static_cast<unsigned char*>(memory);
        shifts_[r][t] = kGuard + random() % 8 * element_;
      }
    }
  }
  ~ArenaCase() {
    for (size_t r = 0; r < memory_.size(); ++r) {
      for (unsigned char* memory : memory_[r]) {
        if (memory != nullptr) arenas_[r]->Free(memory);
      }
    }
  }

  // Of the rank at `place`; its tensors are as at first.
  Batch BatchOf(int place) {
    const size_t r = static_cast<size_t>(place);
    Batch batch = case_.BatchOf(place);
    for (size_t t = 0; t < case_.tensors.size(); ++t) {
      if (memory_[r][t] == nullptr) continue;
      std::fill_n(memory_[r][t], Bytes(t) + 3 * kGuard, kFilling);
      unsigned char* const data = memory_[r][t] + shifts_[r][t];
      std::copy_n(case_.tensors[t].original[r].data(), Bytes(t), data);
      batch.entries[t].input = batch.entries[t].output = data;
    }
    return batch;
  }

  // What is wrong with the outputs, or "".
  std::string Judge() {
    for (size_t r = 0; r < memory_.size(); ++r) {
      for (size_t t = 0; t < case_.tensors.size(); ++t) {
        if (memory_[r][t] == nullptr) continue;
        unsigned char* const data = memory_[r][t] + shifts_[r][t];
        for (unsigned char* at = memory_[r][t]; at < memory_[r][t] + Bytes(t) + 3 * kGuard; ++at) {
          if ((at < data || at >= data + Bytes(t)) && *at != kFilling) {
            return "tensor " + std::to_string(t) + " of rank " + std::to_string(r) + ": overrun";
          }
        }
        Case::Tensor& tensor = case_.tensors[t];
        Guarded& to = tensor.in_place ? tensor.inputs[r] : tensor.outputs[r];
        std::copy_n(data, Bytes(t), to.data());
      }
    }
    return case_.Judge(/*exact=*/true);
  }

  void Restore() { case_.Restore(); }

  // How much of a rank's tensors is reduced in place, where the batch is not a small one.
  int64_t BytesInArena(int place) const {
    size_t bytes = 0;
    for (size_t t = 0; t < case_.tensors.size(); ++t) {
      if (memory_[static_cast<size_t>(place)][t] != nullptr) bytes += Bytes(t);
    }
    return static_cast<int64_t>(bytes);
  }

 private:
  static constexpr size_t kGuard = 128;
  static constexpr unsigned char kFilling = 0xA5;
  size_t Bytes(size_t tensor) const { return case_.tensors[tensor].elements * element_; }

  Case case_;
  const size_t element_;
  std::vector<std::shared_ptr<Arena>> arenas_;       // per rank
  std::vector<std::vector<unsigned char*>> memory_;  // per rank and tensor; null: private
  std::vector<std::vector<size_t>> shifts_;
};

std::vector<int> AllOf(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

void RunArenaCase(TestWorld& world, const ReduceSpec& spec, const std::vector<size_t>& sizes, In in,
                  std::mt19937& random) {
  ArenaCase c(world, AllOf(world.size()), spec, sizes, in, random);
  size_t total = 0;
  for (size_t size : sizes) total += RoundUp(size * ElementSize(spec.dtype), kEntryAlign);
  const bool small = world.size() > 2 && total <= (32 << 10);  // takes the short cut
  world.Run([&](int r, Rank& rank) {
    const int64_t before = rank.direct->in_place_bytes();
    CHECK_OK(rank.direct->Run(c.BatchOf(r), After(NowNs(), kLimit), rank.trace));
    CHECK_EQ(rank.direct->in_place_bytes() - before, small ? 0 : c.BytesInArena(r));
  });
  CHECK_EQ(Describe(spec, sizes, world.size()) + ": " + c.Judge(),
           Describe(spec, sizes, world.size()) + ": ");
}

constexpr In kPlaces[] = {In::kNobody, In::kEverybody, In::kByTensor, In::kByRank, In::kAnybody};

TEST(every_operation_and_type_gives_the_bits_of_rank_order_wherever_tensors_lie) {
  std::mt19937 random(hororing_test::Seed());
  const size_t choices[] = {0, 1, 7, 63, 64, 65, 1009, 4093, 16381, 40009};
  for (int ranks : {2, 3, 5, 8}) {
    TestWorld world(ranks, {}, kArenaBytes);
    for (const ReduceSpec& spec : AllSpecs()) {
      if (random() % 3 != 0) continue;  // every spec meets some of the world sizes in each run
      std::vector<size_t> sizes(1 + random() % 12);
      for (size_t& size : sizes) size = choices[random() % std::size(choices)];
      RunArenaCase(world, spec, sizes, kPlaces[random() % std::size(kPlaces)], random);
    }
  }
}

TEST(large_tensors_cross_many_blocks_wherever_they_lie) {
  std::mt19937 random(hororing_test::Seed());
  const ReduceSpec spec{DataType::kFloat32, ReduceOp::kAverage, 1, 1};
  for (int ranks : {2, 4}) {
    TestWorld world(ranks, {}, kArenaBytes);
    for (const In in : kPlaces) RunArenaCase(world, spec, {500009, 3, 700001, 90001}, in, random);
  }
}

TEST(quick_ranks_run_ahead_into_the_next_batches_wherever_their_tensors_lie) {
  std::mt19937 random(hororing_test::Seed());
  for (int ranks : {2, 3}) {
    TestWorld world(ranks, {}, kArenaBytes);
    std::vector<std::unique_ptr<ArenaCase>> cases;
    for (int i = 0; i < 10; ++i) {
      // Every second one lets nobody pack; a small one now and then.
      const In in = i % 2 == 0 ? In::kEverybody : kPlaces[random() % std::size(kPlaces)];
      const size_t size = i % 3 == 2 ? 100 : 20000 + random() % 400000;
      cases.push_back(std::make_unique<ArenaCase>(
          world, AllOf(ranks), ReduceSpec{DataType::kInt32, ReduceOp::kSum, 1, 1},
          std::vector<size_t>{size, 5, size / 3}, in, random));
    }
    for (int round = 0; round < 4; ++round) {
      world.Run([&](int r, Rank& rank) {
        std::vector<Batch> batches;
        for (const auto& c : cases) batches.push_back(c->BatchOf(r));
        for (const Batch& batch : batches) {
          CHECK_OK(rank.direct->Run(batch, After(NowNs(), kLimit), rank.trace));
        }
      });
      for (const auto& c : cases) {
        CHECK_EQ(c->Judge(), std::string());
        c->Restore();
      }
    }
  }
}

TEST(process_sets_that_overlap_reduce_in_arenas) {
  std::mt19937 random(hororing_test::Seed());
  const std::vector<Members> sets = {
      Members::World(4), {{0, 1, 2}, 1, 0}, {{1, 3}, 2, 0}, {{2, 3}, 2, 1}};
  TestWorld world(4, {}, kArenaBytes);
  struct Job {
    const Members* members;
    std::unique_ptr<ArenaCase> c;
  };
  std::vector<Job> jobs;
  for (size_t i = 0; i < 40; ++i) {
    // A set that has number 2 again comes after the first one.
    const Members& members = sets[i < 20 ? random() % 3 : random() % 2 * 3];
    jobs.push_back({&members, std::make_unique<ArenaCase>(
                                  world, members.ranks,
                                  ReduceSpec{DataType::kFloat64, ReduceOp::kAverage, 1, 1},
                                  std::vector<size_t>{1 + random() % 200000, random() % 9000},
                                  kPlaces[random() % std::size(kPlaces)], random)});
  }
  world.Run([&](int r, Rank& rank) {
    auto& shared = dynamic_cast<ShmTransport&>(*rank.transport);
    std::vector<std::unique_ptr<ShmDirectBackend>> backends;
    for (const Members& members : sets) {
      backends.push_back(std::make_unique<ShmDirectBackend>(shared, members));
    }
    for (Job& job : jobs) {
      const std::vector<int>& ranks = job.members->ranks;
      const auto place = std::find(ranks.begin(), ranks.end(), r);
      if (place == ranks.end()) continue;
      CHECK_OK(backends[static_cast<size_t>(job.members - sets.data())]->Run(
          job.c->BatchOf(static_cast<int>(place - ranks.begin())), After(NowNs(), kLimit),
          rank.trace));
    }
  });
  for (Job& job : jobs) CHECK_EQ(job.c->Judge(), std::string());
}

TEST(more_tensors_than_a_directory_holds_are_packed) {
  std::mt19937 random(hororing_test::Seed());
  TestWorld world(2, {}, kArenaBytes);
  ArenaCase c(world, {0, 1}, {DataType::kInt16, ReduceOp::kMax, 1, 1},
              std::vector<size_t>(ShmSegment::kDirectoryEntries + 50, 5), In::kEverybody, random);
  world.Run([&](int r, Rank& rank) {
    CHECK_OK(rank.direct->Run(c.BatchOf(r), After(NowNs(), kLimit), rank.trace));
    CHECK_EQ(rank.direct->in_place_bytes(),
             static_cast<int64_t>(ShmSegment::kDirectoryEntries * 10));
  });
  CHECK_EQ(c.Judge(), std::string());
}

TEST(tensors_partly_or_not_in_place_in_an_arena_are_packed) {
  TestWorld world(2, {}, kArenaBytes);
  std::vector<float*> memory;
  const size_t elements = 50000;
  for (int r = 0; r < 2; ++r) {
    void* got = nullptr;
    CHECK_OK(world.rank(r).transport->arena()->Allocate(2 * elements * sizeof(float), &got));
    memory.push_back(static_cast<float*>(got));
    std::fill_n(memory.back(), elements, 1.0f);
  }
  world.Run([&](int r, Rank& rank) {
    float* const data = memory[static_cast<size_t>(r)];
    Batch batch;
    BatchEntry entry;
    entry.input = data;
    entry.output = data + elements;
    entry.elements = elements;
    batch.entries = {entry};
    CHECK_OK(rank.direct->Run(batch, After(NowNs(), kLimit), rank.trace));
    CHECK_EQ(rank.direct->in_place_bytes(), 0);
    for (size_t i = 0; i < elements; ++i) {
      if (data[i] != 1.0f || data[elements + i] != 2.0f) return CHECK_EQ(i, elements);
    }
  });
}

TEST(the_timeline_of_a_batch_in_arenas_has_one_reduce_and_no_copies) {
  std::mt19937 random(hororing_test::Seed());
  TestWorld world(2, {}, kArenaBytes);
  ArenaCase c(world, {0, 1}, {DataType::kFloat32, ReduceOp::kSum, 1, 1}, {400000, 100000},
              In::kEverybody, random);
  world.Run([&](int r, Rank& rank) {
    rank.trace.Enable(/*mark_cycles=*/false);
    CHECK_OK(rank.direct->Run(c.BatchOf(r), After(NowNs(), kLimit), rank.trace));
    const std::vector<TraceEvent> events = rank.trace.Drain();
    CHECK_EQ(events.size(), size_t{1});
    CHECK_EQ(events[0].name, std::string("REDUCE"));
    CHECK_EQ(events[0].bytes, 2000000);
  });
}

TEST(a_failure_ends_the_waits_of_ranks_that_pack_nothing) {
  std::mt19937 random(hororing_test::Seed());
  TestWorld world(3, {}, kArenaBytes);
  ArenaCase c(world, {0, 1, 2}, {DataType::kFloat32, ReduceOp::kSum, 1, 1}, {300000},
              In::kEverybody, random);
  world.Run([&](int r, Rank& rank) {
    if (r == 2) return rank.transport->AnnounceFailure("the disk is full", 2);
    const Status status = rank.direct->Run(c.BatchOf(r), After(NowNs(), kLimit), rank.trace);
    CHECK(status.code() == Code::kPeerLost);
    CHECK_EQ(status.rank(), 2);
  });
}

TEST(a_silent_peer_is_named_at_the_deadline_by_ranks_that_pack_nothing) {
  std::mt19937 random(hororing_test::Seed());
  TestWorld world(3, {}, kArenaBytes);
  ArenaCase c(world, {0, 1, 2}, {DataType::kFloat32, ReduceOp::kSum, 1, 1}, {300000}, In::kByRank,
              random);
  world.Run([&](int r, Rank& rank) {
    if (r == 1) return;
    const TimeNs deadline = After(NowNs(), 50 * kMillisecond);
    const Status status = rank.direct->Run(c.BatchOf(r), deadline, rank.trace);
    CHECK(status.code() == Code::kTransport);
    CHECK_EQ(status.rank(), 1);
  });
}

}  // namespace
}  // namespace hororing
