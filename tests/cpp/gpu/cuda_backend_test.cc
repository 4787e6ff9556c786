// Rung 2: batches on devices, through NCCL and through host memory, on the fake GPU.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>

#include "check.h"
#include "collective/collectives.h"
#include "cuda_world.h"

using namespace hororing;

namespace {

struct Moved {  // data of one rank in a collective that only moves bytes
  std::vector<int32_t> input, output, seen;
};

void CheckMove(int size, const CudaOptions& options, Collective kind,
               const std::function<void(int, BatchEntry*, Moved*)>& make,
               const std::function<std::vector<int32_t>(int)>& expected) {
  RunCuda(size, options, [&](CudaRank& rank) {
    Moved moved;
    BatchEntry entry;
    make(rank.r, &entry, &moved);
    const std::vector<int32_t> values = moved.input;
    std::fill(moved.input.begin(), moved.input.end(), -1);
    Batch batch;
    batch.kind = kind;
    batch.root = size - 1;
    entry.reduce.dtype = DataType::kInt32;
    entry.name = "x";
    entry.input = moved.input.data();
    entry.output = kind == Collective::kBroadcast ? moved.input.data() : moved.output.data();
    entry.elements = moved.input.size();
    std::vector<int32_t>& result = kind == Collective::kBroadcast ? moved.input : moved.output;
    batch.entries.push_back(entry);
    CHECK_OK(RunBatch(
        rank, batch, [&] { std::copy(values.begin(), values.end(), moved.input.begin()); },
        [&] { moved.seen = result; }));
    CHECK(moved.seen == expected(rank.r));
  });
}

const GpuMode kModes[] = {GpuMode::kNccl, GpuMode::kStaged};

// Returns when all ranks have called it.
void Meet(CudaRank& rank) {
  const size_t size = static_cast<size_t>(rank.transport->size());
  const char mine = 1;
  std::vector<char> all(size);
  CHECK_OK(AllgatherV(*rank.transport, &mine, std::vector<size_t>(size, 1), all.data(),
                      After(NowNs(), kLimit)));
}

}  // namespace

TEST(sums_of_every_type_and_operation_are_right_every_way) {
  fake_gpu_reset();
  fake_gpu_set("delay_us", 20);
  for (const GpuMode mode : kModes) {
    for (int size : {1, 2, 3}) {
      RunAllSums(size, {mode}, AllSpecs(), {{1}, {5, 0, 17, 333}});
    }
  }
  NothingLeft();
}

TEST(the_pinned_buffer_grows_with_the_batches) {
  fake_gpu_reset();
  const std::vector<ReduceSpec> specs = {{DataType::kFloat32, ReduceOp::kAverage, 0.5, 3.0}};
  RunAllSums(2, {GpuMode::kStaged}, specs,
             {{1, 70, 0, 9}, {260000}, {1, 110000, 70, 210001, 0, 9}});
  RunAllSums(2, {GpuMode::kNccl}, specs, {{1, 110000, 70, 110001, 0, 9}});
  NothingLeft();
}

TEST(several_tensors_are_packed_by_two_kernels_or_by_copies_where_there_are_none) {
  const std::vector<ReduceSpec> specs = {{DataType::kFloat32, ReduceOp::kSum, 1.0, 1.0}};
  std::vector<size_t> many(300, 77);
  for (bool without : {false, true}) {
    fake_gpu_reset();
    fake_gpu_set("no_module", without);
    const int64_t kernels = fake_gpu_count("kernels"), copies = fake_gpu_count("copies");
    RunAllSums(2, {GpuMode::kNccl}, specs, {many});
    CHECK_EQ(fake_gpu_count("kernels") - kernels, without ? 0 : 2 * 2 * 3);  // 120 in a launch
    CHECK_EQ(fake_gpu_count("copies") - copies, without ? 2 * 2 * 300 : 0);
  }
  NothingLeft();
}

