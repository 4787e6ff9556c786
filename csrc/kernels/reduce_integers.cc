#include "kernels/reduce_integers.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace hororing {
namespace {

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 Uint128;

// Elements per tile: a tile of the widest accumulator fills half of a first-level cache.
constexpr size_t kTile = 1024;

// Rounds toward zero; saturates at the limits of T; NaN becomes 0.
template <typename T>
T Truncate(double value) {
  using Limits = std::numeric_limits<T>;
  constexpr double kLowest = static_cast<double>(Limits::lowest());
  // max + 1, a power of two: exact as a double, unlike the largest int64.
  constexpr double kBeyond = 2.0 * static_cast<double>(Limits::max() / 2 + 1);
  if (value != value) return 0;
  if (value <= kLowest) return Limits::lowest();
  if (value >= kBeyond) return Limits::max();
  return static_cast<T>(value);
}

// All arithmetic is modulo 2^64 (2^128). Its remainder modulo 2^bits equals the result of the
// element type's own wrapping arithmetic. Sums of fewer than 2^32 ranks do not wrap at all.
template <typename T>
struct Kernels {
  static constexpr bool kIs64 = sizeof(T) == 8;
  using Wide = std::conditional_t<kIs64, Int128, int64_t>;
  using Unsigned = std::conditional_t<kIs64, Uint128, uint64_t>;

  static Wide StartOne(double prescale, T value) {
    if (prescale == 1.0) return static_cast<Wide>(value);
    return static_cast<Wide>(Truncate<T>(static_cast<double>(value) * prescale));
  }

  static void Start(const Factors& factors, void* wide, const void* source, size_t n) {
    const double prescale = factors.prescale;
    const T* from = static_cast<const T*>(source);
    Wide* to = static_cast<Wide*>(wide);
    for (size_t i = 0; i < n; ++i) to[i] = StartOne(prescale, from[i]);
  }

  static Wide Sum(Wide a, Wide b) {
    return static_cast<Wide>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  }
  static Wide Product(Wide a, Wide b) {
    return static_cast<Wide>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
  }

  static void Add(void* wide, const void* first, const void* second, size_t n) {
    const Wide* a = static_cast<const Wide*>(first);
    const Wide* b = static_cast<const Wide*>(second);
    Wide* to = static_cast<Wide*>(wide);
    for (size_t i = 0; i < n; ++i) to[i] = Sum(a[i], b[i]);
  }

  // wide[i] = wide[i] op start(source[i]).
  static void Combine(const Factors& factors, Arithmetic arithmetic, Wide* wide, const T* source,
                      size_t n) {
    const auto with = [&, prescale = factors.prescale](auto combine) {
      for (size_t i = 0; i < n; ++i) wide[i] = combine(wide[i], StartOne(prescale, source[i]));
    };
    switch (arithmetic) {
      case Arithmetic::kSum: return with([](Wide a, Wide b) { return Sum(a, b); });
      case Arithmetic::kProduct: return with([](Wide a, Wide b) { return Product(a, b); });
      case Arithmetic::kMin: return with([](Wide a, Wide b) { return std::min(a, b); });
      case Arithmetic::kMax: return with([](Wide a, Wide b) { return std::max(a, b); });
    }
  }

  static Wide Quotient(Wide sum, int divisor) {
    if constexpr (kIs64) {
      // A 128-bit division is a slow library call, and sums this large are rare.
      const int64_t narrow = static_cast<int64_t>(sum);
      if (narrow == sum) return narrow / divisor;
    }
    return sum / divisor;
  }

  static void FinishAll(const Factors& factors, bool average, T* result, const Wide* wide,
                        size_t n) {
    const double postscale = factors.postscale;
    for (size_t i = 0; i < n; ++i) {
      Wide value = wide[i];
      if (average) {
        if (factors.divisor != 1) value = Quotient(value, static_cast<int>(factors.divisor));
      } else {
        value = static_cast<Wide>(static_cast<T>(value));  // the wrapped sum or product
      }
      result[i] = postscale == 1.0 ? static_cast<T>(value)
                                   : Truncate<T>(static_cast<double>(value) * postscale);
    }
  }
  static void Finish(const Factors& factors, void* result, const void* wide, size_t n) {
    FinishAll(factors, true, static_cast<T*>(result), static_cast<const Wide*>(wide), n);
  }

  static void Reduce(const Factors& factors, Arithmetic arithmetic, bool average, void* result,
                     const void* const* sources, int count, size_t n) {
    Wide wide[kTile];
    for (size_t at = 0; at < n; at += kTile) {
      const size_t part = std::min(kTile, n - at);
      Start(factors, wide, static_cast<const T*>(sources[0]) + at, part);
      for (int source = 1; source < count; ++source) {
        Combine(factors, arithmetic, wide, static_cast<const T*>(sources[source]) + at, part);
      }
      FinishAll(factors, average, static_cast<T*>(result) + at, wide, part);
    }
  }

  static constexpr IntegerKernels kTable = {sizeof(Wide), &Reduce, &Start, &Add, &Finish};
};

}  // namespace

const IntegerKernels& IntegerKernelsOf(DataType dtype) {
  switch (dtype) {
    case DataType::kInt8: return Kernels<int8_t>::kTable;
    case DataType::kUint16: return Kernels<uint16_t>::kTable;
    case DataType::kInt16: return Kernels<int16_t>::kTable;
    case DataType::kInt32: return Kernels<int32_t>::kTable;
    case DataType::kInt64: return Kernels<int64_t>::kTable;
    default: return Kernels<uint8_t>::kTable;
  }
}

}  // namespace hororing
