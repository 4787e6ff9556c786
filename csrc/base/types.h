// The types that all folders share: element types, reduce operations, collectives, and a tensor as
// the core sees it. Knows no framework, no memory owner and no rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hororing {

// Values are part of the C interface and of the wire protocol: append only.
enum class DataType : uint8_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBool = 9,
  kBfloat16 = 10,
};
constexpr int kDataTypeCount = 11;
// With those after them, which are only copied. types.cc has their names.
constexpr int kCopiedTypeCount = 21;

// The numbers of Horovod's public constants (hvd.Average == 0, ...). Others: see also types.cc,
// reduce*, gpu/nccl_batch.cc, capi/hororing.h, Python's arguments.py, exports.py and numpy.py.
enum class ReduceOp : uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};
constexpr int kReduceOpCount = 6;

enum class Collective : uint8_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kBarrier = 3,
  kAlltoall = 4,
  kReducescatter = 5,
  // These move no tensors.
  kJoin = 6,
  kAddProcessSet = 7,
  kRemoveProcessSet = 8,
};

inline bool IsReduction(Collective kind) {
  return kind == Collective::kAllreduce || kind == Collective::kReducescatter;
}

// Whether ranks may pass different numbers of rows, and the core allocates the results.
inline bool IsGathering(Collective kind) {
  return kind == Collective::kAllgather || kind == Collective::kAlltoall;
}

// Where tensors begin in a batch's buffer: a multiple of every element size, and of any vector.
constexpr size_t kCacheLine = 64;

// To a multiple of `unit`.
inline size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// REQUIRES of these: a valid number.
size_t ElementSize(DataType dtype);
int64_t Elements(const std::vector<int64_t>& shape);
const char* Name(DataType dtype);                          // "float32"
const char* Name(ReduceOp op);                             // "Average"
const char* Name(Collective kind);                         // "allreduce"
std::string UpperName(Collective kind);                    // "ALLREDUCE", as in the timeline
std::string ShapeText(const std::vector<int64_t>& shape);  // "[256, 128]"

// A tensor as the core sees it: contiguous memory, alive until the request's handle is complete.
struct TensorView {
  static constexpr int kHost = -1;

  const void* input = nullptr;
  void* output = nullptr;  // may equal `input`; null where the core allocates the result
  DataType dtype = DataType::kFloat32;
  std::vector<int64_t> shape;
  int device = kHost;  // the CUDA device that holds it

  bool on_device() const { return device != kHost; }
  int64_t elements() const { return Elements(shape); }
  size_t bytes() const { return static_cast<size_t>(elements()) * ElementSize(dtype); }
};

}  // namespace hororing