TEST(a_batch_of_several_types_is_one_call_for_each_and_what_nccl_lacks_goes_through_the_host) {
  fake_gpu_reset();
  std::vector<ReduceSpec> specs = kNarrowSpecs;
  const std::vector<size_t> sizes = {7, 1000, 3, 1, 65};
  std::mt19937 random(hororing_test::Seed());
  const auto collectives_of = [&](const CudaOptions& options) {
    Case c(specs, sizes, 2, random);
    const int64_t before = fake_gpu_count("collectives");
    RunCuda(2, options, [&](CudaRank& rank) { RunSums(rank, c); });
    CHECK_EQ(c.Judge(/*exact=*/false), std::string());
    return (fake_gpu_count("collectives") - before) / 2;
  };
  CHECK_EQ(collectives_of({GpuMode::kNccl}), 5);
  specs[2] = {DataType::kInt16, ReduceOp::kSum, 1, 1};  // NCCL has none
  specs[4] = {DataType::kUint8, ReduceOp::kAverage, 1, 1};
  CHECK_EQ(collectives_of({GpuMode::kNccl}), 3);
  CHECK_EQ(collectives_of({GpuMode::kStaged}), 0);
  NothingLeft();
}

TEST(what_does_not_fit_into_the_fusion_buffer_goes_as_it_lies) {
  fake_gpu_reset();
  CudaOptions options{GpuMode::kNccl};
  options.fusion_bytes = 1024;
  RunAllSums(2, options, {{DataType::kFloat32, ReduceOp::kSum, 1.0, 1.0}}, {{200, 200}});
  NothingLeft();
}

TEST(a_fusion_buffer_that_one_rank_cannot_have_none_has_and_nobody_waits_in_vain) {
  fake_gpu_reset();
  fake_gpu_set("no_memory_on", 1);
  const int64_t collectives = fake_gpu_count("collectives");
  const std::vector<ReduceSpec> specs = {{DataType::kFloat32, ReduceOp::kSum, 1.0, 1.0}};
  RunAllSums(3, {GpuMode::kNccl}, specs, {{5, 7, 0}, {9, 2}});
  CHECK_EQ(fake_gpu_count("collectives") - collectives, 3 * 2 * 2);
  fake_gpu_reset();
  NothingLeft();
}

TEST(gathered_rows_may_differ_between_ranks) {
  fake_gpu_reset();
  for (const GpuMode mode : kModes) {
    for (int size : {1, 2, 3, 4}) {
      for (bool even : {true, false}) {
        const auto rows = [&](int r) { return static_cast<size_t>(even ? 5 : r * 4); };
        std::vector<int32_t> all;
        for (int r = 0; r < size; ++r) all.insert(all.end(), rows(r), 100 + r);
        CheckMove(
            size, {mode}, Collective::kAllgather,
            [&](int r, BatchEntry* entry, Moved* moved) {
              moved->input.assign(rows(r), 100 + r);
              moved->output.assign(all.size(), 0);
              for (int q = 0; q < size; ++q) entry->receive_bytes.push_back(rows(q) * 4);
            },
            [&](int) { return all; });
      }
    }
  }
  NothingLeft();
}

TEST(the_last_rank_broadcasts) {
  fake_gpu_reset();
  for (const GpuMode mode : kModes) {
    for (int size : {1, 2, 3, 4}) {
      CheckMove(
          size, {mode}, Collective::kBroadcast,
          [](int r, BatchEntry*, Moved* moved) { moved->input.assign(70001, 7 + r); },
          [&](int) { return std::vector<int32_t>(70001, 7 + size - 1); });
    }
  }
  NothingLeft();
}

TEST(every_rank_sends_every_other_its_rows) {
  fake_gpu_reset();
  for (const GpuMode mode : kModes) {
    for (int size : {1, 2, 3, 4}) {
      const auto rows = [](int from, int to) { return static_cast<size_t>((from * 3 + to) % 4); };
      CheckMove(
          size, {mode}, Collective::kAlltoall,
          [&](int r, BatchEntry* entry, Moved* moved) {
            for (int q = 0; q < size; ++q) {
              moved->input.insert(moved->input.end(), rows(r, q), 10 * r + q);
              moved->output.insert(moved->output.end(), rows(q, r), 0);
              entry->send_bytes.push_back(rows(r, q) * 4);
              entry->receive_bytes.push_back(rows(q, r) * 4);
            }
          },
          [&](int r) {
            std::vector<int32_t> received;
            for (int q = 0; q < size; ++q) received.insert(received.end(), rows(q, r), 10 * q + r);
            return received;
          });
    }
  }
  NothingLeft();
}

