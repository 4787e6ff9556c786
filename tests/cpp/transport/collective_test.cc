// The collectives over worlds of threads: allreduce, allgather, broadcast, barrier; the failures of
// all collectives; and their parts. reduce_test.cc tests the arithmetic of the kernels.

#include "collective/collectives.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collective/allreduce.h"
#include "collective/segments.h"
#include "collective_world.h"

namespace hororing {
namespace {

enum class Which { kRing, kRankOrder };
constexpr Which kAlgorithms[] = {Which::kRing, Which::kRankOrder};
const char* Name(Which algorithm) { return algorithm == Which::kRing ? "ring" : "rank order"; }
bool Takes(Which algorithm, const ReduceSpec& spec) {
  return algorithm != Which::kRing || !NeedsWideAccumulator(spec);
}
Status Run(Which algorithm, Transport& transport, const ReduceBuffer& buffer, Scratch& scratch) {
  return algorithm == Which::kRing ? RingAllreduce(transport, buffer, scratch, Soon())
                                   : RankOrderAllreduce(transport, buffer, scratch, Soon());
}

// ---- allreduce ----

// Every algorithm, on the same numbers.
void CheckAllreduce(Rank& rank, const ReduceSpec& spec, size_t n, Scratch& scratch) {
  const Bytes input = Input(spec, rank.rank(), n);
  const Bytes expected = Expected(spec, rank.size(), input);
  for (const Which algorithm : kAlgorithms) {
    if (!Takes(algorithm, spec)) continue;
    rank.Enter(Name(algorithm));
    Bytes data = input;
    data.push_back(0xA5);
    CHECK_OK(Run(algorithm, rank.transport, {data.data(), n, spec}, scratch));
    CHECK_EQ(Open(rank.transport), 0u);
    const bool equal = std::equal(expected.begin(), expected.end(), data.begin());
    if (!equal || data.back() != 0xA5) {
      hororing_test::Fail(__FILE__, __LINE__,
                          std::string(rank.transport.name()) + ": " + Name(algorithm) + ", rank " +
                              std::to_string(rank.rank()) + " of " + std::to_string(rank.size()) +
                              ", " + Name(spec.op) + " of " + std::to_string(n) + " " +
                              Name(spec.dtype));
    }
  }
}

TEST(every_algorithm_type_and_op_gives_the_oracles_bits) {
  for (const char* kind : kKinds) {
    for (const int size : kSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        Scratch scratch;
        for (const DataType dtype : kTypes) {
          for (const ReduceOp op : kOps) {
            const ReduceSpec spec{dtype, op, 1, 1};
            if (Check(spec).ok()) CheckAllreduce(rank, spec, 61, scratch);
          }
        }
      });
    }
  }
}

// Every algorithm, on several types in one buffer: the same bits as each type alone.
void CheckMixed(Rank& rank, const std::vector<ReduceSpec>& specs, size_t n, Scratch& scratch) {
  ReduceBuffer buffer;
  Bytes input, expected;
  for (size_t i = 0; i < specs.size(); ++i) {
    Bytes part = Input(specs[i], rank.rank(), n + i), sum = Expected(specs[i], rank.size(), part);
    part.resize(RoundUp(part.size(), 64));
    sum.resize(part.size());
    buffer.layout.Add(specs[i], part.size());
    input.insert(input.end(), part.begin(), part.end());
    expected.insert(expected.end(), sum.begin(), sum.end());
  }
  for (const Which algorithm : kAlgorithms) {
    if (algorithm == Which::kRing && buffer.layout.wide()) continue;
    rank.Enter(Name(algorithm));
    Scratch aligned;
    CHECK_OK(aligned.Reserve(input.size(), "", &buffer.data));
    std::memcpy(buffer.data, input.data(), input.size());
    CHECK_OK(Run(algorithm, rank.transport, buffer, scratch));
    CHECK_EQ(Open(rank.transport), 0u);
    if (std::memcmp(buffer.data, expected.data(), expected.size()) != 0) {
      hororing_test::Fail(__FILE__, __LINE__,
                          std::string(rank.transport.name()) + ": " + Name(algorithm) + " of " +
                              std::to_string(n) + " of each type on rank " +
                              std::to_string(rank.rank()) + " of " + std::to_string(rank.size()));
    }
  }
}

