// The reduction kernels of every instruction set against a naive oracle, bit by bit.
//
// The oracle computes float32, and types that accumulate in float32, in float64, and rounds after
// each step: 53 bits are more than 2 * 24 + 2, so the second rounding changes nothing (Figueroa,
// "When is double rounding innocuous?", 1995). float64 is computed in float64, and integers in 128
// bits.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hororing {
namespace {

__extension__ typedef __int128 Int128;
using Bytes = std::vector<unsigned char>;

constexpr DataType kTypes[] = {DataType::kUint8,   DataType::kInt8,    DataType::kUint16,
                               DataType::kInt16,   DataType::kInt32,   DataType::kInt64,
                               DataType::kFloat16, DataType::kFloat32, DataType::kFloat64,
                               DataType::kBool,    DataType::kBfloat16};
constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};
constexpr double kFactors[][2] = {{1, 1},      {0.5, 1},  {1, 1.0 / 3},
                                  {1.7, -0.3}, {-3, 100}, {0, 1e10}};

bool IsFloat(DataType dtype) {
  return dtype == DataType::kFloat16 || dtype == DataType::kBfloat16 ||
         dtype == DataType::kFloat32 || dtype == DataType::kFloat64;
}

std::vector<std::string> Sets() {
  std::vector<std::string> sets;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    if (SetKernels(name)) sets.push_back(name);
  }
  return sets;
}

std::string Text(const ReduceSpec& spec) {
  return std::string(Name(spec.op)) + " " + Name(spec.dtype) + " x" +
         std::to_string(spec.prescale) + " x" + std::to_string(spec.postscale);
}

template <typename T>
T Read(const void* data, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const unsigned char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}
template <typename T>
void Write(void* data, size_t i, T value) {
  std::memcpy(static_cast<unsigned char*>(data) + i * sizeof(T), &value, sizeof(T));
}

// ---- oracle: floats ----

double ReadReal(DataType dtype, const void* data, size_t i) {
  switch (dtype) {
    case DataType::kFloat16: return static_cast<double>(HalfToFloat(Read<uint16_t>(data, i)));
    case DataType::kBfloat16: return static_cast<double>(Bfloat16ToFloat(Read<uint16_t>(data, i)));
    case DataType::kFloat32: return static_cast<double>(Read<float>(data, i));
    default: return Read<double>(data, i);
  }
}
void WriteReal(DataType dtype, void* data, size_t i, double value) {
  switch (dtype) {
    case DataType::kFloat16: Write(data, i, FloatToHalf(static_cast<float>(value))); break;
    case DataType::kBfloat16: Write(data, i, FloatToBfloat16(static_cast<float>(value))); break;
    case DataType::kFloat32: Write(data, i, static_cast<float>(value)); break;
    default: Write(data, i, value);
  }
}
double RoundReal(DataType dtype, double value) {
  return dtype == DataType::kFloat64 ? value : static_cast<double>(static_cast<float>(value));
}
double CombineReal(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::kMin: return std::isnan(a) || std::isnan(b) ? NAN : (b < a ? b : a);
    case ReduceOp::kMax: return std::isnan(a) || std::isnan(b) ? NAN : (b > a ? b : a);
    case ReduceOp::kProduct: return a * b;
    default: return a + b;
  }
}
double OneReal(const ReduceSpec& spec, int divisor, const std::vector<Bytes>& sources, size_t i) {
  const auto round = [&](double value) { return RoundReal(spec.dtype, value); };
  double result = 0;
  for (size_t s = 0; s < sources.size(); ++s) {
    double next = ReadReal(spec.dtype, sources[s].data(), i);
    if (spec.prescale != 1) next = round(next * round(spec.prescale));
    result = s == 0 ? next : round(CombineReal(spec.op, result, next));
  }
  if (spec.op == ReduceOp::kAverage) result = round(result / divisor);
  if (spec.postscale != 1) result = round(result * round(spec.postscale));
  return result;
}

// ---- oracle: integers ----