TEST(parts_of_a_reduce_scatter_may_differ) {
  fake_gpu_reset();
  for (const GpuMode mode : kModes) {
    for (int size : {1, 2, 3, 4}) {
      for (size_t spare : {size_t{0}, size_t{1}}) {
        const auto part = [&](int r) { return 4 + (r == 0 ? spare : 0); };
        CheckMove(
            size, {mode}, Collective::kReducescatter,
            [&](int r, BatchEntry* entry, Moved* moved) {
              for (int q = 0; q < size; ++q) {
                entry->parts.push_back(part(q));
                moved->input.insert(moved->input.end(), part(q), 10 * q + r);
              }
              moved->output.assign(part(r), 0);
            },
            [&](int r) {
              return std::vector<int32_t>(part(r), size * 10 * r + size * (size - 1) / 2);
            });
      }
    }
  }
  NothingLeft();
}

TEST(factors_that_nccl_would_round_or_has_not_go_by_way_of_the_host) {
  fake_gpu_reset();
  std::vector<ReduceSpec> specs;
  for (const DataType dtype : {DataType::kFloat16, DataType::kBfloat16}) {
    // NCCL would round the products.
    specs.push_back({dtype, ReduceOp::kSum, 0.5, 3.0});
    specs.push_back({dtype, ReduceOp::kSum, 1.0 / 3, 1.0});
    specs.push_back({dtype, ReduceOp::kAverage, 1.0, 0.7});
    specs.push_back({dtype, ReduceOp::kAverage, 1e-12, 7e11});
  }
  for (const DataType dtype : {DataType::kFloat16, DataType::kFloat32, DataType::kFloat64}) {
    specs.push_back({dtype, ReduceOp::kMin, -0.5, 3.0});
    specs.push_back({dtype, ReduceOp::kProduct, 0.5, 3.0});
  }
  const int64_t collectives = fake_gpu_count("collectives");
  for (int size : {1, 3}) {
    RunAllSums(size, {GpuMode::kNccl}, specs, {{1}, {5, 0, 1777, 333}, {9001}});
  }
  RunCuda(2, {GpuMode::kNccl}, [](CudaRank& rank) {
    std::vector<uint16_t> halfs(2);
    uint16_t part = 0, seen = 0;
    Batch batch;
    batch.kind = Collective::kReducescatter;
    batch.entries.resize(1);
    batch.entries[0].reduce = {DataType::kFloat16, ReduceOp::kSum, 1.0 / 3, 1.0};
    batch.entries[0].input = halfs.data();
    batch.entries[0].output = &part;
    batch.entries[0].elements = 2;
    batch.entries[0].parts = {1, 1};
    CHECK_OK(
        RunBatch(rank, batch, [&] { halfs = {0x4200, 0x4600}; }, [&] { seen = part; }));  // 3 and 6
    CHECK_EQ(seen, rank.r == 0 ? uint16_t{0x4000} : uint16_t{0x4400});                    // 2 and 4
  });
  CHECK_EQ(fake_gpu_count("collectives"), collectives);
  NothingLeft();
}

TEST(averages_of_sixteen_bits_are_left_to_nccl_where_it_does_not_round_the_factor) {
  fake_gpu_reset();
  for (const DataType dtype : {DataType::kFloat16, DataType::kBfloat16}) {
    // The factors of the second cancel out.
    const std::vector<ReduceSpec> specs = {{dtype, ReduceOp::kAverage, 1.0, 1.0},
                                           {dtype, ReduceOp::kAverage, 0.5, 2.0}};
    for (const int size : {2, 3, 4, 6}) {
      const int64_t collectives = fake_gpu_count("collectives");
      RunAllSums(size, {GpuMode::kNccl}, specs, {{100}});
      CHECK_EQ(fake_gpu_count("collectives") - collectives, size == 3 || size == 6 ? 0 : 2 * size);
    }
  }
  NothingLeft();
}