TEST(several_types_in_one_buffer_get_the_oracles_bits) {
  const ReduceSpec f64{DataType::kFloat64, ReduceOp::kSum, 1, 1};
  const ReduceSpec f32{DataType::kFloat32, ReduceOp::kAverage, 3, 4};
  const ReduceSpec bf16{DataType::kBfloat16, ReduceOp::kAverage, 1, 1};
  const ReduceSpec counts{DataType::kInt64, ReduceOp::kAverage, 1, 1};
  const ReduceSpec bytes{DataType::kUint8, ReduceOp::kAverage, 1, 1};
  const ReduceSpec i32{DataType::kInt32, ReduceOp::kMin, 1, 1};
  for (const char* kind : kKinds) {
    for (const int size : kSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [&](Rank& rank) {
        Scratch scratch;
        for (const size_t n : {size_t{1}, size_t{61}, size_t{40009}}) {
          CheckMixed(rank, {bytes, bf16, f64, counts, f32}, n, scratch);
          CheckMixed(rank, {f32, i32, f64, {DataType::kInt64, ReduceOp::kSum, 1, 1}}, n, scratch);
        }
      });
    }
  }
}

TEST(every_count_works_also_fewer_elements_than_ranks) {
  for (const char* kind : kKinds) {
    for (const int size : kSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [size](Rank& rank) {
        Scratch scratch;
        const size_t ranks = static_cast<size_t>(size);
        for (const size_t n : {size_t{0}, size_t{1}, ranks - 1, ranks, ranks + 1, size_t{1009}}) {
          for (const ReduceSpec& spec : {ReduceSpec{DataType::kFloat32, ReduceOp::kSum, 1, 1},
                                         ReduceSpec{DataType::kFloat16, ReduceOp::kAverage, 1, 1},
                                         ReduceSpec{DataType::kInt64, ReduceOp::kAverage, 1, 1},
                                         ReduceSpec{DataType::kInt8, ReduceOp::kMin, 1, 1}}) {
            CheckAllreduce(rank, spec, n, scratch);
          }
        }
      });
    }
  }
}

TEST(scale_factors_are_applied_once_each) {
  for (const int size : {1, 2, 3}) {
    hororing_test::RunWorld(MakeWorld("queue", size), [](Rank& rank) {
      Scratch scratch;
      for (const DataType dtype :
           {DataType::kFloat32, DataType::kFloat64, DataType::kBfloat16, DataType::kInt32}) {
        for (const ReduceOp op : kOps) CheckAllreduce(rank, {dtype, op, 3, 4}, 47, scratch);
      }
    });
  }
}

TEST(large_buffers_travel_in_segments) {
  // A little over 2 MiB: several segments per chunk (for two ranks more than are posted ahead), and
  // chunks that do not end with a whole segment.
  for (const char* kind : kKinds) {
    for (const int size : hororing_test::AllOrFew<int>({2, 5}, {2})) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        Scratch scratch;
        CheckAllreduce(rank, {DataType::kFloat32, ReduceOp::kAverage, 1, 1}, 700001, scratch);
        CheckAllreduce(rank, {DataType::kBfloat16, ReduceOp::kSum, 1, 1}, 1000003, scratch);
      });
    }
  }
}

