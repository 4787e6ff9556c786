// Kernels for any processor: vectors of 16 bytes, which are SSE2, NEON or scalars to the compiler.

#include <cstdint>

#include "kernels/half.h"
#include "kernels/reduce_kernels.h"

namespace hororing {
namespace {

constexpr size_t kVectorBytes = 16;
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));

inline Bits Widen(Shorts shorts) { return __builtin_convertvector(shorts, Bits); }
inline Shorts Narrow(Bits bits) { return __builtin_convertvector(bits, Shorts); }
inline Floats FloatsFromHalfs(Shorts halfs) { return FloatFromHalfBits<Floats>(Widen(halfs)); }
inline Shorts HalfsFromFloats(Floats floats) { return Narrow(HalfBitsFromFloat<Bits>(floats)); }

}  // namespace
}  // namespace hororing

#include "kernels/reduce_kernels.inc"

namespace hororing {

const KernelTable kPortableKernels = MakeTable("portable");

}  // namespace hororing