struct Range {
  Int128 low, high;
};
Range RangeOf(DataType dtype) {
  const int bits = static_cast<int>(ElementSize(dtype)) * 8;
  const Int128 one = 1;
  const bool is_unsigned = dtype == DataType::kUint8 || dtype == DataType::kUint16;
  if (is_unsigned) return {0, (one << bits) - 1};
  return {-(one << (bits - 1)), (one << (bits - 1)) - 1};
}
Int128 ReadInteger(DataType dtype, const void* data, size_t i) {
  switch (dtype) {
    case DataType::kUint8: return Read<uint8_t>(data, i);
    case DataType::kInt8: return Read<int8_t>(data, i);
    case DataType::kUint16: return Read<uint16_t>(data, i);
    case DataType::kInt16: return Read<int16_t>(data, i);
    case DataType::kInt32: return Read<int32_t>(data, i);
    default: return Read<int64_t>(data, i);
  }
}
// Little-endian, like all supported machines.
void WriteInteger(DataType dtype, void* data, size_t i, Int128 value) {
  const size_t bytes = ElementSize(dtype);
  std::memcpy(static_cast<unsigned char*>(data) + i * bytes, &value, bytes);
}
Int128 Wrap(DataType dtype, Int128 value) {
  const Range range = RangeOf(dtype);
  const Int128 span = range.high - range.low + 1;
  Int128 offset = (value - range.low) % span;
  if (offset < 0) offset += span;
  return range.low + offset;
}
Int128 Scale(DataType dtype, Int128 value, double factor) {
  if (factor == 1) return value;
  const Range range = RangeOf(dtype);
  const double scaled = static_cast<double>(value) * factor;
  if (scaled >= static_cast<double>(range.high)) return range.high;
  if (scaled <= static_cast<double>(range.low)) return range.low;
  return static_cast<Int128>(scaled);
}
Int128 OneInteger(const ReduceSpec& spec, int divisor, const std::vector<Bytes>& sources,
                  size_t i) {
  Int128 result = 0;
  for (size_t s = 0; s < sources.size(); ++s) {
    const Int128 next =
        Scale(spec.dtype, ReadInteger(spec.dtype, sources[s].data(), i), spec.prescale);
    if (s == 0)
      result = next;
    else if (spec.op == ReduceOp::kMin)
      result = next < result ? next : result;
    else if (spec.op == ReduceOp::kMax)
      result = next > result ? next : result;
    else if (spec.op == ReduceOp::kProduct)
      result = Wrap(spec.dtype, result * next);
    else if (spec.op == ReduceOp::kSum)
      result = Wrap(spec.dtype, result + next);
    else
      result += next;
  }
  if (spec.op == ReduceOp::kAverage) result /= divisor;
  return Scale(spec.dtype, result, spec.postscale);
}

bool OneBool(const ReduceSpec& spec, const std::vector<Bytes>& sources, size_t i) {
  size_t trues = 0;
  for (const Bytes& source : sources) trues += source[i] != 0 ? 1 : 0;
  const bool any = spec.op == ReduceOp::kSum || spec.op == ReduceOp::kMax;
  return any ? trues > 0 : trues == sources.size();
}

Bytes Oracle(const ReduceSpec& spec, int divisor, const std::vector<Bytes>& sources, size_t n) {
  Bytes result(n * ElementSize(spec.dtype));
  for (size_t i = 0; i < n; ++i) {
    if (IsFloat(spec.dtype)) {
      WriteReal(spec.dtype, result.data(), i, OneReal(spec, divisor, sources, i));
    } else if (spec.dtype == DataType::kBool) {
      // A single source is copied byte by byte. Any value but 0 is true.
      result[i] = sources.size() == 1 ? sources[0][i] : OneBool(spec, sources, i) ? 1 : 0;
    } else {
      WriteInteger(spec.dtype, result.data(), i, OneInteger(spec, divisor, sources, i));
    }
  }
  return result;
}

// Equal bits, or NaN in both.
bool Same(DataType dtype, const void* a, const void* b, size_t n) {
  const size_t element = ElementSize(dtype);
  for (size_t i = 0; i < n; ++i) {
    const auto* left = static_cast<const unsigned char*>(a) + i * element;
    const auto* right = static_cast<const unsigned char*>(b) + i * element;
    if (std::memcmp(left, right, element) == 0) continue;
    if (!IsFloat(dtype)) return false;
    if (!std::isnan(ReadReal(dtype, a, i)) || !std::isnan(ReadReal(dtype, b, i))) return false;
  }
  return true;
}