TEST(all_ranks_hold_the_same_bits_and_rank_order_is_reproducible) {
  // Numbers whose sum depends on the order.
  constexpr size_t kCount = 50021, kPart = 1234;
  const unsigned seed = hororing_test::Seed();
  for (const int size : kSizes) {
    for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16}) {
      const ReduceSpec spec{dtype, ReduceOp::kSum, 1, 1};
      std::vector<Bytes> inputs;
      std::vector<const void*> sources;
      for (int r = 0; r < size; ++r) {
        std::mt19937 random(seed + static_cast<unsigned>(r));
        Bytes input(kCount * ElementSize(dtype));
        for (size_t i = 0; i < kCount; ++i) {
          const double exponent = static_cast<double>(random() % 12);
          Put(dtype, input, i, (static_cast<double>(random() % 2001) - 1000) / std::exp2(exponent));
        }
        inputs.push_back(input);
      }
      for (const Bytes& input : inputs) sources.push_back(input.data());
      Bytes in_rank_order(inputs[0].size());
      ReduceMany(spec, size, in_rank_order.data(), sources.data(), size, kCount);

      for (const Which algorithm : kAlgorithms) {
        if (!Takes(algorithm, spec)) continue;
        std::vector<Bytes> results(static_cast<size_t>(size)), parts = results;
        hororing_test::RunWorld(MakeWorld("inproc", size), [&](Rank& rank) {
          Scratch scratch;
          const size_t r = static_cast<size_t>(rank.rank());
          results[r] = inputs[r];
          CHECK_OK(Run(algorithm, rank.transport, {results[r].data(), kCount, spec}, scratch));
          parts[r].assign(inputs[r].begin(), inputs[r].begin() + static_cast<std::ptrdiff_t>(
                                                                     kPart * ElementSize(dtype)));
          CHECK_OK(Run(algorithm, rank.transport, {parts[r].data(), kPart, spec}, scratch));
        });
        for (int r = 0; r < size; ++r) {
          CHECK(results[static_cast<size_t>(r)] == results[0]);
          CHECK(parts[static_cast<size_t>(r)] == parts[0]);
        }
        if (algorithm == Which::kRankOrder) {
          CHECK(results[0] == in_rank_order);
          // The bits do not depend on the elements that are fused.
          CHECK_EQ(std::memcmp(parts[0].data(), results[0].data(), parts[0].size()), 0);
        }
      }
    }
  }
}

TEST(scratch_is_bounded_whatever_the_size) {
  for (const int size : {2, 8}) {
    hororing_test::RunWorld(MakeWorld("inproc", size), [](Rank& rank) {
      const size_t n = 3 << 20;
      std::vector<float> data(n, 1.0f);
      const ReduceSpec spec{DataType::kFloat32, ReduceOp::kSum, 1, 1};
      for (const Which algorithm : {Which::kRing, Which::kRankOrder}) {
        Scratch scratch;
        CHECK_OK(Run(algorithm, rank.transport, {data.data(), n, spec}, scratch));
        CHECK(scratch.bytes() <= (8u << 20) + 64);
      }
    });
  }
}

// ---- the others ----

TEST(allgather_joins_ragged_contributions_in_rank_order) {
  for (const char* kind : kKinds) {
    for (const int size : kSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        const size_t ranks = static_cast<size_t>(rank.size());
        const size_t me = static_cast<size_t>(rank.rank());
        std::vector<std::vector<size_t>> cases;
        cases.emplace_back(ranks, size_t{0});
        cases.emplace_back(ranks, size_t{1});
        cases.emplace_back(ranks, size_t{0});  // only one rank has data
        cases.back()[ranks - 1] = 700001;
        cases.emplace_back();
        for (size_t r = 0; r < ranks; ++r) cases.back().push_back(r % 2 == 0 ? 0 : 1000 * r + 3);
        cases.emplace_back();
        for (size_t r = 0; r < ranks; ++r) cases.back().push_back(300000 * (r % 3) + r);
        for (const std::vector<size_t>& sizes : cases) {
          rank.Enter("allgather");
          Bytes expected;
          size_t begin = 0;
          for (size_t r = 0; r < ranks; ++r) {
            if (r == me) begin = expected.size();
            for (size_t i = 0; i < sizes[r]; ++i) expected.push_back(Content(r, i));
          }
          Bytes input(sizes[me]);
          for (size_t i = 0; i < input.size(); ++i) input[i] = Content(me, i);
          for (const bool in_place : {false, true}) {
            Bytes result(expected.size() + 1, 0xA5);
            const void* from = input.data();
            if (in_place && !input.empty()) {
              std::memcpy(result.data() + begin, input.data(), input.size());
              from = result.data() + begin;
            }
            CHECK_OK(AllgatherV(rank.transport, from, sizes, result.data(), Soon()));
            CHECK_EQ(Open(rank.transport), 0u);
            CHECK_EQ(result.back(), 0xA5);
            result.pop_back();
            CHECK(result == expected);
          }
        }
      });
    }
  }
}

