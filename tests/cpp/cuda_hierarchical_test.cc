// Rung 2: batches on devices by NCCL within hosts and by the host between them, over the fake GPU,
// whose communicators are not allowed to have more ranks than a host.
#include <atomic>
#include <cmath>
#include <numeric>

#include "check.h"
#include "collective/collectives.h"
#include "cuda_world.h"

using namespace hororing;

namespace {

using Hosts = std::vector<int>;

CudaOptions On(const Hosts& hosts, size_t fusion_bytes = 1 << 20) {
  fake_gpu_reset();
  fake_gpu_set("delay_us", 20);
  size_t most = 0;
  for (const auto& ranks : RanksOnHosts(hosts)) most = std::max(most, ranks.size());
  fake_gpu_set("most_ranks", static_cast<int64_t>(most));
  CudaOptions options{DeviceWay::kHierarchical};
  options.fusion_bytes = fusion_bytes;
  options.hosts = hosts;
  return options;
}

int SizeOf(const Hosts& hosts) { return static_cast<int>(hosts.size()); }

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const Hosts kEven = {0, 0, 1, 1}, kUneven = {0, 1, 1, 0, 1}, kLonely = {0, 1, 1};

// The sum of floats, one per rank; what it was like, by rank.
Status SumOfRanks(CudaRank& rank, int size, float* value) {
  return RunBatch(
      rank, OneFloat(value), [&] { *value = static_cast<float>(rank.r + 1); },
      [&] { CHECK_EQ(*value, static_cast<float>(size * (size + 1) / 2)); });
}

}  // namespace

TEST(sums_are_right_on_even_and_uneven_hosts_and_cross_by_no_nccl) {
  for (const Hosts& hosts : {kEven, kUneven, kLonely}) {
    const CudaOptions options = On(hosts);
    const int64_t collectives = fake_gpu_count("collectives");
    RunAllSums(SizeOf(hosts), options, AllSpecs(), {{1}, {5, 0, 17, 333}});
    CHECK(fake_gpu_count("collectives") - collectives > 100);
    NothingLeft();
  }
}

TEST(nccl_itself_does_not_cross_these_hosts) {
  CudaOptions options = On(kEven);
  options.way = DeviceWay::kNccl;
  options.leave = false;
  RunCuda(4, options, [](CudaRank& rank) {
    float value = 1;
    CHECK(!rank.cuda->Run(OneFloat(&value), After(NowNs(), kLimit), rank.trace).ok());
  });
  NothingLeft();
}

TEST(pieces_end_within_tensors_and_take_turns_in_both_buffers) {
  const std::vector<ReduceSpec> specs = {{DataType::kFloat32, ReduceOp::kSum, 1.0, 1.0},
                                         {DataType::kInt64, ReduceOp::kMax, 1.0, 1.0},
                                         {DataType::kBfloat16, ReduceOp::kAverage, 1.0, 0.7},
                                         {DataType::kFloat64, ReduceOp::kProduct, 0.5, 3.0}};
  const std::vector<std::vector<size_t>> shapes = {{30011}, {1, 7000, 3, 0, 9001, 70}};
  for (const Hosts& hosts : {kEven, kUneven}) {
    // Slices of 4 KiB; also where fusion is off, but for what kernels scale.
    for (const size_t fusion_bytes : {size_t{8 << 10}, size_t{0}}) {
      RunAllSums(SizeOf(hosts), On(hosts, fusion_bytes), specs, shapes);
    }
  }
  NothingLeft();
}

TEST(averages_of_sixteen_bits_do_not_overflow_in_the_host) {
  const CudaOptions options = On(kEven);
  RunCuda(4, options, [](CudaRank& rank) {
    uint16_t value = 0;
    Batch batch = OneFloat(reinterpret_cast<float*>(&value));
    batch.reduce = {DataType::kFloat16, ReduceOp::kAverage, 1.0, 1.0};
    CHECK_OK(RunBatch(
        rank, batch, [&] { value = 0x7800; },  // 32768; the sum of a host would be infinite
        [&] { CHECK_EQ(value, uint16_t{0x7800}); }));
  });
  NothingLeft();
}

