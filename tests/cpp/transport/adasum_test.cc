// Adasum over worlds of threads, against the definition: a recursion over pairs of halves of the
// ranks, in float64, one tensor after the other.

#include <cmath>
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

using Vector = std::vector<double>;
using PerRank = std::vector<Vector>;

constexpr int kPowers[] = {1, 2, 4, 8};
constexpr DataType kFloats[] = {DataType::kFloat16, DataType::kBfloat16, DataType::kFloat32,
                                DataType::kFloat64};

// ---- the oracle ----

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
// Combines the ranks [begin, begin + count).
Vector Oracle(const PerRank& inputs, size_t begin, size_t count) {
  if (count == 1) return inputs[begin];
  const Vector a = Oracle(inputs, begin, count / 2);
  const Vector b = Oracle(inputs, begin + count / 2, count / 2);
  const double aa = Dot(a, a), ab = Dot(a, b), bb = Dot(b, b);
  Vector result;
  for (size_t i = 0; i < a.size(); ++i) {
    const double first = aa == 0 ? 0 : a[i] * (1 - ab / (2 * aa));
    const double second = bb == 0 ? 0 : b[i] * (1 - ab / (2 * bb));
    result.push_back(first + second);
  }
  return result;
}

// ---- a run ----

// Every rank's result for every tensor, [rank][tensor]; tensors[t][r] is rank r's input.
std::vector<std::vector<Bytes>> RunAdasum(const char* kind, const ReduceSpec& spec,
                                          const std::vector<PerRank>& tensors) {
  const size_t element = ElementSize(spec.dtype);
  const int size = static_cast<int>(tensors[0].size());
  std::vector<size_t> elements;
  for (const PerRank& tensor : tensors) elements.push_back(tensor[0].size());
  // The place of element i of tensor t: the buffer has chunk by chunk of all tensors.
  std::vector<std::vector<size_t>> place(tensors.size());
  size_t total = 0;
  for (int position = 0; position < size; ++position) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      const size_t chunk = Chunk(elements[t], size, position).size;
      for (size_t i = 0; i < chunk; ++i) place[t].push_back(total++);
    }
  }
  std::vector<std::vector<Bytes>> results(tensors[0].size());
  hororing_test::RunWorld(MakeWorld(kind, size), [&](Rank& rank) {
    rank.Enter("Adasum");
    const size_t me = static_cast<size_t>(rank.rank());
    Bytes data(total * element + 1, 0xA5);
    for (size_t t = 0; t < tensors.size(); ++t) {
      for (size_t i = 0; i < elements[t]; ++i) {
        Put(spec.dtype, data, place[t][i], tensors[t][me][i]);
      }
    }
    Scratch scratch;
    CHECK_OK(AdasumAllreduce(rank.transport, spec, data.data(), elements, scratch, Soon()));
    CHECK_EQ(Open(rank.transport), 0u);
    CHECK_EQ(data.back(), 0xA5);
    for (size_t t = 0; t < tensors.size(); ++t) {
      Bytes result(elements[t] * element);
      for (size_t i = 0; i < elements[t]; ++i) {
        std::memcpy(result.data() + i * element, data.data() + place[t][i] * element, element);
      }
      results[me].push_back(result);
    }
  });
  for (const std::vector<Bytes>& each : results) CHECK(each == results[0]);
  return results;
}

Vector Numbers(DataType dtype, const Bytes& data) {
  Vector numbers;
  for (size_t i = 0; i < data.size() / ElementSize(dtype); ++i) {
    numbers.push_back(Get(dtype, data, i));
  }
  return numbers;
}

// One tensor, factors of one.
Vector AdasumOf(DataType dtype, const PerRank& inputs) {
  return Numbers(dtype, RunAdasum("inproc", {dtype, ReduceOp::kAdasum, 1, 1}, {inputs})[0][0]);
}

// Numbers that the type represents exactly; some ranks have larger ones than others.
PerRank RandomInputs(DataType dtype, int size, size_t n, std::mt19937& random) {
  PerRank inputs;
  for (int r = 0; r < size; ++r) {
    const double scale = std::exp2(static_cast<double>(random() % 7) - 3) / 2147483648.0;
    Bytes data(n * ElementSize(dtype));
    for (size_t i = 0; i < n; ++i) {
      Put(dtype, data, i, (static_cast<double>(random()) - 2147483648.0) * scale);
    }
    inputs.push_back(Numbers(dtype, data));
  }
  return inputs;
}

TEST(adasum_is_the_recursion_over_pairs) {
  std::mt19937 random(hororing_test::Seed());
  const std::vector<std::vector<size_t>> counts = {
      {0}, {1}, {2}, {7}, {8}, {9}, {61}, {1009}, {20011}, {5, 0, 1, 1009, 3, 2, 64}};
  for (const char* kind : kKinds) {
    for (const int size : kPowers) {
      for (const DataType dtype : kFloats) {
        for (const auto& tensor_sizes : counts) {
          const bool scaled = random() % 2 == 0;
          const ReduceSpec spec{dtype, ReduceOp::kAdasum, scaled ? 0.75 : 1.0, scaled ? 5.0 : 1.0};
          std::vector<PerRank> tensors;
          for (const size_t n : tensor_sizes) {
            tensors.push_back(RandomInputs(dtype, size, n, random));
          }
          const auto results = RunAdasum(kind, spec, tensors);
          for (size_t t = 0; t < tensors.size(); ++t) {
            double largest = 0;
            for (Vector& input : tensors[t]) {
              for (double& number : input) {
                number *= spec.prescale;
                largest = std::max(largest, std::fabs(number));
              }
            }
            const Vector expected = Oracle(tensors[t], 0, static_cast<size_t>(size));
            const Vector result = Numbers(dtype, results[0][t]);
            // The working type rounds a few times per level, by units of the larger vector; a
            // result may have `size` times its magnitude. Sums over n numbers have an error of n
            // units of float64. Finally, the result is rounded to its type.
            const double n = static_cast<double>(expected.size());
            const double unit =
                dtype == DataType::kFloat64 ? std::exp2(-53) * (16 + n) : std::exp2(-24) * 32;
            const double own = dtype == DataType::kFloat16    ? std::exp2(-11)
                               : dtype == DataType::kBfloat16 ? std::exp2(-8)
                                                              : 0;
            const double bound = unit * largest * size * spec.postscale;
            for (size_t i = 0; i < expected.size(); ++i) {
              const double wanted = expected[i] * spec.postscale;
              // 2^-25: half the unit of subnormal float16.
              CHECK_NEAR(result[i], wanted,
                         bound + own * (std::fabs(wanted) + bound) + (own > 0 ? 0x1p-25 : 0));
            }
          }
        }
      }
    }
  }
}

