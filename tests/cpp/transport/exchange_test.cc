// The collectives by pairwise exchange over worlds of threads: alltoall and reduce-scatter, and the
// all-gathers and sums that use them.

#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "collective/allreduce.h"
#include "collective/collectives.h"
#include "collective_world.h"

namespace hororing {
namespace {

const auto kWorldSizes = hororing_test::AllOrFew<int>({1, 2, 3, 4, 5, 8}, {2, 3});

// ---- alltoall ----

using Sizes = std::vector<std::vector<size_t>>;  // [from][to], bytes

std::vector<Sizes> AlltoallCases(size_t ranks) {
  std::vector<Sizes> cases(5, Sizes(ranks, std::vector<size_t>(ranks, 0)));
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {  // case 0: everything is empty
      cases[1][from][to] = 1;
      cases[2][from][to] = (from * 7 + to * 13) % 5 * 100 + from % 2;  // ragged, also empty
      cases[3][from][to] = (from + 2 * to) % 3 == 0 ? 700001 + from : to;
    }
  }
  cases[4][0][ranks - 1] = 300001;  // only one pair has data
  return cases;
}

TEST(alltoall_transposes_ragged_parts) {
  for (const char* kind : kKinds) {
    for (const int size : kWorldSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        const size_t ranks = static_cast<size_t>(rank.size());
        const size_t me = static_cast<size_t>(rank.rank());
        for (const Sizes& sizes : AlltoallCases(ranks)) {
          rank.Enter("alltoall");
          Bytes input, expected;
          std::vector<size_t> received;
          for (size_t q = 0; q < ranks; ++q) {
            for (size_t i = 0; i < sizes[me][q]; ++i) input.push_back(Content(me * 16 + q, i));
            for (size_t i = 0; i < sizes[q][me]; ++i) expected.push_back(Content(q * 16 + me, i));
            received.push_back(sizes[q][me]);
          }
          const Bytes before = input;
          for (const size_t segment_bytes : {size_t{0}, size_t{5000}, size_t{32} << 10}) {
            Bytes result(expected.size() + 1, 0xA5);
            CHECK_OK(AlltoallV(rank.transport, input.data(), sizes[me], result.data(), received,
                               Soon(), segment_bytes));
            CHECK_EQ(Open(rank.transport), 0u);
            CHECK_EQ(result.back(), 0xA5);
            result.pop_back();
            CHECK(result == expected);
            CHECK(input == before);
          }
        }
      });
    }
  }
}

// ---- reduce-scatter ----

void CheckReduceScatter(Rank& rank, const ReduceSpec& spec, const std::vector<size_t>& parts,
                        bool in_place, Scratch& scratch, size_t segment_bytes = 0) {
  rank.Enter("reduce-scatter");
  const size_t element = ElementSize(spec.dtype), me = static_cast<size_t>(rank.rank());
  size_t n = 0, begin = 0;
  for (size_t r = 0; r < parts.size(); ++r) {
    if (r == me) begin = n;
    n += parts[r];
  }
  Bytes input = Input(spec, rank.rank(), n);
  const Bytes before = input;
  Bytes expected(parts[me] * element);
  for (size_t i = 0; i < parts[me]; ++i) {
    Put(spec.dtype, expected, i, Expected(spec, rank.size(), begin + i));
  }
  Bytes result(expected.size() + 1, 0xA5);
  void* to = in_place ? input.data() + begin * element : result.data();
  std::vector<size_t> bytes;
  for (const size_t part : parts) bytes.push_back(part * element);
  CHECK_OK(RankOrderReduceScatter(rank.transport, {input.data(), bytes, to, spec}, scratch, Soon(),
                                  segment_bytes));
  CHECK_EQ(Open(rank.transport), 0u);
  CHECK_EQ(result.back(), 0xA5);
  Bytes wanted = before;
  if (in_place && !expected.empty()) {
    std::memcpy(wanted.data() + begin * element, expected.data(), expected.size());
  }
  result.pop_back();
  if (input != wanted || (!in_place && result != expected)) {
    std::string what = std::string(rank.transport.name()) + ": rank " + std::to_string(me) + ", " +
                       Name(spec.op) + " of " + Name(spec.dtype) + ", parts";
    for (const size_t part : parts) what += " " + std::to_string(part);
    hororing_test::Fail(__FILE__, __LINE__, what);
  }
}

TEST(reduce_scatter_of_every_type_and_op_gives_the_oracles_bits) {
  for (const char* kind : kKinds) {
    for (const int size : kWorldSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        Scratch scratch;
        std::vector<size_t> parts;
        for (int r = 0; r < rank.size(); ++r) parts.push_back(static_cast<size_t>(13 + r % 2));
        for (const DataType dtype : kTypes) {
          for (const ReduceOp op : kOps) {
            if (!Check({dtype, op, 1, 1}).ok()) continue;
            CheckReduceScatter(rank, {dtype, op, 1, 1}, parts, false, scratch);
            if (dtype == DataType::kFloat32 || dtype == DataType::kBfloat16 ||
                dtype == DataType::kInt32) {
              CheckReduceScatter(rank, {dtype, op, 3, 4}, parts, true, scratch);
            }
          }
        }
      });
    }
  }
}