TEST(ranks_choose_nccl_where_each_has_it_and_a_device_of_its_own) {
  fake_gpu_reset();
  const auto goes_by_nccl = [](const CudaOptions& options) {
    std::atomic<int> count{0};
    RunCuda(2, options, [&](CudaRank& rank) {
      float value = 1;
      Batch batch;
      batch.entries.resize(1);
      batch.entries[0].input = batch.entries[0].output = &value;
      batch.entries[0].elements = 1;
      CHECK_OK(RunBatch(rank, batch, [&] { value = 2; }, [&] { CHECK_EQ(value, 4.0f); }));
      count += rank.cuda->nccl() != nullptr ? 1 : 0;
    });
    return count.load();
  };
  CudaOptions shared, reproducible, without, demanded;
  shared.one_device = demanded.one_device = true;
  demanded.mode = GpuMode::kNccl;
  reproducible.reproducible = true;
  without.nccl = "libno_such_nccl.so";
  CHECK_EQ(goes_by_nccl({}), 2);
  CHECK_EQ(goes_by_nccl(demanded), 2);
  CHECK_EQ(goes_by_nccl(shared), 0);
  CHECK_EQ(goes_by_nccl(reproducible), 0);
  CHECK_EQ(goes_by_nccl(without), 0);
  NothingLeft();
}

TEST(ranks_with_different_releases_of_nccl_go_by_way_of_the_host) {
  fake_gpu_reset();
  RunCuda(2, {}, [](CudaRank& rank) {
    // The ranks load NCCL one after the other.
    for (int r = 0; r < 2; ++r) {
      Meet(rank);
      if (r != rank.r) continue;
      fake_gpu_set("nccl_version", r == 0 ? 23203 : 22703);
      std::shared_ptr<const NcclApi> api;
      CHECK_OK(rank.devices->Nccl(&api));
    }
    float value = 1;
    CHECK_OK(RunBatch(rank, OneFloat(&value), [&] { value = 2; }, [&] { CHECK_EQ(value, 4.0f); }));
    CHECK(rank.cuda->nccl() == nullptr);
  });
  fake_gpu_reset();
  NothingLeft();
}

