// Kernels for x86-64, compiled with -mavx2 -mf16c: reduce.cc asks the processor first.

#include <immintrin.h>

#include <cstdint>

#include "kernels/half.h"
#include "kernels/reduce_kernels.h"

namespace hororing {
namespace {

constexpr size_t kVectorBytes = 32;
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));

inline Floats FloatsFromHalfs(Shorts halfs) {
  return BitCast<Floats>(_mm256_cvtph_ps(BitCast<__m128i>(halfs)));
}
inline Shorts HalfsFromFloats(Floats floats) {
  return BitCast<Shorts>(_mm256_cvtps_ph(BitCast<__m256>(floats), _MM_FROUND_TO_NEAREST_INT));
}
// __builtin_convertvector would be half as fast here (GCC 12).
inline Bits Widen(Shorts shorts) {
  return BitCast<Bits>(_mm256_cvtepu16_epi32(BitCast<__m128i>(shorts)));
}
inline Shorts Narrow(Bits bits) {
  const __m256i packed = _mm256_packus_epi32(BitCast<__m256i>(bits), _mm256_setzero_si256());
  return BitCast<Shorts>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

}  // namespace
}  // namespace hororing

#include "kernels/reduce_kernels.inc"

namespace hororing {

const KernelTable kAvx2Kernels = MakeTable("avx2");

}  // namespace hororing