// ---- values ----

// Ordinary numbers, and the limits of the type. Two NaNs rarely meet.
Bytes RandomValues(DataType dtype, size_t n, std::mt19937& random) {
  Bytes values(n * ElementSize(dtype));
  const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e-40, -6e-8, 65504, 3e38, 1e-310};
  for (size_t i = 0; i < n; ++i) {
    if (dtype == DataType::kBool) {
      values[i] = static_cast<unsigned char>(random() % 3 == 0 ? 0 : random());  // true: not 0
    } else if (IsFloat(dtype)) {
      const double ordinary = (static_cast<double>(random() % 2000001) - 1e6) / 65536.0;
      WriteReal(dtype, values.data(), i, random() % 16 == 0 ? special[random() % 10] : ordinary);
    } else {
      const Range range = RangeOf(dtype);
      const uint64_t bits = static_cast<uint64_t>(random()) << 32 | random();
      const unsigned kind = random() % 8;
      const Int128 value = kind == 0   ? range.low
                           : kind == 1 ? range.high
                           : kind == 2 ? 0
                                       : static_cast<Int128>(bits);
      WriteInteger(dtype, values.data(), i, value);
    }
  }
  return values;
}

std::vector<const void*> Pointers(const std::vector<Bytes>& sources) {
  std::vector<const void*> pointers;
  for (const Bytes& source : sources) pointers.push_back(source.data());
  return pointers;
}

std::vector<ReduceSpec> AllSpecs() {
  std::vector<ReduceSpec> specs;
  for (const DataType dtype : kTypes) {
    for (const ReduceOp op : kOps) {
      for (const auto& factors : kFactors) {
        const ReduceSpec spec{dtype, op, factors[0], factors[1]};
        if (Check(spec).ok()) specs.push_back(spec);
      }
    }
  }
  return specs;
}

// ---- tests ----

TEST(reduce_many_equals_the_oracle_for_every_set_type_op_and_factor) {
  std::mt19937 random(hororing_test::Seed());
  const std::vector<std::string> sets = Sets();
  for (const ReduceSpec& spec : AllSpecs()) {
    for (const int count : {1, 2, 3, 4, 5, 8}) {
      for (const size_t n :
           {size_t{0}, size_t{1}, size_t{7}, size_t{64}, size_t{193}, size_t{8500}}) {
        const bool tiles = n > 1000;  // beyond a tile (reduce_kernels.inc) of any type
        if (tiles && count != 3 && count != 5) continue;
        std::vector<Bytes> sources;
        for (int s = 0; s < count; ++s) sources.push_back(RandomValues(spec.dtype, n, random));
        const Bytes expected = Oracle(spec, count, sources, n);
        for (const std::string& set : sets) {
          SetKernels(set.c_str());
          Bytes result(n * ElementSize(spec.dtype) + 1, 0xA5);
          ReduceMany(spec, count, result.data(), Pointers(sources).data(), count, n);
          if (!Same(spec.dtype, result.data(), expected.data(), n) || result.back() != 0xA5) {
            hororing_test::Fail(__FILE__, __LINE__,
                                set + ": " + Text(spec) + ", " + std::to_string(count) +
                                    " sources of " + std::to_string(n));
          }
        }
      }
    }
  }
}

