// For the tests of collectives: worlds of threads on two transports, hororing's and the strict one
// of queue_transport.h, and numbers with their oracle.
//
// The numbers can be combined exactly in every order, so one naive oracle gives the bits of all
// algorithms.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "faulty_transport.h"
#include "kernels/half.h"
#include "kernels/reduce.h"
#include "queue_transport.h"
#include "world.h"

namespace hororing {

using hororing_test::CheckedTransport;
using hororing_test::Fault;
using hororing_test::FaultyTransport;
using hororing_test::QueueTransport;
using hororing_test::Rank;
using Bytes = std::vector<unsigned char>;
using Transports = std::vector<std::unique_ptr<Transport>>;

inline const auto kSizes = hororing_test::AllOrFew<int>({1, 2, 3, 5, 8}, {3});
constexpr const char* kKinds[] = {"inproc", "queue"};
inline const auto kTypes = hororing_test::AllOrFew<DataType>(
    {DataType::kUint8, DataType::kInt8, DataType::kUint16, DataType::kInt16, DataType::kInt32,
     DataType::kInt64, DataType::kFloat16, DataType::kFloat32, DataType::kFloat64, DataType::kBool,
     DataType::kBfloat16},
    {DataType::kFloat16, DataType::kFloat32, DataType::kInt64});
inline const auto kOps = hororing_test::AllOrFew<ReduceOp>(
    {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct},
    {ReduceOp::kAverage, ReduceOp::kMax});

inline TimeNs Soon() { return After(NowNs(), 100 * kSecond); }

// Every transport is a CheckedTransport; that of rank `faulty` wraps a FaultyTransport.
inline Transports MakeWorld(const std::string& kind, int size, int faulty = -1, Fault fault = {}) {
  Transports world = kind == "queue" ? QueueTransport::MakeWorld(size)
                                     : MakeInprocWorld(size, hororing_test::kDefaultSpin);
  for (int r = 0; r < size; ++r) {
    auto& transport = world[static_cast<size_t>(r)];
    if (r == faulty) transport = std::make_unique<FaultyTransport>(std::move(transport), fault);
    transport = std::make_unique<CheckedTransport>(std::move(transport));
  }
  return world;
}

inline size_t Open(Transport& transport) {
  return dynamic_cast<CheckedTransport&>(transport).open();
}

// ---- numbers ----

template <typename T>
void Put(Bytes& data, size_t i, T value) {
  std::memcpy(data.data() + i * sizeof(T), &value, sizeof(T));
}
// Converts like a cast in NumPy: a small integer or, for results, any number.
inline void Put(DataType dtype, Bytes& data, size_t i, double value) {
  const auto whole = static_cast<int64_t>(value);
  switch (dtype) {
    case DataType::kBool: Put(data, i, static_cast<uint8_t>(value != 0)); break;
    case DataType::kUint8: Put(data, i, static_cast<uint8_t>(whole)); break;
    case DataType::kInt8: Put(data, i, static_cast<int8_t>(whole)); break;
    case DataType::kUint16: Put(data, i, static_cast<uint16_t>(whole)); break;
    case DataType::kInt16: Put(data, i, static_cast<int16_t>(whole)); break;
    case DataType::kInt32: Put(data, i, static_cast<int32_t>(whole)); break;
    case DataType::kInt64: Put(data, i, whole); break;
    case DataType::kFloat16: Put(data, i, FloatToHalf(static_cast<float>(value))); break;
    case DataType::kBfloat16: Put(data, i, FloatToBfloat16(static_cast<float>(value))); break;
    case DataType::kFloat32: Put(data, i, static_cast<float>(value)); break;
    case DataType::kFloat64: Put(data, i, value); break;
  }
}

template <typename T>
T Get(const Bytes& data, size_t i) {
  T value;
  std::memcpy(&value, data.data() + i * sizeof(T), sizeof(T));
  return value;
}
// REQUIRES: a float type.
inline double Get(DataType dtype, const Bytes& data, size_t i) {
  switch (dtype) {
    case DataType::kFloat16: return static_cast<double>(HalfToFloat(Get<uint16_t>(data, i)));
    case DataType::kBfloat16: return static_cast<double>(Bfloat16ToFloat(Get<uint16_t>(data, i)));
    case DataType::kFloat32: return static_cast<double>(Get<float>(data, i));
    default: return Get<double>(data, i);
  }
}

inline bool IsUnsigned(DataType dtype) {
  return dtype == DataType::kUint8 || dtype == DataType::kUint16 || dtype == DataType::kBool;
}
// Rank r's i-th number, a small integer: sums of eight are exact in every type, and so are
// products, whose factors are 1, -1 and 2.
inline double Number(const ReduceSpec& spec, int rank, size_t i) {
  const size_t mixed = (i * 2654435761u + static_cast<size_t>(rank) * 40503u) >> 3;
  if (spec.dtype == DataType::kBool) return mixed % 4 == 0 ? 0 : 1;
  if (spec.op == ReduceOp::kProduct) {
    const double number = mixed % 5 == 0 ? 2 : 1;
    return !IsUnsigned(spec.dtype) && mixed % 2 == 0 ? -number : number;
  }
  const double number = static_cast<double>(mixed % 6);
  return !IsUnsigned(spec.dtype) && mixed % 7 < 3 ? -number : number;
}

inline Bytes Input(const ReduceSpec& spec, int rank, size_t n) {
  Bytes data(n * ElementSize(spec.dtype));
  for (size_t i = 0; i < n; ++i) Put(spec.dtype, data, i, Number(spec, rank, i));
  return data;
}

// The naive computation, in float64. Prescale is an integer and postscale a power of two, so only
// the division rounds: in float64 for float64, otherwise first in float32.
inline double Expected(const ReduceSpec& spec, int size, size_t i) {
  double result = 0;
  for (int r = 0; r < size; ++r) {
    const double next = Number(spec, r, i) * spec.prescale;
    if (r == 0)
      result = next;
    else if (spec.op == ReduceOp::kMin)
      result = std::min(result, next);
    else if (spec.op == ReduceOp::kMax)
      result = std::max(result, next);
    else if (spec.op == ReduceOp::kProduct)
      result *= next;
    else
      result += next;
  }
  if (spec.dtype == DataType::kBool) {
    int trues = 0;
    for (int r = 0; r < size; ++r) trues += Number(spec, r, i) != 0 ? 1 : 0;
    const bool any = spec.op == ReduceOp::kSum || spec.op == ReduceOp::kMax;
    return any ? trues > 0 : trues == size;
  }
  const bool is_float = spec.dtype == DataType::kFloat16 || spec.dtype == DataType::kBfloat16 ||
                        spec.dtype == DataType::kFloat32 || spec.dtype == DataType::kFloat64;
  if (spec.op == ReduceOp::kAverage) {
    result /= size;
    if (!is_float)
      result = std::trunc(result);
    else if (spec.dtype != DataType::kFloat64) {
      result = static_cast<double>(static_cast<float>(result));
    }
  }
  return result * spec.postscale;
}
inline Bytes Expected(const ReduceSpec& spec, int size, Bytes data) {
  const size_t n = data.size() / ElementSize(spec.dtype);
  for (size_t i = 0; i < n; ++i) Put(spec.dtype, data, i, Expected(spec, size, i));
  return data;
}

inline unsigned char Content(size_t rank, size_t i) {
  return static_cast<unsigned char>(i * 31 + (i >> 8) * 7 + rank * 101 + 1);
}

}  // namespace hororing