namespace {

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(nccl_that_is_demanded_and_missing_is_an_error_with_the_reason) {
  fake_gpu_reset();
  CudaOptions options{GpuMode::kNccl};
  options.nccl = "libno_such_nccl.so";
  options.leave = false;
  RunCuda(2, options, [](CudaRank& rank) {
    float value = 1;
    const Status status = rank.cuda->Run(OneFloat(&value), After(NowNs(), kLimit), rank.trace);
    CHECK(Contains(status.message(), "HORORING_GPU=nccl"));
    CHECK(Contains(status.message(), "libno_such_nccl.so"));
  });
  NothingLeft();
}

TEST(a_communicator_that_does_not_come_about_ends_by_the_deadline_and_is_aborted) {
  fake_gpu_reset();
  fake_gpu_set("init_hangs", 1);
  const int64_t aborts = fake_gpu_count("aborts");
  CudaOptions options{GpuMode::kNccl};
  options.leave = false;
  RunCuda(2, options, [](CudaRank& rank) {
    float value = 1;
    // Enough for the ranks to agree that they make one, on a busy machine.
    const Status status = rank.cuda->Run(OneFloat(&value), After(NowNs(), 2 * kSecond), rank.trace);
    CHECK(status.code() == Code::kTransport);
    CHECK(Contains(status.message(), "ncclCommInitRankConfig"));
    CHECK(Contains(status.message(), "HORORING_TIMEOUT_S"));
  });
  CHECK_EQ(fake_gpu_count("aborts") - aborts, 2);
  fake_gpu_reset();
  fake_gpu_set("init_fails", 1);
  RunCuda(2, options, [](CudaRank& rank) {
    float value = 1;
    const Status status = rank.cuda->Run(OneFloat(&value), After(NowNs(), kLimit), rank.trace);
    CHECK(Contains(status.message(), "last words of the fake"));
  });
  fake_gpu_reset();
  NothingLeft();
}

// Also if tensors are unpacked behind it, from memory that the backend frees when it ends.
TEST(a_collective_that_hangs_is_noticed_and_the_abort_frees_the_stream) {
  fake_gpu_reset();
  CudaOptions options{GpuMode::kNccl};
  options.leave = false;
  for (const bool packed : {false, true}) {
    fake_gpu_set("hang_after", fake_gpu_count("collectives"));
    RunCuda(2, options, [packed](CudaRank& rank) {
      float value = 1, other = 1;
      Batch batch = OneFloat(&value);
      if (packed) {
        batch.entries.push_back(batch.entries[0]);
        batch.entries[1].input = batch.entries[1].output = &other;
      }
      // Enough to make the communicator on a busy machine.
      CHECK_OK(rank.cuda->Run(batch, After(NowNs(), 2 * kSecond), rank.trace));
      Status status;
      const TimeNs limit = After(NowNs(), kLimit);
      while ((status = rank.cuda->Poll()).ok() && NowNs() < limit) {
      }
      CHECK(status.code() == Code::kTransport);
      CHECK(Contains(status.message(), packed ? "'2 tensors'" : "'x'"));
      const std::shared_ptr<const DeviceEvent> done = rank.cuda->done();
      rank.cuda = nullptr;
      bool reached = false;
      while (!reached && NowNs() < limit) CHECK_OK(done->Poll(&reached));
      CHECK(reached);
    });
  }
  fake_gpu_reset();
  NothingLeft();
}

TEST(looking_at_what_is_under_way_breaks_no_capture_of_the_framework) {
  fake_gpu_reset();
  RunCuda(2, {GpuMode::kNccl}, [](CudaRank& rank) {
    float value = 1;
    CHECK_OK(rank.cuda->Run(OneFloat(&value), After(NowNs(), kLimit), rank.trace));
    Meet(rank);
    fake_gpu_set("capturing", 1);
    CHECK_OK(rank.cuda->Poll());
    Meet(rank);
    fake_gpu_set("capturing", 0);
    CHECK_OK(rank.cuda->Leave(After(NowNs(), kLimit)));
  });
  NothingLeft();
}

TEST(factors_that_change_from_step_to_step_leave_no_operations_behind) {
  fake_gpu_reset();
  RunCuda(2, {GpuMode::kNccl}, [](CudaRank& rank) {
    for (int step = 1; step <= 200; ++step) {
      float value = 3, seen = 0;
      Batch batch = OneFloat(&value);
      batch.entries[0].reduce.prescale = step % 3 == 0 ? 0.5 : static_cast<double>(step) / 64;
      CHECK_OK(RunBatch(rank, batch, [&] { value = 64; }, [&] { seen = value; }));
      CHECK_EQ(seen, static_cast<float>(128 * batch.entries[0].reduce.prescale));
      CHECK(fake_gpu_count("operations") <= 128);
    }
  });
  CHECK_EQ(fake_gpu_count("operations"), 0);
  NothingLeft();
}

TEST(an_error_that_nccl_finds_later_is_told) {
  fake_gpu_reset();
  CudaOptions options{GpuMode::kNccl};
  options.leave = false;
  RunCuda(2, options, [](CudaRank& rank) {
    float value = 1;
    CHECK_OK(RunBatch(rank, OneFloat(&value), [] {}, [] {}));
    CHECK_OK(rank.cuda->Poll());
    Meet(rank);
    fake_gpu_set("async_error_after", 0);
    const Status status = rank.cuda->Poll();
    CHECK(status.code() == Code::kTransport);
    CHECK(Contains(status.message(), "remote process exited"));
  });
  fake_gpu_reset();
  NothingLeft();
}