TEST(all_sets_give_the_same_bits_at_every_length_and_misalignment) {
  std::mt19937 random(hororing_test::Seed());
  const std::vector<std::string> sets = Sets();
  for (const ReduceSpec& spec : AllSpecs()) {
    const size_t element = ElementSize(spec.dtype);
    for (size_t n = 0; n < 300; n = n < 70 ? n + 1 : n + 37) {
      std::vector<Bytes> sources;
      std::vector<const void*> pointers;
      const size_t shift = n % 5;  // elements
      for (int s = 0; s < 3; ++s) {
        sources.push_back(RandomValues(spec.dtype, n + shift, random));
        pointers.push_back(sources.back().data() + shift * element);
      }
      Bytes first;
      for (const std::string& set : sets) {
        SetKernels(set.c_str());
        Bytes result(n * element);
        ReduceMany(spec, 3, result.data(), pointers.data(), 3, n);
        if (first.empty()) first = result;
        if (!Same(spec.dtype, first.data(), result.data(), n)) {
          hororing_test::Fail(
              __FILE__, __LINE__,
              set + " differs from " + sets[0] + ": " + Text(spec) + ", n " + std::to_string(n));
        }
      }
    }
  }
}

TEST(the_result_may_be_any_of_the_sources) {
  std::mt19937 random(hororing_test::Seed());
  for (const std::string& set : Sets()) {
    SetKernels(set.c_str());
    for (const ReduceSpec& spec : AllSpecs()) {
      const size_t n = 8500;  // more than a tile (reduce_kernels.inc) of any type
      std::vector<Bytes> sources;
      for (int s = 0; s < 3; ++s) sources.push_back(RandomValues(spec.dtype, n, random));
      Bytes apart(n * ElementSize(spec.dtype));
      ReduceMany(spec, 3, apart.data(), Pointers(sources).data(), 3, n);
      for (size_t in_place = 0; in_place < 3; ++in_place) {
        std::vector<Bytes> copies = sources;
        ReduceMany(spec, 3, copies[in_place].data(), Pointers(copies).data(), 3, n);
        CHECK(Same(spec.dtype, copies[in_place].data(), apart.data(), n));
      }
    }
  }
}

TEST(partial_results_in_place_equal_reduce_many) {
  std::mt19937 random(hororing_test::Seed());
  for (const std::string& set : Sets()) {
    SetKernels(set.c_str());
    for (const ReduceSpec& spec : AllSpecs()) {
      if (NeedsWideAccumulator(spec)) continue;
      const size_t n = 531;
      std::vector<Bytes> sources;
      for (int s = 0; s < 3; ++s) sources.push_back(RandomValues(spec.dtype, n, random));
      Bytes expected(n * ElementSize(spec.dtype));
      ReduceMany(spec, 3, expected.data(), Pointers(sources).data(), 3, n);
      Bytes& sum = sources[0];
      for (Bytes& source : sources) StartPartial(spec, source.data(), source.data(), n);
      for (size_t s = 1; s < 3; ++s) {
        CombinePartials(spec, sum.data(), sum.data(), sources[s].data(), n);
      }
      FinishPartial(spec, 3, sum.data(), sum.data(), n);
      CHECK(Same(spec.dtype, sum.data(), expected.data(), n));
    }
  }
}

TEST(partial_results_equal_reduce_many) {
  std::mt19937 random(hororing_test::Seed());
  for (const std::string& set : Sets()) {
    SetKernels(set.c_str());
    for (const ReduceSpec& spec : AllSpecs()) {
      const size_t n = 1531;
      std::vector<Bytes> sources;
      for (int s = 0; s < 5; ++s) sources.push_back(RandomValues(spec.dtype, n, random));
      Bytes expected(n * ElementSize(spec.dtype)), result = expected;
      ReduceMany(spec, 5, expected.data(), Pointers(sources).data(), 5, n);
      Bytes sum(n * PartialSize(spec)), next = sum;
      StartPartial(spec, sum.data(), sources[0].data(), n);
      for (size_t s = 1; s < 5; ++s) {
        StartPartial(spec, next.data(), sources[s].data(), n);
        CombinePartials(spec, sum.data(), sum.data(), next.data(), n);
      }
      FinishPartial(spec, 5, result.data(), sum.data(), n);
      if (!Same(spec.dtype, result.data(), expected.data(), n)) {
        hororing_test::Fail(__FILE__, __LINE__, set + ": " + Text(spec));
      }
    }
  }
}

