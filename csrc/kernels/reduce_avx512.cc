// Kernels for x86-64 with AVX-512 (F, BW, DQ, VL). Compiled with the flags of these: reduce.cc
// asks the processor first. AVX512_BF16 is not used: see Note [Why not VCVTNEPS2BF16].

#include <immintrin.h>

#include <cstdint>

#include "kernels/half.h"
#include "kernels/reduce_kernels.h"

namespace hororing {
namespace {

constexpr size_t kVectorBytes = 64;
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));

// Zero-masked with a full mask, without the headers' undefined operands that GCC 12 warns about.
inline Floats FloatsFromHalfs(Shorts halfs) {
  return BitCast<Floats>(_mm512_maskz_cvtph_ps(0xFFFF, BitCast<__m256i>(halfs)));
}
inline Shorts HalfsFromFloats(Floats floats) {
  return BitCast<Shorts>(
      _mm512_maskz_cvtps_ph(0xFFFF, BitCast<__m512>(floats), _MM_FROUND_TO_NEAREST_INT));
}
inline Bits Widen(Shorts shorts) {
  return BitCast<Bits>(_mm512_maskz_cvtepu16_epi32(0xFFFF, BitCast<__m256i>(shorts)));
}
inline Shorts Narrow(Bits bits) {
  return BitCast<Shorts>(_mm512_maskz_cvtepi32_epi16(0xFFFF, BitCast<__m512i>(bits)));
}

}  // namespace
}  // namespace hororing

#include "kernels/reduce_kernels.inc"

namespace hororing {

const KernelTable kAvx512Kernels = MakeTable("avx512");

}  // namespace hororing
