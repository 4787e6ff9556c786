// All values of float16 and bfloat16: half.h and the vectors of every kernel set, against an oracle
// that knows the formats only as tables of values.

#include <algorithm>
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

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Format {
  const char* name;
  DataType dtype;
  int exponent_bits;
  int fraction_bits;
  float (*decode)(uint16_t);
  uint16_t (*encode)(float);

  uint16_t infinity() const {
    return static_cast<uint16_t>(((1 << exponent_bits) - 1) << fraction_bits);
  }
  bool is_nan(uint16_t bits) const { return (bits & 0x7FFF) > infinity(); }
};
const Format kFormats[] = {
    {"float16", DataType::kFloat16, 5, 10, &HalfToFloat, &FloatToHalf},
    {"bfloat16", DataType::kBfloat16, 8, 7, &Bfloat16ToFloat, &FloatToBfloat16}};

// From the definition of the format. The pattern of infinity stands for the number after the
// largest one, so that the table also shows where overflow begins.
double ValueOf(const Format& format, uint16_t bits) {
  const int exponent = (bits & 0x7FFF) >> format.fraction_bits;
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const double size = exponent == 0 ? std::ldexp(fraction, 1 - bias - format.fraction_bits)
                                    : std::ldexp(fraction + (1 << format.fraction_bits),
                                                 exponent - bias - format.fraction_bits);
  return (bits & 0x8000) != 0 ? -size : size;
}

std::vector<double> NonNegativeValues(const Format& format) {
  std::vector<double> values;
  for (int bits = 0; bits <= format.infinity(); ++bits) {
    values.push_back(ValueOf(format, static_cast<uint16_t>(bits)));
  }
  return values;
}

// The nearest value in the table; of two equally near ones, that with the even pattern.
uint16_t Nearest(const Format& format, const std::vector<double>& values, float number) {
  const double size = std::fabs(static_cast<double>(number));
  const auto above = std::lower_bound(values.begin(), values.end(), size);
  size_t found = static_cast<size_t>(above - values.begin());
  if (found == values.size()) {
    found = format.infinity();
  } else if (found > 0) {
    const double up = values[found] - size, down = size - values[found - 1];
    if (down < up || (down == up && found % 2 == 1)) --found;
  }
  return static_cast<uint16_t>(found | (std::signbit(number) ? 0x8000u : 0u));
}

std::string Hex(uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", bits);
  return text;
}

// Floats for rounding: every value, every middle of two neighbours, the floats next to these, and
// random ones.
std::vector<float> Interesting(const Format& format) {
  std::vector<float> numbers;
  const std::vector<double> values = NonNegativeValues(format);
  for (size_t i = 0; i < values.size(); ++i) {
    for (const double at : {values[i], i == 0 ? 0.0 : (values[i] + values[i - 1]) / 2}) {
      const float number = static_cast<float>(at);  // exact, except for bfloat16's overflow
      for (const float each :
           {number, std::nextafter(number, kInfinity), std::nextafter(number, -kInfinity)}) {
        numbers.push_back(each);
        numbers.push_back(-each);
      }
    }
  }
  std::mt19937 random(hororing_test::Seed());
  for (int i = 0; i < 300000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    const float number = BitCast<float>(bits);
    if (!std::isnan(number)) numbers.push_back(number);
  }
  return numbers;
}

std::vector<uint16_t> AllPatterns() {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  return patterns;
}

TEST(every_16_bit_pattern_means_what_its_format_says) {
  for (const Format& format : kFormats) {
    for (const uint16_t bits : AllPatterns()) {
      const float number = format.decode(bits);
      if (format.is_nan(bits)) {
        CHECK(std::isnan(number));
        CHECK_EQ(std::signbit(number), (bits & 0x8000) != 0);
      } else if ((bits & 0x7FFF) == format.infinity()) {
        CHECK_EQ(number, (bits & 0x8000) != 0 ? -kInfinity : kInfinity);
      } else {
        CHECK_EQ(static_cast<double>(number), ValueOf(format, bits));
        CHECK_EQ(std::signbit(number), (bits & 0x8000) != 0);
      }
    }
  }
}