TEST(sixteen_bit_floats_are_rounded_once) {
  // 2048 + 1 + 1 is 2050, though 2048 + 1 alone rounds back to 2048.
  for (const std::string& set : Sets()) {
    SetKernels(set.c_str());
    const uint16_t values[] = {FloatToHalf(2048), FloatToHalf(1), FloatToHalf(1)};
    const void* const sources[] = {&values[0], &values[1], &values[2]};
    uint16_t sum = 0;
    ReduceMany({DataType::kFloat16, ReduceOp::kSum, 1, 1}, 1, &sum, sources, 3, 1);
    CHECK_EQ(HalfToFloat(sum), 2050.0f);
  }
}

TEST(all_sets_find_what_is_not_finite_at_every_place) {
  struct Kind {
    DataType dtype;
    uint64_t largest, infinite, nan;
  };
  const Kind kinds[] = {
      {DataType::kFloat16, 0x7BFF, 0x7C00, 0x7C01},
      {DataType::kBfloat16, 0x7F7F, 0x7F80, 0x7F81},
      {DataType::kFloat32, 0x7F7FFFFF, 0x7F800000, 0x7F800001},
      {DataType::kFloat64, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF0000000000001},
      {DataType::kInt32, 0x7FFFFFFF, 0x7F800000, 0x7F800001},
  };
  for (const char* set : {"portable", "avx2", "avx512"}) {
    if (!SetKernels(set)) continue;
    for (const Kind& kind : kinds) {
      const size_t bytes = ElementSize(kind.dtype);
      for (size_t n : {1, 7, 16, 65, 300}) {
        std::vector<unsigned char> data(n * bytes);
        for (size_t i = 0; i < n; ++i) {
          const uint64_t word = kind.largest | (i % 2) << (8 * bytes - 1);
          std::memcpy(&data[i * bytes], &word, bytes);
        }
        CHECK(AllFinite(kind.dtype, data.data(), n));
        const std::vector<unsigned char> fine = data;
        for (size_t i = 0; i < n; i += 1 + n / 40) {
          const uint64_t word = (i % 3 == 0 ? kind.nan : kind.infinite) | uint64_t{i % 2}
                                                                              << (8 * bytes - 1);
          std::memcpy(&data[i * bytes], &word, bytes);
          const NonFinite found = CountNonFinite(kind.dtype, data.data(), n);
          const bool is_float = kind.dtype != DataType::kInt32;
          CHECK_EQ(AllFinite(kind.dtype, data.data(), n), !is_float);
          CHECK_EQ(found.nan, is_float && i % 3 == 0 ? 1 : 0);
          CHECK_EQ(found.infinite, is_float && i % 3 != 0 ? 1 : 0);
          data = fine;
        }
      }
    }
  }
  SetKernels("avx512") || SetKernels("avx2");
}

TEST(min_and_max_propagate_not_a_number_from_any_source) {
  for (const std::string& set : Sets()) {
    SetKernels(set.c_str());
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (size_t place = 0; place < 3; ++place) {
        float values[3] = {1, 2, 3};
        values[place] = NAN;
        const void* const sources[] = {&values[0], &values[1], &values[2]};
        float result = 0;
        ReduceMany({DataType::kFloat32, op, 1, 1}, 1, &result, sources, 3, 1);
        CHECK(std::isnan(result));
      }
    }
  }
}

TEST(integer_averages_are_exact_and_truncate_toward_zero) {
  for (const std::string& set : Sets()) {
    SetKernels(set.c_str());
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    const int64_t values[] = {kMax, -7, kMax - 1, -8};
    const void* const sources[] = {&values[0], &values[2]};
    const void* const negatives[] = {&values[1], &values[3]};
    const ReduceSpec average{DataType::kInt64, ReduceOp::kAverage, 1, 1};
    int64_t result = 0;
    ReduceMany(average, 2, &result, sources, 2, 1);
    CHECK_EQ(result, kMax - 1);
    ReduceMany(average, 2, &result, negatives, 2, 1);
    CHECK_EQ(result, -7);
  }
}