TEST(between_hosts_float32_may_be_narrow_and_what_stands_for_sixteen_bits_is_not) {
  const CudaOptions options = On(kEven);
  RunCuda(4, options, [](CudaRank& rank) {
    Tuning tuning;
    CHECK_OK(Parse("ring", &tuning));
    CHECK_OK(ParseWires("bfloat16", &tuning));
    rank.cuda->Tune(tuning);
    constexpr size_t kN = 8000;
    std::vector<float> floats(kN), sums;
    Batch batch = OneFloat(floats.data());
    batch.entries[0].elements = kN;
    // A host brings 2 + 2^-9, which is 2 in eight bits.
    CHECK_OK(RunBatch(
        rank, batch, [&] { std::fill(floats.begin(), floats.end(), 1 + 0x1p-10f); },
        [&] { sums = floats; }));
    CHECK(sums == std::vector<float>(kN, 4));
    const int64_t narrow = rank.cuda->narrow_bytes();
    CHECK_EQ(narrow, static_cast<int64_t>(kN * 4 / 2));  // the slice that this rank owns
    // A factor that no float16 holds makes it travel as float32: 4 * 0.3 * (1 + 2^-10) is
    // 1230 / 1024, and would be 1232 / 1024 by way of eight bits.
    std::vector<uint16_t> halfs(kN), seen;
    batch.entries[0].input = batch.entries[0].output = halfs.data();
    batch.reduce = {DataType::kFloat16, ReduceOp::kSum, 0.3, 1.0};
    CHECK_OK(RunBatch(
        rank, batch, [&] { std::fill(halfs.begin(), halfs.end(), uint16_t{0x3c01}); },
        [&] { seen = halfs; }));
    CHECK(seen == std::vector<uint16_t>(kN, 0x3cce));
    CHECK_EQ(rank.cuda->narrow_bytes(), narrow);
  });
  NothingLeft();
}

TEST(any_rank_broadcasts_to_all_hosts) {
  for (const Hosts& hosts : {kEven, kUneven, kLonely}) {
    const CudaOptions options = On(hosts, 8 << 10);
    const int64_t collectives = fake_gpu_count("collectives");
    RunCuda(SizeOf(hosts), options, [&](CudaRank& rank) {
      for (int root = 0; root < SizeOf(hosts); ++root) {
        // Out of place, in place, of several types of size, through many pieces.
        std::vector<int16_t> input(9001, -1), output(9001, -1), placed(77, -1), seen, also;
        Batch batch;
        batch.kind = Collective::kBroadcast;
        batch.root = root;
        batch.reduce.dtype = DataType::kInt16;
        batch.entries.resize(3);
        batch.entries[0].input = input.data();
        batch.entries[0].output = output.data();
        batch.entries[0].elements = input.size();
        batch.entries[2].input = batch.entries[2].output = placed.data();
        batch.entries[2].elements = placed.size();
        CHECK_OK(RunBatch(
            rank, batch,
            [&] {
              std::iota(input.begin(), input.end(), static_cast<int16_t>(100 * rank.r));
              std::fill(placed.begin(), placed.end(), static_cast<int16_t>(rank.r));
            },
            [&] {
              seen = output;
              also = placed;
            }));
        std::vector<int16_t> expected(9001);
        std::iota(expected.begin(), expected.end(), static_cast<int16_t>(100 * root));
        CHECK(seen == expected);
        CHECK(also == std::vector<int16_t>(77, static_cast<int16_t>(root)));
      }
    });
    CHECK(fake_gpu_count("collectives") > collectives);
    NothingLeft();
  }
}

