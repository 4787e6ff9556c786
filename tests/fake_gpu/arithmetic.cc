#include "arithmetic.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/half.h"

namespace fake_gpu {

size_t SizeOf(int type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[type];
}

double Load(int type, const char* at) {
  uint16_t half = 0;
  uint32_t bits = 0;
  switch (type) {
    case kInt8: return *reinterpret_cast<const int8_t*>(at);
    case kUint8: return *reinterpret_cast<const uint8_t*>(at);
    case kFloat16:
      std::memcpy(&half, at, 2);
      return static_cast<double>(hororing::HalfToFloat(half));
    case kBfloat16: {
      std::memcpy(&half, at, 2);
      bits = static_cast<uint32_t>(half) << 16;
      float value = 0;
      std::memcpy(&value, &bits, 4);
      return static_cast<double>(value);
    }
    case kFloat32: {
      float value = 0;
      std::memcpy(&value, at, 4);
      return static_cast<double>(value);
    }
    default: {
      double value = 0;
      std::memcpy(&value, at, 8);
      return value;
    }
  }
}

namespace {

void Store(int type, char* at, double value) {  // rounded to nearest even
  uint16_t half = 0;
  const float narrow = static_cast<float>(value);
  switch (type) {
    case kInt8: *at = static_cast<char>(static_cast<int64_t>(value)); return;
    case kUint8: *at = static_cast<char>(static_cast<int64_t>(value)); return;
    case kFloat16:
      half = hororing::FloatToHalf(narrow);
      std::memcpy(at, &half, 2);
      return;
    case kBfloat16: {
      uint32_t bits = 0;
      std::memcpy(&bits, &narrow, 4);
      half = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest even
      std::memcpy(at, &half, 2);
      return;
    }
    case kFloat32: std::memcpy(at, &narrow, 4); return;
    default: std::memcpy(at, &value, 8); return;
  }
}

// Integers of four and eight bytes in their own arithmetic, which wraps around.
template <typename Number, typename Wide>
void ReduceIntegers(int op, const std::vector<std::vector<char>>& inputs, size_t count, char* out) {
  for (size_t i = 0; i < count; ++i) {
    Wide total = 0;
    for (size_t r = 0; r < inputs.size(); ++r) {
      Number number = 0;
      std::memcpy(&number, inputs[r].data() + i * sizeof number, sizeof number);
      const Wide value = static_cast<Wide>(number);
      const Number so_far = static_cast<Number>(total);
      if (r == 0)
        total = value;
      else if (op == kSum || op == kAvg)
        total += value;
      else if (op == kProd)
        total *= value;
      else if ((op == kMax) == (number > so_far))
        total = value;
    }
    Number result = static_cast<Number>(total);
    if (op == kAvg) result = static_cast<Number>(result / static_cast<Number>(inputs.size()));
    std::memcpy(out + i * sizeof result, &result, sizeof result);
  }
}

}  // namespace

std::vector<char> Multiplied(int type, double factor, const void* from, size_t count) {
  const size_t size = SizeOf(type);
  const auto* begin = static_cast<const char*>(from);
  std::vector<char> result(begin, begin + count * size);
  for (size_t i = 0; i < count && factor != 1; ++i) {
    Store(type, &result[i * size], Load(type, begin + i * size) * factor);
  }
  return result;
}

void Reduce(int type, int op, const std::vector<std::vector<char>>& inputs, size_t count,
            char* out) {
  if (type == kInt32) return ReduceIntegers<int32_t, uint32_t>(op, inputs, count, out);
  if (type == kInt64) return ReduceIntegers<int64_t, uint64_t>(op, inputs, count, out);
  const size_t size = SizeOf(type);
  for (size_t i = 0; i < count; ++i) {
    double total = 0;
    for (size_t r = 0; r < inputs.size(); ++r) {
      const double value = Load(type, inputs[r].data() + i * size);
      if (r == 0)
        total = value;
      else if (op == kSum || op == kAvg || op >= kPreMulSum)
        total += value;
      else if (op == kProd)
        total *= value;
      else
        total = op == kMax ? std::max(total, value) : std::min(total, value);
    }
    if (op == kAvg) total /= static_cast<double>(inputs.size());
    if (op == kAvg && type < kFloat16) total = std::trunc(total);
    Store(type, out + i * size, total);
  }
}

}  // namespace fake_gpu