TEST(weighted_averages_equal_the_oracle_whole_and_in_partials) {
  std::mt19937 random(hororing_test::Seed());
  constexpr size_t kN = 203;
  for (const std::string& set : Sets()) {
    SetKernels(set.c_str());
    for (const DataType dtype :
         {DataType::kFloat16, DataType::kBfloat16, DataType::kFloat32, DataType::kFloat64}) {
      for (const std::vector<double>& weights :
           {std::vector<double>{0.25, 0, 1, 0.75, 2}, {1, 1, 0, 1, 3}, {0, 0, 0, 0, 1}}) {
        const size_t ranks = weights.size() - 1;
        std::vector<Bytes> sources;
        std::vector<double> expected(kN, 0.0);
        for (size_t s = 0; s < ranks; ++s) {
          sources.emplace_back(kN * ElementSize(dtype));
          for (size_t i = 0; i < kN; ++i) {
            const double value =
                weights[s] == 0 ? NAN : static_cast<double>(static_cast<int>(random() % 99) - 49);
            WriteReal(dtype, sources.back().data(), i, value);
            if (weights[s] != 0) expected[i] += weights[s] * value / weights.back();
          }
        }
        ReduceSpec spec{dtype, ReduceOp::kAverage, 1, 0.5};
        spec.weights = &weights;
        Bytes whole(kN * ElementSize(dtype)), result = whole;
        ReduceMany(spec, 7, whole.data(), Pointers(sources).data(), static_cast<int>(ranks), kN);
        std::vector<double> sum(kN), own(kN);  // large enough for all types of partial results
        for (size_t s = 0; s < ranks; ++s) {
          spec.prescale = weights[s];
          StartPartial(spec, s == 0 ? sum.data() : own.data(), sources[s].data(), kN);
          if (s > 0) CombinePartials(spec, sum.data(), sum.data(), own.data(), kN);
        }
        FinishPartial(spec, 7, result.data(), sum.data(), kN);
        const double unit = dtype == DataType::kFloat64   ? 1e-14
                            : dtype == DataType::kFloat32 ? 1e-6
                                                          : 1.0 / 256;
        for (size_t i = 0; i < kN; ++i) {
          const double value = ReadReal(dtype, whole.data(), i);
          CHECK(std::fabs(value - 0.5 * expected[i]) <= unit * 32);
          CHECK(std::fabs(ReadReal(dtype, result.data(), i) - value) <= unit * 32);
        }
      }
    }
  }
}

TEST(weights_that_are_alike_give_the_bits_of_the_plain_average) {
  const std::vector<double> alike{1, 1, 1, 3};
  std::mt19937 random(hororing_test::Seed());
  ReduceSpec spec{DataType::kFloat32, ReduceOp::kAverage, 1, 1};
  std::vector<Bytes> sources;
  for (int s = 0; s < 3; ++s) sources.push_back(RandomValues(spec.dtype, 100, random));
  Bytes plain(400), weighted(400);
  ReduceMany(spec, 3, plain.data(), Pointers(sources).data(), 3, 100);
  spec.weights = &alike;
  ReduceMany(spec, 3, weighted.data(), Pointers(sources).data(), 3, 100);
  CHECK(Same(spec.dtype, plain.data(), weighted.data(), 100));
}

TEST(specs_without_a_meaning_are_refused_with_a_reason) {
  const ReduceSpec good{DataType::kFloat32, ReduceOp::kSum, 1, 1};
  CHECK_OK(Check(good));
  CHECK_EQ(static_cast<int>(Check({DataType::kBool, ReduceOp::kAverage, 1, 1}).code()),
           static_cast<int>(Code::kInvalidArgument));
  CHECK(!Check({DataType::kBool, ReduceOp::kSum, 2, 1}).ok());
  CHECK(!Check({DataType::kFloat32, ReduceOp::kSum, NAN, 1}).ok());
  CHECK(!Check({DataType::kFloat32, ReduceOp::kSum, 1, INFINITY}).ok());
  CHECK(Check({DataType::kBool, ReduceOp::kAverage, 1, 1}).message().find("bool") !=
        std::string::npos);
}

TEST(kernels_can_be_chosen_by_name_and_unknown_names_change_nothing) {
  CHECK(SetKernels("portable"));
  CHECK(!SetKernels("mmx"));
  CHECK_EQ(std::string(KernelsInUse()), "portable");
}

}  // namespace
}  // namespace hororing