TEST(broadcast_works_from_every_root_at_every_size) {
  for (const char* kind : kKinds) {
    for (const int size : kSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        for (int root = 0; root < rank.size(); ++root) {
          // Up to several segments, so that both trees and chains occur.
          for (const size_t bytes :
               {size_t{0}, size_t{1}, size_t{1000}, size_t{300001}, size_t{6 << 20} + 1}) {
            if (bytes > 1000000 && root != rank.size() / 2) continue;
            rank.Enter("broadcast");
            Bytes data(bytes + 1, 0xA5);
            for (size_t i = 0; i < bytes && rank.rank() == root; ++i) {
              data[i] = Content(static_cast<size_t>(root), i);
            }
            // Every other one has message sizes as between hosts.
            const size_t segment_bytes = root % 2 == 0 ? 0 : 32 << 10;
            CHECK_OK(Broadcast(rank.transport, root, data.data(), bytes, Soon(), segment_bytes));
            CHECK_EQ(Open(rank.transport), 0u);
            size_t wrong = 0;
            for (size_t i = 0; i < bytes; ++i) {
              wrong += data[i] == Content(static_cast<size_t>(root), i) ? 0 : 1;
            }
            CHECK_EQ(wrong, 0u);
            CHECK_EQ(data[bytes], 0xA5);
          }
        }
      });
    }
  }
}

// ---- failures ----

struct Collectives {
  const char* name;
  Status (*run)(Transport&);
};

template <Which algorithm, size_t n>
Status RunOnOnes(Transport& transport) {
  std::vector<float> data(n, 1.0f);
  Scratch scratch;
  return Run(algorithm, transport, {data.data(), n, {DataType::kFloat32, ReduceOp::kSum, 1, 1}},
             scratch);
}
template <size_t bytes>
Status RunBroadcast(Transport& transport) {
  Bytes data(bytes);
  return Broadcast(transport, 0, data.data(), bytes, Soon());
}
Status RunAllgather(Transport& transport) {
  const std::vector<size_t> sizes(static_cast<size_t>(transport.size()), 200000);
  Bytes input(200000), result(sizes.size() * 200000);
  return AllgatherV(transport, input.data(), sizes, result.data(), Soon());
}
Status RunAlltoall(Transport& transport) {
  const std::vector<size_t> sizes(static_cast<size_t>(transport.size()), 100000);
  Bytes input(sizes.size() * 100000), result(sizes.size() * 100000);
  return AlltoallV(transport, input.data(), sizes, result.data(), sizes, Soon());
}
// Parts of several segments, of one, and empty ones. `segment_bytes` 0: the built-in length.
template <size_t unit, size_t segment_bytes>
Status RunReduceScatter(Transport& transport) {
  std::vector<size_t> parts = {5 * unit * sizeof(float), 2 * unit * sizeof(float), 0, 40};
  parts.resize(static_cast<size_t>(transport.size()));
  std::vector<float> input(7 * unit + 10, 1.0f), result(5 * unit);
  Scratch scratch;
  const ReduceSpec spec{DataType::kFloat32, ReduceOp::kSum, 1, 1};
  return RankOrderReduceScatter(transport, {input.data(), parts, result.data(), spec}, scratch,
                                Soon(), segment_bytes);
}
// In short segments, several of which are in flight with every peer.
Status RunStraightAllgather(Transport& transport) {
  const std::vector<size_t> sizes(static_cast<size_t>(transport.size()), 5000);
  Bytes input(5000), result(sizes.size() * 5000);
  return AllgatherV(transport, input.data(), sizes, result.data(), Soon(), {nullptr, 500, true});
}
Status RunAlltoallInSegments(Transport& transport) {
  std::vector<size_t> sent, received;  // ragged: rank r has 2,000 (r + q) for rank q
  for (int q = 0; q < transport.size(); ++q) {
    sent.push_back(static_cast<size_t>(2000 * (transport.rank() + q)));
    received.push_back(sent.back());
  }
  Bytes input(100000), result(100000);
  return AlltoallV(transport, input.data(), sent, result.data(), received, Soon(), 700);
}
Status RunAdasum(Transport& transport) {
  std::vector<float> data(1000, 1.0f);
  Scratch scratch;
  const ReduceSpec spec{DataType::kFloat32, ReduceOp::kAdasum, 1, 1};
  return AdasumAllreduce(transport, spec, data.data(), {data.size()}, scratch, Soon());
}

