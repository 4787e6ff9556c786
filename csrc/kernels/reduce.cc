#include "kernels/reduce.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/half.h"
#include "kernels/reduce_integers.h"
#include "kernels/reduce_kernels.h"

namespace hororing {
namespace {

// The kernels that the processor supports, best first.
std::vector<const KernelTable*> FindKernels() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Not every compiler's __builtin_cpu_supports knows this feature.
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  // Both files are compiled with -mfma, too.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    tables.push_back(&kAvx512Kernels);
  }
  if (avx2) tables.push_back(&kAvx2Kernels);
#endif
  tables.push_back(&kPortableKernels);
  return tables;
}

const std::vector<const KernelTable*>& Available() {
  static const std::vector<const KernelTable*> tables = FindKernels();
  return tables;
}

// One per process: HORORING_KERNELS and tests change it, and every choice gives the same bits.
std::atomic<const KernelTable*>& ChosenTable() {
  static std::atomic<const KernelTable*> chosen{Available().front()};
  return chosen;
}

const KernelTable& Kernels() { return *ChosenTable().load(std::memory_order_relaxed); }

bool IsShortFloat(DataType dtype) {
  return dtype == DataType::kFloat16 || dtype == DataType::kBfloat16;
}
bool IsInteger(DataType dtype) { return !IsFloating(dtype) && dtype != DataType::kBool; }
bool IsIntegerAverage(const ReduceSpec& spec) {
  return spec.op == ReduceOp::kAverage && IsInteger(spec.dtype);
}

Arithmetic ArithmeticOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin: return Arithmetic::kMin;
    case ReduceOp::kMax: return Arithmetic::kMax;
    case ReduceOp::kProduct: return Arithmetic::kProduct;
    default: return Arithmetic::kSum;
  }
}

// The divisor of an average; 1 for other operations.
double DivisorOf(const ReduceSpec& spec, int divisor) {
  if (spec.op != ReduceOp::kAverage) return 1;
  return spec.weights != nullptr ? spec.weights->back() : divisor;
}

void Reduce(DataType dtype, Arithmetic arithmetic, const Factors& factors, void* result,
            const void* const* sources, int count, size_t n) {
  Kernels().reduce[static_cast<int>(dtype)].of[static_cast<int>(arithmetic)](factors, result,
                                                                             sources, count, n);
}

// Skips sources of weight 0, because 0 times infinity would be NaN.
void ReduceWeighted(const ReduceSpec& spec, Factors factors, void* result,
                    const void* const* sources, int count, size_t n, const int* ranks) {
  thread_local std::vector<const void*> from;
  thread_local std::vector<double> weights;
  from.clear();
  weights.clear();
  for (int i = 0; i < count; ++i) {
    const double weight = (*spec.weights)[static_cast<size_t>(ranks != nullptr ? ranks[i] : i)];
    if (weight == 0) continue;
    from.push_back(sources[i]);
    weights.push_back(weight);
  }
  if (from.empty()) return FillNeutral(spec, result, n);
  factors.weights = weights.data();
  Reduce(spec.dtype, Arithmetic::kSum, factors, result, from.data(), static_cast<int>(from.size()),
         n);
}

// The type of partial results that the common kernels combine.
DataType PartialType(const ReduceSpec& spec) {
  return IsShortFloat(spec.dtype) ? DataType::kFloat32 : spec.dtype;
}

template <typename T>
void FillWith(void* data, size_t n, T value) {
  std::fill_n(static_cast<T*>(data), n, value);
}

template <typename T>
T Neutral(ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  switch (op) {
    case ReduceOp::kProduct: return 1;
    case ReduceOp::kMin: return Limits::has_infinity ? Limits::infinity() : Limits::max();
    case ReduceOp::kMax: return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    default: return 0;
  }
}

std::string Text(double factor) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", factor);
  return text;
}

}  // namespace

bool IsFloating(DataType dtype) {
  return IsShortFloat(dtype) || dtype == DataType::kFloat32 || dtype == DataType::kFloat64;
}

bool IsFloatSum(const ReduceSpec& spec) {
  return IsFloating(spec.dtype) && (spec.op == ReduceOp::kSum || spec.op == ReduceOp::kAverage);
}

Status Check(const ReduceSpec& spec) {
  const std::string what = std::string(Name(spec.op)) + " of " + Name(spec.dtype);
  if (!std::isfinite(spec.prescale) || !std::isfinite(spec.postscale)) {
    return Status(Code::kInvalidArgument,
                  what + ": the scale factors must be finite, not prescale " + Text(spec.prescale) +
                      " and postscale " + Text(spec.postscale));
  }
  if (spec.dtype == DataType::kBool) {
    if (spec.op == ReduceOp::kAverage) {
      return Status(Code::kInvalidArgument,
                    "the Average of bool is not defined; use Sum or Max for 'or', Product or Min "
                    "for 'and', or convert the tensor to a number type");
    }
    if (spec.prescale != 1.0 || spec.postscale != 1.0) {
      return Status(Code::kInvalidArgument,
                    what +
                        ": bool cannot be scaled; leave the scale factors at 1, or convert the "
                        "tensor to a number type");
    }
  }
  return Status::Ok();
}

bool NeedsWideAccumulator(const ReduceSpec& spec) {
  return IsShortFloat(spec.dtype) || IsIntegerAverage(spec);
}

