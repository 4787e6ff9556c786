// The reductions of the fake NCCL, slow and simple.
#pragma once

#include <cstddef>
#include <vector>

namespace fake_gpu {

// As in nccl.h. Operations from kPreMulSum on are those that a rank has created.
enum Type {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16
};
enum Op { kSum, kProd, kMax, kMin, kAvg, kPreMulSum };

size_t SizeOf(int type);
double Load(int type, const char* at);
// Returns the data that a rank sends for an operation with a factor of its own.
std::vector<char> Multiplied(int type, double factor, const void* from, size_t count);
void Reduce(int type, int op, const std::vector<std::vector<char>>& inputs, size_t count,
            char* out);

}  // namespace fake_gpu
