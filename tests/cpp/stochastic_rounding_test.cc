// Stochastic rounding against an implementation that is written for one number at a time from the
// paper's description, in 64-bit and double arithmetic; then its statistics.

#include "base/stochastic_rounding.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/reduce.h"
#include "check.h"

namespace hororing {
namespace {

constexpr DataType kTargets[] = {DataType::kFloat16, DataType::kBfloat16};

struct Block {
  uint32_t word[4];
};

// Threefry-4x32-20 by its specification: Skein's key schedule, the permutation 0 3 2 1.
Block SlowThreefry(const Block& key, Block x) {
  const int rotations[8][2] = {{10, 26}, {11, 21}, {13, 27}, {23, 5},
                               {6, 20},  {17, 11}, {25, 10}, {18, 20}};
  uint32_t schedule[5] = {0, 0, 0, 0, 0x1BD11BDA};
  for (int i = 0; i < 4; ++i) {
    schedule[i] = key.word[i];
    schedule[4] ^= key.word[i];
  }
  for (int round = 0; round <= 20; ++round) {
    if (round % 4 == 0) {
      for (int i = 0; i < 4; ++i) x.word[i] += schedule[(round / 4 + i) % 5];
      x.word[3] += static_cast<uint32_t>(round / 4);
    }
    if (round == 20) break;
    const int partner[2] = {round % 2 == 0 ? 1 : 3, round % 2 == 0 ? 3 : 1};
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t& first = x.word[2 * pair];
      uint32_t& second = x.word[partner[pair]];
      const int left = rotations[round % 8][pair];
      first += second;
      second = static_cast<uint32_t>((uint64_t{second} << left) | (second >> (32 - left))) ^ first;
    }
  }
  return x;
}

uint32_t SlowRandom(const RandomStream& s, uint64_t element) {
  const uint64_t tile = element / 128, within = element % 128;
  const uint64_t block = 16 * tile + within % 16;
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const Block words =
      SlowThreefry({{low(s.seed), low(s.seed >> 32), s.tensor, s.stream}},
                   {{low(block), low(block >> 32), low(s.step), low(s.step >> 32)}});
  const uint64_t half = within / 16;
  return (words.word[half / 2] >> (16 * (half % 2))) & 0xFFFF;
}

double ToDouble(DataType dtype, uint16_t bits) {
  return static_cast<double>(dtype == DataType::kFloat16 ? HalfToFloat(bits)
                                                         : Bfloat16ToFloat(bits));
}

// By value: the two neighbours, and how far the number is from the lower one. `random` has as many
// bits as fall away from the fraction of a normal number.
uint16_t SlowRound(DataType dtype, float value, uint32_t random) {
  const bool half = dtype == DataType::kFloat16;
  if (std::isnan(value)) return half ? FloatToHalf(value) : FloatToBfloat16(value);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = half ? 0x7C00 : 0x7F80;
  const double size = std::fabs(static_cast<double>(value));
  if (size >= (half ? 65536.0 : 0x1p128)) return sign | infinity;
  // The largest pattern that is not above it; patterns are ordered as their values are.
  uint16_t below = 0;
  for (int bit = 14; bit >= 0; --bit) {
    const uint16_t next = static_cast<uint16_t>(below | (1 << bit));
    if (next < infinity && ToDouble(dtype, next) <= size) below = next;
  }
  const double low = ToDouble(dtype, below);
  const bool last = below + 1 == infinity;
  const double high =
      last ? (half ? 65536.0 : 0x1p128) : ToDouble(dtype, static_cast<uint16_t>(below + 1));
  const double place = (size - low) / (high - low);  // exact: powers of two
  const bool subnormal = half && size < 0x1p-14;
  const int bits = half && !subnormal ? 13 : 16;
  if (bits == 13) random >>= 3;
  const bool up = std::floor(std::ldexp(place, bits)) + random >= std::ldexp(1.0, bits);
  return static_cast<uint16_t>(sign | (below + (up ? 1 : 0)));
}

std::vector<std::string> Sets() {
  std::vector<std::string> sets;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    if (SetKernels(name)) sets.push_back(name);
  }
  return sets;
}

