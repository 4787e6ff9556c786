// DLPack's table of functions, version 1, with which tensors are inspected without knowing their
// framework. https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace hororing::dlpack {

constexpr uint32_t kMajor = 1;  // other major versions have other structs
constexpr int32_t kCpu = 1;     // a Tensor's device
enum Kind : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Tensor {
  void* data;
  int32_t device, device_number;
  int32_t ndim;
  uint8_t kind, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: C order
  uint64_t byte_offset;
};

struct Exchange {
  uint32_t major, minor;
  Exchange* previous;  // of another major version, or null
  void* allocate;
  void* own;
  void* wrap;
  // Describes a Python object: 0, or -1 with an exception. `tensor` points to memory of the object.
  int (*look)(void* object, Tensor* tensor);  // may be null
  void* stream;
};

}  // namespace hororing::dlpack