TEST(reduce_scatter_takes_parts_of_any_size) {
  for (const char* kind : kKinds) {
    for (const int size : kWorldSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        Scratch scratch;
        const size_t ranks = static_cast<size_t>(rank.size());
        std::vector<std::vector<size_t>> cases;
        cases.emplace_back(ranks, size_t{0});
        cases.emplace_back(ranks, size_t{1});
        cases.emplace_back();  // the first part is not the largest
        for (size_t r = 0; r < ranks; ++r) cases.back().push_back(r % 2 == 0 ? 0 : 1000 * r + 3);
        for (const std::vector<size_t>& parts : cases) {
          for (const bool in_place : {false, true}) {
            for (const ReduceSpec& spec :
                 {ReduceSpec{DataType::kFloat32, ReduceOp::kAverage, 1, 1},
                  ReduceSpec{DataType::kFloat16, ReduceOp::kSum, 1, 1},
                  ReduceSpec{DataType::kInt64, ReduceOp::kAverage, 1, 1}}) {
              CheckReduceScatter(rank, spec, parts, in_place, scratch);
            }
          }
        }
        // Parts of zero, two, three and four segments; then only one rank has data.
        const ReduceSpec sum{DataType::kFloat64, ReduceOp::kSum, 1, 1};
        std::vector<size_t> parts;
        for (size_t r = 0; r < ranks; ++r) parts.push_back(40009 * (r % 4));
        for (const size_t segment_bytes : {size_t{0}, size_t{32} << 10}) {
          CheckReduceScatter(rank, sum, parts, false, scratch, segment_bytes);
          CheckReduceScatter(rank, sum, parts, true, scratch, segment_bytes);
        }
        parts.assign(ranks, 0);
        parts.back() = 170003;
        CheckReduceScatter(rank, sum, parts, false, scratch);
        CheckReduceScatter(rank, sum, parts, false, scratch, 32 << 10);
      });
    }
  }
}

// ---- collectives that use them ----

TEST(ways_of_gathering_and_lengths_of_segments_change_no_byte) {
  for (const char* kind : kKinds) {
    for (const int size : kSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        const size_t ranks = static_cast<size_t>(rank.size());
        const size_t me = static_cast<size_t>(rank.rank());
        for (const size_t segment_bytes : {size_t{0}, size_t{1}, size_t{1000}, size_t{32} << 10}) {
          for (const bool straight : {false, true}) {
            for (const size_t each : {size_t{0}, size_t{1}, size_t{997}, size_t{150001}}) {
              if (segment_bytes > 0 && each / segment_bytes > 1000) continue;
              rank.Enter("allgather");
              std::vector<size_t> sizes;
              Bytes expected, input;
              for (size_t r = 0; r < ranks; ++r) {
                sizes.push_back(r % 3 == 1 ? 0 : each + r % 2);
                for (size_t i = 0; i < sizes[r]; ++i) expected.push_back(Content(r, i));
                for (size_t i = 0; i < sizes[r] && r == me; ++i) input.push_back(Content(r, i));
              }
              Bytes result(expected.size() + 1, 0xA5);
              const GatherOptions options{nullptr, segment_bytes, straight};
              CHECK_OK(
                  AllgatherV(rank.transport, input.data(), sizes, result.data(), Soon(), options));
              CHECK_EQ(Open(rank.transport), 0u);
              CHECK_EQ(result.back(), 0xA5);
              result.pop_back();
              CHECK(result == expected);
            }
          }
        }
      });
    }
  }
}

TEST(sums_in_rank_order_have_the_same_bits_in_segments_of_any_length) {
  for (const char* kind : kKinds) {
    for (const int size : kSizes) {
      hororing_test::RunWorld(MakeWorld(kind, size), [](Rank& rank) {
        Scratch scratch;
        for (const size_t n : {size_t{0}, size_t{1}, size_t{61}, size_t{70001}}) {
          for (const ReduceSpec& spec : {ReduceSpec{DataType::kBfloat16, ReduceOp::kSum, 1, 1},
                                         ReduceSpec{DataType::kInt64, ReduceOp::kAverage, 1, 1}}) {
            for (const size_t segment_bytes : {size_t{1}, size_t{8} << 10, size_t{1} << 20}) {
              const GatherOptions options{nullptr, segment_bytes, segment_bytes != 1};
              Bytes data = Input(spec, rank.rank(), n);
              const Bytes expected = Expected(spec, rank.size(), data);
              if (segment_bytes == 1 && n > 100) continue;  // a message per byte
              CHECK_OK(RankOrderAllreduce(rank.transport, {data.data(), n, spec}, scratch, Soon(),
                                          options));
              CHECK(data == expected);
            }
          }
        }
      });
    }
  }
}

}  // namespace
}  // namespace hororing