std::vector<uint16_t> Rounded(DataType to, const RandomStream& stream, uint64_t first,
                              const std::vector<float>& source) {
  std::vector<uint16_t> result(source.size());
  RoundStochastically(to, stream, first, result.data(), source.data(), source.size());
  return result;
}

// Patterns of every kind: random ones, and those around which something changes.
std::vector<float> Patterns(size_t n, std::mt19937& random) {
  const uint32_t special[] = {
      0,          0x80000000, 1,          0x807FFFFF, 0x00800000, 0x33800000,
      0x33000001, 0x38800000, 0x387FFFFF, 0x387FE000, 0x38801000, 0x477FE000,
      0x477FE001, 0x477FFFFF, 0x47800000, 0x7F7FFFFF, 0x7F7F0000, 0x7F800000,
      0xFF800000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x3F800000, 0xBF800001,
  };
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits = static_cast<uint32_t>(random());
    if (i % 4 == 1) bits = (bits & 0x87FFFFFF) | 0x38000000;  // float16's normal numbers
    if (i % 4 == 2) bits = (bits & 0x83FFFFFF) | 0x34000000;  // and its subnormal ones
    if (i % 4 == 3) bits = special[random() % (sizeof special / sizeof *special)];
    std::memcpy(&values[i], &bits, sizeof bits);
  }
  return values;
}

TEST(the_slow_generator_gives_the_published_numbers) {
  // Of the authors' library Random123, kat_vectors: threefry4x32, 20 rounds.
  const Block zero = SlowThreefry({{0, 0, 0, 0}}, {{0, 0, 0, 0}});
  const uint32_t expected_zero[4] = {0x9c6ca96a, 0xe17eae66, 0xfc10ecd4, 0x5256a7d8};
  const uint32_t f = 0xffffffff;
  const Block ones = SlowThreefry({{f, f, f, f}}, {{f, f, f, f}});
  const uint32_t expected_ones[4] = {0x2a881696, 0x57012287, 0xf6c7446e, 0xa16a6732};
  for (int i = 0; i < 4; ++i) {
    CHECK_EQ(zero.word[i], expected_zero[i]);
    CHECK_EQ(ones.word[i], expected_ones[i]);
  }
}

TEST(every_instruction_set_rounds_as_the_slow_implementation_does) {
  std::mt19937 random(hororing_test::Seed());
  for (const std::string& set : Sets()) {
    CHECK(SetKernels(set.c_str()));
    for (DataType to : kTargets) {
      for (size_t n : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{1000}}) {
        const RandomStream stream{(uint64_t{random()} << 32) | random(),
                                  static_cast<uint32_t>(random()), static_cast<uint32_t>(random()),
                                  (uint64_t{random()} << 32) | random()};
        // Also where the number of the block needs more than 32 bits.
        for (uint64_t first : {uint64_t{0}, uint64_t{random() % 300}, (uint64_t{1} << 36) - 100}) {
          const std::vector<float> source = Patterns(n, random);
          const std::vector<uint16_t> result = Rounded(to, stream, first, source);
          for (size_t i = 0; i < n; ++i) {
            CHECK_EQ(result[i], SlowRound(to, source[i], SlowRandom(stream, first + i)));
          }
        }
      }
    }
  }
}

TEST(pieces_round_as_the_whole_does) {
  std::mt19937 random(hororing_test::Seed());
  const RandomStream stream{11, 2, 0, 5};
  const std::vector<float> source = Patterns(1500, random);
  for (DataType to : kTargets) {
    const std::vector<uint16_t> whole = Rounded(to, stream, 0, source);
    std::vector<uint16_t> pieces;
    while (pieces.size() < source.size()) {
      const size_t begin = pieces.size();
      const size_t n = std::min<size_t>(source.size() - begin, 1 + random() % 300);
      const std::vector<float> part(source.begin() + static_cast<std::ptrdiff_t>(begin),
                                    source.begin() + static_cast<std::ptrdiff_t>(begin + n));
      const std::vector<uint16_t> rounded = Rounded(to, stream, begin, part);
      pieces.insert(pieces.end(), rounded.begin(), rounded.end());
    }
    CHECK(pieces == whole);
  }
}