// Collectives in segments have more of them than receives are posted ahead, but no larger buffers
// than that takes: below, each of their operations takes a world.
constexpr Collectives kCollectives[] = {{"ring", &RunOnOnes<Which::kRing, 150001>},
                                        {"rank order", &RunOnOnes<Which::kRankOrder, 150001>},
                                        {"allgather", &RunAllgather},
                                        {"broadcast, tree", &RunBroadcast<1000>},
                                        {"broadcast, chain", &RunBroadcast<2000000>},
                                        {"allgather, straight", &RunStraightAllgather},
                                        {"alltoall", &RunAlltoall},
                                        {"alltoall, segments", &RunAlltoallInSegments},
                                        {"reduce-scatter", &RunReduceScatter<10000, 0>},
                                        {"reduce-scatter, segments", &RunReduceScatter<2500, 4096>},
                                        {"Adasum", &RunAdasum}};

// CheckedTransport and the sanitizers notice a request that is left open or awaited twice, or whose
// memory is freed too early; the watchdog notices a hang.
TEST(a_transport_that_fails_at_operation_k_is_an_error_there_and_no_hang_elsewhere) {
  constexpr int kFaulty = 1;
  for (const char* kind : kKinds) {
    for (const int size : {2, 3, 4}) {
      if (size == 4 && hororing_test::kSanitized) continue;  // slow, and finds nothing new
      for (const Collectives& collective : kCollectives) {
        if (size == 3 && collective.run == &RunAdasum) continue;  // powers of two only
        uint64_t operations = 0;
        hororing_test::RunWorld(MakeWorld(kind, size), [&](Rank& rank) {
          rank.Enter(collective.name);
          CHECK_OK(collective.run(rank.transport));
          if (rank.rank() == kFaulty) {
            operations = dynamic_cast<CheckedTransport&>(rank.transport).operations();
          }
        });
        CHECK(operations > 0);
        for (uint64_t at = 0; at < operations; at += hororing_test::kFew ? 4 : 1) {
          Fault fault;
          fault.kind = Fault::Kind::kFail;
          fault.at = at;
          hororing_test::RunWorld(MakeWorld(kind, size, kFaulty, fault), [&](Rank& rank) {
            rank.Enter(collective.name);
            const Status status = collective.run(rank.transport);
            CHECK_EQ(Open(rank.transport), 0u);
            if (rank.rank() == kFaulty) {
              CHECK(!status.ok());
              CHECK(status.message().find("injected fault") != std::string::npos);
              rank.transport.AnnounceFailure({status.code(), status.message(), kFaulty});
            } else if (!status.ok()) {
              // The error comes from the faulty rank, or from a rank that has received it.
              CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kTransport));
              CHECK_EQ(status.rank(), kFaulty);
              rank.transport.AnnounceFailure(status);
            }
          });
        }
      }
    }
  }
}