// ---- the properties of Adasum ----

TEST(equal_vectors_are_averaged) {
  for (const int size : kPowers) {
    for (const DataType dtype : kFloats) {
      const Vector vector = {1, -2, 3, 0, 0.5, 7, -8};
      CHECK(AdasumOf(dtype, PerRank(static_cast<size_t>(size), vector)) == vector);
    }
  }
}

TEST(parallel_vectors_are_averaged) {
  const Vector vector = {1, -2, 3, 0, 0.5}, twice = {2, -4, 6, 0, 1},
               opposite = {-1, 2, -3, 0, -.5};
  for (const DataType dtype : kFloats) {
    CHECK(AdasumOf(dtype, {vector, twice}) == (Vector{1.5, -3, 4.5, 0, 0.75}));
    CHECK(AdasumOf(dtype, {vector, opposite}) == Vector(5, 0.0));
  }
}

TEST(orthogonal_vectors_are_summed) {
  for (const int size : kPowers) {
    for (const DataType dtype : kFloats) {
      // Only element r of rank r is not zero, so the vectors of every pair are orthogonal.
      PerRank inputs;
      Vector sum;
      for (int r = 0; r < size; ++r) {
        inputs.emplace_back(static_cast<size_t>(size), 0.0);
        inputs.back()[static_cast<size_t>(r)] = r + 1;
        sum.push_back(r + 1);
      }
      CHECK(AdasumOf(dtype, inputs) == sum);
    }
  }
}

TEST(a_zero_vector_is_neutral) {
  const Vector vector = {1, -2, 3.5, 0, 0.25}, zero(5, 0.0);
  for (const DataType dtype : kFloats) {
    CHECK(AdasumOf(dtype, {vector, zero}) == vector);
    CHECK(AdasumOf(dtype, {zero, vector}) == vector);
    CHECK(AdasumOf(dtype, {zero, zero}) == zero);
    CHECK(AdasumOf(dtype, {zero, zero, zero, vector}) == vector);
    CHECK(AdasumOf(dtype, {vector, zero, zero, vector}) == vector);
  }
}

TEST(sixteen_bit_floats_are_rounded_once) {
  // Parallel vectors are averaged: 1025.5 and 1025, then 1025.25. In float16, which has only
  // integers there, the first pair would give 1026, and the result would be 1026.
  CHECK(AdasumOf(DataType::kFloat16, {{1025}, {1026}, {1025}, {1025}}) == (Vector{1025}));
}

TEST(not_a_number_spoils_its_tensor_alone) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const ReduceSpec spec{DataType::kFloat32, ReduceOp::kAdasum, 1, 1};
  const auto results = RunAdasum("inproc", spec, {{{1, 2}, {1, nan}}, {{3, 4}, {3, 4}}});
  const Vector spoilt = Numbers(spec.dtype, results[0][0]);
  CHECK(std::isnan(spoilt[0]) && std::isnan(spoilt[1]));
  CHECK(Numbers(spec.dtype, results[0][1]) == (Vector{3, 4}));
}

TEST(what_adasum_is_not_defined_for_is_refused_with_a_reason) {
  const auto text = [](const ReduceSpec& spec, int size) {
    const Status status = CheckAdasum(spec, size);
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kInvalidArgument));
    return status.message();
  };
  const auto has = [](const std::string& whole, const std::string& part) {
    return whole.find(part) != std::string::npos;
  };
  for (const int size : {3, 5, 6, 7, 12}) {
    CHECK(has(text({DataType::kFloat32, ReduceOp::kAdasum, 1, 1}, size),
              std::to_string(size) + " ranks"));
  }
  for (const DataType dtype : kTypes) {
    const bool is_float =
        std::find(std::begin(kFloats), std::end(kFloats), dtype) != std::end(kFloats);
    if (is_float) {
      CHECK_OK(CheckAdasum({dtype, ReduceOp::kAdasum, 1, 1}, 16));
    } else {
      CHECK(has(text({dtype, ReduceOp::kAdasum, 1, 1}, 2), Name(dtype)));
    }
  }
  CHECK(has(text({DataType::kFloat32, ReduceOp::kAdasum, INFINITY, 1}, 2), "finite"));
  CHECK(has(text({DataType::kFloat32, ReduceOp::kAdasum, 1, NAN}, 2), "finite"));
  hororing_test::RunWorld(MakeWorld("inproc", 3), [](Rank& rank) {
    float data[2] = {1, 2};
    Scratch scratch;
    const ReduceSpec spec{DataType::kFloat32, ReduceOp::kAdasum, 1, 1};
    CHECK(!AdasumAllreduce(rank.transport, spec, data, {2}, scratch, Soon()).ok());
  });
}

}  // namespace
}  // namespace hororing