void ReduceMany(const ReduceSpec& spec, int divisor, void* result, const void* const* sources,
                int count, size_t n, const int* ranks) {
  const Factors factors{spec.prescale, spec.postscale, DivisorOf(spec, divisor)};
  if (spec.weights != nullptr) {
    return ReduceWeighted(spec, factors, result, sources, count, n, ranks);
  }
  const bool scaled = factors.prescale != 1.0 || factors.postscale != 1.0 || factors.divisor != 1;
  if (count == 1 && !scaled) {
    if (result != sources[0] && n > 0) std::memcpy(result, sources[0], n * ElementSize(spec.dtype));
    return;
  }
  if (IsInteger(spec.dtype) && (scaled || IsIntegerAverage(spec))) {
    IntegerKernelsOf(spec.dtype)
        .reduce(factors, ArithmeticOf(spec.op), spec.op == ReduceOp::kAverage, result, sources,
                count, n);
    return;
  }
  Reduce(spec.dtype, ArithmeticOf(spec.op), factors, result, sources, count, n);
}

size_t PartialSize(const ReduceSpec& spec) {
  return IsIntegerAverage(spec) ? IntegerKernelsOf(spec.dtype).wide_bytes
                                : ElementSize(PartialType(spec));
}

void StartPartial(const ReduceSpec& spec, void* partial, const void* source, size_t n) {
  const Factors factors{spec.prescale, 1.0, 1};
  if (spec.weights != nullptr && spec.prescale == 0) {
    std::memset(partial, 0, n * PartialSize(spec));
  } else if (spec.dtype == DataType::kFloat16) {
    Kernels().widen_float16(factors, partial, &source, 1, n);
  } else if (spec.dtype == DataType::kBfloat16) {
    Kernels().widen_bfloat16(factors, partial, &source, 1, n);
  } else if (IsIntegerAverage(spec)) {
    IntegerKernelsOf(spec.dtype).start(factors, partial, source, n);
  } else {
    ReduceSpec start = spec;
    start.postscale = 1.0;
    start.weights = nullptr;
    ReduceMany(start, 1, partial, &source, 1, n);
  }
}

void CombinePartials(const ReduceSpec& spec, void* accumulator, const void* first,
                     const void* second, size_t n) {
  if (IsIntegerAverage(spec)) {
    IntegerKernelsOf(spec.dtype).add(accumulator, first, second, n);
    return;
  }
  const void* const sources[] = {first, second};
  Reduce(PartialType(spec), ArithmeticOf(spec.op), Factors{}, accumulator, sources, 2, n);
}

void FinishPartial(const ReduceSpec& spec, int divisor, void* result, const void* partial,
                   size_t n) {
  const Factors factors{1.0, spec.postscale, DivisorOf(spec, divisor)};
  if (spec.dtype == DataType::kFloat16) {
    Kernels().narrow_float16(factors, result, &partial, 1, n);
  } else if (spec.dtype == DataType::kBfloat16) {
    Kernels().narrow_bfloat16(factors, result, &partial, 1, n);
  } else if (IsIntegerAverage(spec)) {
    IntegerKernelsOf(spec.dtype).finish(factors, result, partial, n);
  } else if (spec.weights != nullptr) {
    Reduce(spec.dtype, Arithmetic::kSum, factors, result, &partial, 1, n);
  } else {
    ReduceSpec finish = spec;
    finish.prescale = 1.0;
    ReduceMany(finish, divisor, result, &partial, 1, n);
  }
}

bool AllFinite(DataType dtype, const void* data, size_t n) {
  const FiniteFunction finite = Kernels().finite[static_cast<int>(dtype)];
  return finite == nullptr || finite(data, n);
}

NonFinite CountNonFinite(DataType dtype, const void* data, size_t n) {
  NonFinite found;
  if (AllFinite(dtype, data, n)) return found;
  const size_t bytes = ElementSize(dtype);
  const int fraction = bytes == 8 ? 52 : bytes == 4 ? 23 : dtype == DataType::kFloat16 ? 10 : 7;
  for (const auto* at = static_cast<const std::byte*>(data); n > 0; --n, at += bytes) {
    uint64_t word = 0;  // little-endian
    std::memcpy(&word, at, bytes);
    if (!AllFinite(dtype, at, 1)) ++(word << (64 - fraction) != 0 ? found.nan : found.infinite);
  }
  return found;
}

const char* KernelsInUse() { return Kernels().name; }

void FillNeutral(const ReduceSpec& spec, void* data, size_t n) {
  switch (spec.dtype) {
    case DataType::kUint8: return FillWith(data, n, Neutral<uint8_t>(spec.op));
    case DataType::kInt8: return FillWith(data, n, Neutral<int8_t>(spec.op));
    case DataType::kUint16: return FillWith(data, n, Neutral<uint16_t>(spec.op));
    case DataType::kInt16: return FillWith(data, n, Neutral<int16_t>(spec.op));
    case DataType::kInt32: return FillWith(data, n, Neutral<int32_t>(spec.op));
    case DataType::kInt64: return FillWith(data, n, Neutral<int64_t>(spec.op));
    case DataType::kFloat32: return FillWith(data, n, Neutral<float>(spec.op));
    case DataType::kFloat64: return FillWith(data, n, Neutral<double>(spec.op));
    case DataType::kFloat16: return FillWith(data, n, FloatToHalf(Neutral<float>(spec.op)));
    case DataType::kBfloat16: return FillWith(data, n, FloatToBfloat16(Neutral<float>(spec.op)));
    case DataType::kBool:  // Min and Product are "and", the rest is "or"
      return FillWith<uint8_t>(data, n,
                               spec.op == ReduceOp::kMin || spec.op == ReduceOp::kProduct ? 1 : 0);
  }
}

bool SetKernels(const char* name) {
  for (const KernelTable* table : Available()) {
    if (std::strcmp(table->name, name) == 0) {
      ChosenTable().store(table, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace hororing