TEST(a_deadline_ends_a_collective_that_a_peer_does_not_join) {
  const TimeNs limit = 20 * kMillisecond;
  std::vector<float> data(100, 1.0f), result(100);
  const ReduceSpec sum{DataType::kFloat32, ReduceOp::kSum, 1, 1};
  const ReduceSpec adasum{DataType::kFloat32, ReduceOp::kAdasum, 1, 1};
  const std::vector<std::function<Status(Transport&, Scratch&)>> collectives = {
      [&](Transport& transport, Scratch& scratch) {
        return RingAllreduce(transport, {data.data(), 100, sum}, scratch, After(NowNs(), limit));
      },
      [&](Transport& transport, Scratch& scratch) {
        return RankOrderReduceScatter(transport, {data.data(), {200, 200}, result.data(), sum},
                                      scratch, After(NowNs(), limit));
      },
      [&](Transport& transport, Scratch& scratch) {
        return AdasumAllreduce(transport, adasum, data.data(), {100}, scratch,
                               After(NowNs(), limit));
      },
      [&](Transport& transport, Scratch&) {
        return AlltoallV(transport, data.data(), {100, 300}, result.data(), {100, 300},
                         After(NowNs(), limit));
      }};
  for (const char* kind : kKinds) {
    for (const auto& collective : collectives) {
      hororing_test::RunWorld(MakeWorld(kind, 2), [&](Rank& rank) {
        if (rank.rank() == 1) return;
        Scratch scratch;
        CHECK(!collective(rank.transport, scratch).ok());
        CHECK_EQ(Open(rank.transport), 0u);
      });
    }
  }
}

// ---- parts ----

TEST(chunks_cover_everything_once_and_differ_by_one_at_most) {
  for (const size_t total : {size_t{0}, size_t{1}, size_t{7}, size_t{64}, size_t{1000003},
                             std::numeric_limits<size_t>::max() / 2}) {
    for (const int count : {1, 2, 3, 5, 8, 1000}) {
      size_t at = 0;
      for (int i = 0; i < count; ++i) {
        const Span chunk = Chunk(total, count, i);
        CHECK_EQ(chunk.begin, at);
        CHECK(chunk.size <= Chunk(total, count, 0).size);
        CHECK(chunk.size + 1 >= Chunk(total, count, 0).size);
        at += chunk.size;
      }
      CHECK_EQ(at, total);
    }
  }
}

TEST(segments_are_an_eighth_of_a_chunk_within_limits) {
  CHECK_EQ(SegmentBytes(0), size_t{32} << 10);
  CHECK_EQ(SegmentBytes(1 << 18), size_t{32} << 10);
  CHECK_EQ(SegmentBytes(1 << 20), size_t{128} << 10);
  CHECK_EQ(SegmentBytes(4 << 20), size_t{256} << 10);
  CHECK_EQ(SegmentBytes(size_t{32} << 20), size_t{256} << 10);
  CHECK_EQ(SegmentBytes(size_t{64} << 20), size_t{512} << 10);
  CHECK_EQ(SegmentBytes(size_t{1} << 40), size_t{2} << 20);
}

TEST(scratch_grows_is_aligned_and_survives_a_refusal) {
  Scratch scratch;
  CHECK_EQ(scratch.bytes(), 0u);
  std::byte *small = nullptr, *again = nullptr, *large = nullptr;
  CHECK_OK(scratch.Reserve(10, "", &small));
  CHECK_OK(scratch.Reserve(5, "", &again));
  CHECK_EQ(again, small);
  CHECK_OK(scratch.Reserve(1 << 20, "", &large));
  CHECK_EQ(reinterpret_cast<uintptr_t>(large) % 64, 0u);
  CHECK(scratch.bytes() >= 1 << 20);
  std::memset(large, 1, 1 << 20);
  const size_t most = std::numeric_limits<size_t>::max();
  const Status refused = scratch.Reserve(most, "no memory for sums", &large);
  CHECK(large == nullptr);
  CHECK_EQ(refused.message(), "no memory for sums of " + std::to_string(most) + " bytes");
  CHECK_EQ(scratch.bytes(), 0u);
  CHECK_OK(scratch.Reserve(100, "", &small));
}

}  // namespace
}  // namespace hororing