TEST(every_number_survives_the_way_through_float32) {
  for (const Format& format : kFormats) {
    for (const uint16_t bits : AllPatterns()) {
      const uint16_t back = format.encode(format.decode(bits));
      // A NaN becomes quiet: this sets the highest bit of the fraction.
      const unsigned quiet = format.is_nan(bits) ? 1u << (format.fraction_bits - 1) : 0u;
      CHECK_EQ(back, static_cast<uint16_t>(bits | quiet));
    }
  }
}

TEST(rounding_is_to_nearest_even_with_overflow_and_subnormals) {
  for (const Format& format : kFormats) {
    const std::vector<double> values = NonNegativeValues(format);
    int wrong = 0;
    for (const float number : Interesting(format)) {
      const uint16_t expected = Nearest(format, values, number);
      const uint16_t encoded = format.encode(number);
      if (encoded != expected && ++wrong <= 10) {
        hororing_test::Fail(__FILE__, __LINE__,
                            std::string(format.name) + " of " + std::to_string(number) + " is " +
                                Hex(encoded) + ", not " + Hex(expected));
      }
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(the_ends_of_float16_are_where_the_standard_puts_them) {
  CHECK_EQ(FloatToHalf(65504.0f), 0x7BFF);
  CHECK_EQ(FloatToHalf(65519.996f), 0x7BFF);
  CHECK_EQ(FloatToHalf(65520.0f), 0x7C00);
  CHECK_EQ(FloatToHalf(-1e30f), 0xFC00);
  CHECK_EQ(FloatToHalf(kInfinity), 0x7C00);
  CHECK_EQ(FloatToHalf(0x1p-24f), 0x0001);
  CHECK_EQ(FloatToHalf(0x1p-25f), 0x0000);
  CHECK_EQ(FloatToHalf(0x1.8p-25f), 0x0001);
  CHECK_EQ(FloatToHalf(-0.0f), 0x8000);
  CHECK_EQ(FloatToBfloat16(std::numeric_limits<float>::max()), 0x7F80);
  CHECK_EQ(FloatToBfloat16(0x1p-133f), 0x0001);  // a subnormal, which VCVTNEPS2BF16 would flush
}

TEST(not_a_number_stays_so) {
  for (const Format& format : kFormats) {
    for (const uint32_t bits : {0x7F800001u, 0x7FC00000u, 0xFF800001u, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
      const uint16_t encoded = format.encode(BitCast<float>(bits));
      CHECK(format.is_nan(encoded));
      CHECK_EQ(encoded >> 15, static_cast<int>(bits >> 31));
    }
  }
}

TEST(vectors_of_every_kernel_set_agree_with_numbers) {
  for (const char* set : {"portable", "avx2", "avx512"}) {
    if (!SetKernels(set)) {
      std::printf("  this processor has no %s\n", set);
      continue;
    }
    for (const Format& format : kFormats) {
      const ReduceSpec spec{format.dtype, ReduceOp::kSum, 1.0, 1.0};
      const std::vector<uint16_t> patterns = AllPatterns();
      std::vector<float> wide(patterns.size());
      StartPartial(spec, wide.data(), patterns.data(), patterns.size());
      int wrong = 0;
      for (size_t i = 0; i < patterns.size(); ++i) {
        const float expected = format.decode(patterns[i]);
        if (std::memcmp(&wide[i], &expected, sizeof expected) != 0) ++wrong;
      }
      CHECK_EQ(wrong, 0);

      std::vector<float> numbers = Interesting(format);
      for (const uint32_t nan : {0x7F800001u, 0xFFC00000u, 0x7FFFE001u}) {
        numbers.push_back(BitCast<float>(nan));
      }
      std::vector<uint16_t> narrow(numbers.size());
      FinishPartial(spec, 1, narrow.data(), numbers.data(), numbers.size());
      for (size_t i = 0; i < numbers.size(); ++i) {
        if (narrow[i] != format.encode(numbers[i])) ++wrong;
      }
      CHECK_EQ(wrong, 0);
    }
  }
}

}  // namespace
}  // namespace hororing
