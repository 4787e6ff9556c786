// Many copies in one launch, for packing tensors into a fusion buffer and back: as they are, or
// multiplied by a factor and cast between 16-bit floats and float32.
//
// Compiled by `make kernels` to PTX (kernels.inc), which the driver compiles for whatever GPU it
// finds. A change here needs that, and kPackMost, kPackBlockBytes, kScaleBlockElements and
// PackTable of device.cc and DeviceCast of device.h changed likewise.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

constexpr unsigned kMost = 120;            // entries: a launch takes 4 KiB of arguments
// What one block of threads copies, and casts.
constexpr uint64_t kBlockBytes = 32 << 10;
constexpr uint64_t kBlockElements = 8 << 10;

struct Copy {
  const unsigned char* from;
  unsigned char* to;
  uint64_t amount;  // bytes, or elements
  uint64_t first_block;  // of this copy; ascending
};
struct Table {
  uint64_t count;
  Copy copies[kMost];
};

template <typename Unit>
__device__ void CopyUnits(const unsigned char* from, unsigned char* to, uint64_t bytes) {
  const uint64_t units = bytes / sizeof(Unit);
  for (uint64_t i = threadIdx.x; i < units; i += blockDim.x) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
  for (uint64_t i = units * sizeof(Unit) + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

// The copy that this block works on: the last that begins before it.
__device__ const Copy& Mine(const Table& table) {
  unsigned low = 0, high = static_cast<unsigned>(table.count);
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (table.copies[middle].first_block <= blockIdx.x ? low : high) = middle;
  }
  return table.copies[low];
}

extern "C" __global__ void hororing_copy_many(const __grid_constant__ Table table) {
  const Copy& copy = Mine(table);
  const uint64_t begin = (blockIdx.x - copy.first_block) * kBlockBytes;
  const uint64_t left = copy.amount - begin;
  const uint64_t bytes = left < kBlockBytes ? left : kBlockBytes;
  const unsigned char* from = copy.from + begin;
  unsigned char* to = copy.to + begin;
  const uint64_t both = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to);
  if (both % 16 == 0) {
    CopyUnits<uint4>(from, to, bytes);
  } else if (both % 4 == 0) {
    CopyUnits<uint32_t>(from, to, bytes);
  } else {
    CopyUnits<unsigned char>(from, to, bytes);
  }
}

// To nearest even, once: what float32 holds.
__device__ void Put(float value, float* to) { *to = value; }
__device__ void Put(double value, double* to) { *to = value; }
__device__ void Put(float value, __half* to) { *to = __float2half_rn(value); }
__device__ void Put(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }
__device__ float Get(const float* from) { return *from; }
__device__ double Get(const double* from) { return *from; }
__device__ float Get(const __half* from) { return __half2float(*from); }
__device__ float Get(const __nv_bfloat16* from) { return __bfloat162float(*from); }

template <typename From, typename To>
__device__ void Scale(const Copy& copy, double factor) {
  const uint64_t begin = (blockIdx.x - copy.first_block) * kBlockElements;
  const uint64_t left = copy.amount - begin;
  const uint64_t elements = left < kBlockElements ? left : kBlockElements;
  const From* from = reinterpret_cast<const From*>(copy.from) + begin;
  To* to = reinterpret_cast<To*>(copy.to) + begin;
  const auto by = static_cast<decltype(Get(from))>(factor);
  for (uint64_t i = threadIdx.x; i < elements; i += blockDim.x) Put(Get(from + i) * by, to + i);
}

extern "C" __global__ void hororing_scale_many(const __grid_constant__ Table table, int cast,
                                               double factor) {
  const Copy& copy = Mine(table);
  switch (cast) {
    case 0: return Scale<float, float>(copy, factor);
    case 1: return Scale<double, double>(copy, factor);
    case 2: return Scale<__half, float>(copy, factor);
    case 3: return Scale<float, __half>(copy, factor);
    case 4: return Scale<__nv_bfloat16, float>(copy, factor);
    case 5: return Scale<float, __nv_bfloat16>(copy, factor);
  }
}
