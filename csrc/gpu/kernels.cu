// Many copies in one launch, for packing tensors into a fusion buffer and back.
//
// `make kernels` compiles it to PTX (kernels.inc), which the driver compiles for its GPU. After a
// change, run that, and change kMaxPackedCopies, kPackBlockBytes and PackTable of device.cc.
#include <cstdint>

constexpr unsigned kMost = 120;             // entries: a launch takes 4 KiB of arguments
constexpr uint64_t kBlockBytes = 32 << 10;  // that one block of threads copies

struct Copy {
  const unsigned char* from;
  unsigned char* to;
  uint64_t bytes;
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
  const uint64_t left = copy.bytes - begin;
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