TEST(seed_tensor_stream_and_step_all_matter) {
  const std::vector<float> source(1000, 1.001f);
  const RandomStream streams[] = {{1, 0, 0, 0}, {uint64_t{1} << 32, 0, 0, 0},
                                  {0, 1, 0, 0}, {0, 0, 1, 0},
                                  {0, 0, 0, 1}, {0, 0, 0, uint64_t{1} << 32}};
  const std::vector<uint16_t> base = Rounded(DataType::kBfloat16, {}, 0, source);
  for (const RandomStream& stream : streams) {
    CHECK(Rounded(DataType::kBfloat16, stream, 0, source) != base);
  }
  CHECK(Rounded(DataType::kBfloat16, {}, 1, source) != base);
  CHECK(Rounded(DataType::kBfloat16, {}, 0, source) == base);
}

TEST(numbers_of_the_target_type_are_kept) {
  for (DataType to : kTargets) {
    std::vector<float> source;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float value = static_cast<float>(ToDouble(to, static_cast<uint16_t>(bits)));
      source.push_back(std::isnan(value) ? 1.0f : value);
    }
    const std::vector<uint16_t> result = Rounded(to, {7, 0, 0, 0}, 0, source);
    for (size_t i = 0; i < source.size(); ++i) {
      const float back = static_cast<float>(ToDouble(to, result[i]));
      CHECK(std::memcmp(&back, &source[i], sizeof back) == 0);
    }
  }
}

TEST(the_mean_of_many_roundings_is_the_number) {
  constexpr size_t kTimes = 1 << 18;
  // Normal, large, subnormal in float16, below its smallest number.
  for (float value : {1.0007f, -3.3e-3f, 60001.0f, 1.2345e-5f, -2.1e-7f, 1.0e-8f}) {
    for (DataType to : kTargets) {
      const std::vector<float> source(kTimes, value);
      const std::vector<uint16_t> result = Rounded(to, {hororing_test::Seed(), 0, 0, 0}, 0, source);
      double sum = 0, low = std::numeric_limits<double>::infinity(), high = -low;
      for (uint16_t bits : result) {
        const double rounded = ToDouble(to, bits);
        sum += rounded;
        low = std::min(low, rounded);
        high = std::max(high, rounded);
      }
      const double x = static_cast<double>(value), unit = high - low;
      CHECK(low <= x && x <= high && unit > 0);
      // Five standard deviations of a mean of values that are low or high, and the cut-off part.
      const double place = (x - low) / unit;
      const double sigma = std::sqrt(place * (1 - place) / kTimes);
      CHECK_NEAR(sum / kTimes, x, unit * (5 * sigma + 0x1p-16));
    }
  }
}

TEST(a_thousand_small_steps_arrive_where_rounding_to_nearest_stays) {
  // 1 + 1000 x 0.001 in bfloat16, whose unit at 1 is 2^-7.
  constexpr size_t kLanes = 4096;
  std::vector<uint16_t> weights(kLanes, FloatToBfloat16(1.0f));
  std::vector<float> next(kLanes);
  uint16_t nearest = FloatToBfloat16(1.0f);
  for (uint64_t step = 0; step < 1000; ++step) {
    for (size_t i = 0; i < kLanes; ++i) next[i] = Bfloat16ToFloat(weights[i]) + 1e-3f;
    RoundStochastically(DataType::kBfloat16, {hororing_test::Seed(), 0, 0, step}, 0, weights.data(),
                        next.data(), kLanes);
    nearest = FloatToBfloat16(Bfloat16ToFloat(nearest) + 1e-3f);
  }
  double sum = 0;
  for (uint16_t weight : weights) sum += static_cast<double>(Bfloat16ToFloat(weight));
  // One lane's standard deviation is 0.083: that of the mean is 0.0013.
  CHECK_NEAR(sum / kLanes, 2.0, 0.01);
  CHECK_EQ(Bfloat16ToFloat(nearest), 1.0f);
}

}  // namespace
}  // namespace hororing