TEST(parts_of_ranks_go_to_their_peers_on_other_hosts_in_pieces) {
  const Hosts hosts = {0, 1, 1, 0, 2, 2};
  const size_t size = hosts.size();
  const CudaOptions options = On(hosts, 8 << 10);
  const auto rows = [](size_t rank) { return rank * rank * 101; };
  const auto value = [](size_t rank, size_t i) { return static_cast<float>(i % 97 + rank); };
  const int64_t collectives = fake_gpu_count("collectives");
  RunCuda(SizeOf(hosts), options, [&](CudaRank& rank) {
    const size_t r = static_cast<size_t>(rank.r);
    // Two tensors each, the second one small.
    std::vector<float> all, input(rows(r)), second(r), gathered, second_gathered(15), seen, tiny;
    Batch gather;
    gather.kind = Collective::kAllgather;
    gather.entries.resize(2);
    for (size_t q = 0; q < size; ++q) {
      for (size_t i = 0; i < rows(q); ++i) all.push_back(value(q, i));
      gather.entries[0].receive_bytes.push_back(rows(q) * sizeof(float));
      gather.entries[1].receive_bytes.push_back(q * sizeof(float));
    }
    gathered.resize(all.size());
    gather.entries[0].input = input.data();
    gather.entries[0].output = gathered.data();
    gather.entries[0].elements = input.size();
    gather.entries[1].input = second.data();
    gather.entries[1].output = second_gathered.data();
    gather.entries[1].elements = second.size();
    CHECK_OK(RunBatch(
        rank, gather,
        [&] {
          for (size_t i = 0; i < input.size(); ++i) input[i] = value(r, i);
          std::fill(second.begin(), second.end(), static_cast<float>(r));
        },
        [&] {
          seen = gathered;
          tiny = second_gathered;
        }));
    CHECK(seen == all);
    CHECK(tiny == std::vector<float>({1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5}));

    // Plain, an average, and one of those whose factors only kernels apply.
    for (const ReduceSpec& spec :
         std::initializer_list<ReduceSpec>{{DataType::kFloat32, ReduceOp::kSum, 1.0, 1.0},
                                           {DataType::kFloat32, ReduceOp::kAverage, 1.0, 6.0},
                                           {DataType::kFloat32, ReduceOp::kMax, 0.5, 4.0}}) {
      std::vector<float> whole(all.size()), part(rows(r)), other(6), own(1), one;
      Batch scatter;
      scatter.kind = Collective::kReducescatter;
      scatter.reduce = spec;
      scatter.entries.resize(2);
      for (size_t q = 0; q < size; ++q) scatter.entries[0].parts.push_back(rows(q));
      scatter.entries[1].parts.assign(size, 1);
      scatter.entries[0].input = whole.data();
      scatter.entries[0].output = part.data();
      scatter.entries[0].elements = whole.size();
      scatter.entries[1].input = other.data();
      scatter.entries[1].output = own.data();
      scatter.entries[1].elements = other.size();
      CHECK_OK(RunBatch(
          rank, scatter,
          [&] {
            for (size_t i = 0; i < whole.size(); ++i) whole[i] = all[i] + static_cast<float>(r);
            std::fill(other.begin(), other.end(), static_cast<float>(r));
          },
          [&] {
            seen = part;
            one = own;
          }));
      const bool max = spec.op == ReduceOp::kMax;
      for (size_t i = 0; i < part.size(); ++i) {
        const float wanted = max ? 2 * (value(r, i) + 5) : 6 * value(r, i) + 15;
        CHECK(std::abs(seen[i] - wanted) < 1e-3f);
      }
      CHECK(std::abs(one[0] - (max ? 10.0f : 15.0f)) < 1e-5f);
    }
  });
  CHECK(fake_gpu_count("collectives") - collectives > 4 * 6);
  NothingLeft();
}

TEST(nccl_within_hosts_is_chosen_where_it_is_asked_for_or_releases_differ_between_hosts) {
  struct Way {
    Hosts hosts;
    DeviceWay way;
    bool releases_differ;
    int64_t communicators;  // 0: by way of the host
    int64_t collectives;    // of one sum, on all ranks
  };
  for (const Way& each :
       std::initializer_list<Way>{{{0, 0, 1, 1}, DeviceWay::kHierarchical, false, 4, 2 * 4},
                                  {{0, 0, 1, 1}, DeviceWay::kHierarchical, true, 4, 2 * 4},
                                  {{0, 0, 1, 1}, DeviceWay::kAuto, true, 4, 2 * 4},
                                  {{0, 0, 1, 1}, DeviceWay::kAuto, false, 4, 4},
                                  {{0, 0, 0, 0}, DeviceWay::kHierarchical, false, 4, 4},
                                  {{0, 1, 2, 3}, DeviceWay::kHierarchical, false, 0, 0},
                                  {{0, 1, 0, 1}, DeviceWay::kAuto, true, 4, 2 * 4},
                                  {{0, 1, 2, 3}, DeviceWay::kAuto, true, 0, 0}}) {
    fake_gpu_reset();
    CudaOptions options{each.way};
    options.hosts = each.hosts;
    const int64_t before = fake_gpu_count("collectives");
    RunCuda(4, options, [&](CudaRank& rank) {
      // Each rank loads NCCL in its turn; that of host 1 is another release.
      for (int r = 0; r < 4; ++r) {
        CHECK_OK(Barrier(*rank.transport, After(NowNs(), kLimit)));
        if (r != rank.r) continue;
        const int host = each.hosts[static_cast<size_t>(r)];
        fake_gpu_set("nccl_version", each.releases_differ && host == 1 ? 22703 : 23203);
        std::shared_ptr<const NcclApi> api;
        CHECK_OK(rank.devices->Nccl(&api));
      }
      float value = 0;
      CHECK_OK(SumOfRanks(rank, 4, &value));
      CHECK_OK(Barrier(*rank.transport, After(NowNs(), kLimit)));
      CHECK_EQ(fake_gpu_count("communicators"), each.communicators);
      CHECK_OK(Barrier(*rank.transport, After(NowNs(), kLimit)));
    });
    CHECK_EQ(fake_gpu_count("collectives") - before, each.collectives);
    NothingLeft();
  }
}

TEST(what_cannot_be_within_hosts_is_an_error_with_the_reason_on_every_rank) {
  CudaOptions without = On(kEven), reproducible = On(kEven);
  without.nccl = "libno_such_nccl.so";
  reproducible.reproducible = true;
  without.leave = reproducible.leave = false;
  for (const CudaOptions& options : {without, reproducible}) {
    RunCuda(4, options, [&](CudaRank& rank) {
      float value = 1;
      const Status status = rank.cuda->Run(OneFloat(&value), After(NowNs(), kLimit), rank.trace);
      CHECK(status.code() == Code::kInvalidArgument);
      CHECK(Contains(status.message(), "HORORING_GPU=hierarchical: "));
      CHECK(Contains(status.message(),
                     options.reproducible ? "HORORING_REPRODUCIBLE=1" : "libno_such_nccl.so"));
    });
  }
  NothingLeft();
}

TEST(a_rank_without_memory_for_slices_sends_all_by_way_of_the_host) {
  const CudaOptions options = On(kEven);
  fake_gpu_set("no_memory_on", 2);
  const int64_t collectives = fake_gpu_count("collectives");
  RunAllSums(4, options, {{DataType::kFloat32, ReduceOp::kSum, 1.0, 1.0}}, {{5000}, {3, 7}});
  CHECK_EQ(fake_gpu_count("collectives"), collectives);
  NothingLeft();
}

TEST(a_host_whose_nccl_hangs_ends_by_the_deadline_and_is_aborted) {
  CudaOptions options = On(kEven);
  options.leave = false;
  std::atomic<int> ready{0};
  const int64_t aborts = fake_gpu_count("aborts");
  RunCuda(4, options, [&](CudaRank& rank) {
    std::vector<float> values(1000);
    float value = 0;
    CHECK_OK(SumOfRanks(rank, 4, &value));
    ++ready;
    while (ready < 4) std::this_thread::yield();
    fake_gpu_set("hang_after", 0);
    Batch batch = OneFloat(values.data());
    batch.entries[0].elements = values.size();
    const Status status = rank.cuda->Run(batch, After(NowNs(), 50 * kMillisecond), rank.trace);
    CHECK(status.code() == Code::kTransport);
    CHECK(Contains(status.message(), "'x'"));
    CHECK(Contains(status.message(), "HORORING_TIMEOUT_S"));
    rank.cuda = nullptr;  // with copies behind what hangs, to memory that it gives back
  });
  CHECK_EQ(fake_gpu_count("aborts") - aborts, 4);
  fake_gpu_reset();
  NothingLeft();
}

TEST(the_time_of_a_batch_begins_when_its_tensors_are_there) {
  CudaOptions options = On(kEven);
  options.leave = false;
  RunCuda(4, options, [&](CudaRank& rank) {
    float value = 0;
    CHECK_OK(SumOfRanks(rank, 4, &value));
    std::atomic<bool> there{false};
    const TimeNs end = After(NowNs(), 150 * kMillisecond);
    RunIn(rank.stream, [&] {
      while (NowNs() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      there = true;
    });
    Batch batch = OneFloat(&value);
    std::shared_ptr<DeviceEvent> ready;
    CHECK_OK(rank.device->Record(reinterpret_cast<CuStream>(rank.stream), &ready));
    batch.entries[0].ready = ready;
    const Status status = rank.cuda->Run(batch, After(NowNs(), 20 * kMillisecond), rank.trace);
    CHECK(status.ok() || there);  // a busy machine may be late afterwards
    rank.cuda = nullptr;
    fake_gpu_synchronize(rank.stream);
  });
  NothingLeft();
}

TEST(a_rank_of_another_host_that_is_lost_ends_the_wait_of_all) {
  CudaOptions options = On(kEven);
  options.leave = false;
  RunCuda(4, options, [](CudaRank& rank) {
    float value = 0;
    CHECK_OK(SumOfRanks(rank, 4, &value));
    if (rank.r == 3) return rank.transport->AnnounceFailure("out of memory", 3);
    const Status status = rank.cuda->Run(OneFloat(&value), After(NowNs(), kLimit), rank.trace);
    CHECK(status.code() == Code::kPeerLost);
    CHECK_EQ(status.rank(), 3);
    rank.cuda = nullptr;
  });
  NothingLeft();
}

TEST(an_error_that_nccl_finds_while_a_host_waits_is_told) {
  CudaOptions options = On(kEven);
  options.leave = false;
  std::atomic<int> ready{0};
  RunCuda(4, options, [&](CudaRank& rank) {
    float value = 0;
    CHECK_OK(SumOfRanks(rank, 4, &value));
    ++ready;
    while (ready < 4) std::this_thread::yield();
    fake_gpu_set("async_error_after", 0);
    const Status status = rank.cuda->Run(OneFloat(&value), After(NowNs(), kLimit), rank.trace);
    CHECK(status.code() == Code::kTransport);
    CHECK(Contains(status.message(), "remote process exited"));
    rank.cuda = nullptr;
  });
  fake_gpu_reset();
  NothingLeft();
}
