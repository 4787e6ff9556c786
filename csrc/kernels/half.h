// float16 and bfloat16 in software: the reference for kernels, and these without an instruction.
//
// One formula for numbers and vectors (GCC's extension): `Bits` is uint32_t or a vector of it,
// `Float` is float or a vector of as many. A 16-bit pattern is in the low half of its 32-bit lane.
//
// Rounding is to nearest even, infinities and subnormals are kept, and a NaN becomes quiet and
// keeps the upper bits of its payload, as with F16C.
// REQUIRES: the floating-point environment rounds to nearest and does not flush subnormals (see
// base/arithmetic.h).
//
// `static`, not merely `inline`: the files that include this are compiled for different
// instruction sets, and a copy for AVX-512 must never be the one that the linker keeps for all.
#pragma once

#include <cstdint>
#include <cstring>

namespace hororing {

// The same bits, read as another type.
template <typename To, typename From>
static inline To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a lane is 32 bits wide");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename Float, typename Bits>
static inline Float FloatFromHalfBits(Bits half) {
  const Bits sign = (half & 0x8000u) << 16;
  const Bits size = half & 0x7FFFu;
  // As float bits the exponent is too small by 127 - 15; the product corrects it. The product is
  // exact, and turns subnormal halfs into normal floats.
  const Float scaled = BitCast<Float>(Bits(size << 13)) * 0x1p112f;
  // The same with the largest exponent (infinity, NaN), and the quiet bit set.
  const Bits special = (size << 13) | 0x7F800000u;
  const Bits quiet = special | 0x00400000u;
  const Bits magnitude =
      size < 0x7C00u ? BitCast<Bits>(scaled) : (size > 0x7C00u ? quiet : special);
  return BitCast<Float>(Bits(sign | magnitude));
}

template <typename Bits, typename Float>
static inline Bits HalfBitsFromFloat(Float value) {
  const Bits bits = BitCast<Bits>(value);
  const Bits sign = (bits >> 16) & 0x8000u;
  const Bits size = bits & 0x7FFFFFFFu;
  // Normal halfs: 13 bits fall away; a carry out of the fraction raises the exponent.
  const Bits normal = (size - 0x38000000u + 0x0FFFu + ((size >> 13) & 1u)) >> 13;
  // Below 2^-14: in the binade of 0.5 a float's last bit is worth 2^-24, the unit of subnormal
  // halfs, so the addition rounds as it should.
  const Float shifted = BitCast<Float>(size) + 0.5f;
  const Bits subnormal = BitCast<Bits>(shifted) - 0x3F000000u;
  const Bits nan = 0x7E00u | ((size >> 13) & 0x03FFu);
  const Bits infinity = (size & 0u) | 0x7C00u;
  const Bits finite = size < 0x38800000u ? subnormal : normal;
  const Bits number = size < 0x47800000u ? finite : infinity;  // 2^16
  return sign | (size > 0x7F800000u ? nan : number);
}

template <typename Float, typename Bits>
static inline Float FloatFromBfloat16Bits(Bits bfloat16) {
  return BitCast<Float>(Bits(bfloat16 << 16));
}

// Note [Why not VCVTNEPS2BF16]: AVX512_BF16's conversion flushes subnormals, which float16 and
// the other kernels do not; three integer instructions per vector are hidden behind memory.
// In the high half of each lane; the low half is not for use.
template <typename Bits, typename Float>
static inline Bits HighBfloat16BitsFromFloat(Float value) {
  const Bits bits = BitCast<Bits>(value);
  const Bits rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const Bits nan = bits | 0x00400000u;
  return value != value ? nan : rounded;
}

template <typename Bits, typename Float>
static inline Bits Bfloat16BitsFromFloat(Float value) {
  return HighBfloat16BitsFromFloat<Bits>(value) >> 16;
}

// One number at a time.
static inline float HalfToFloat(uint16_t half) { return FloatFromHalfBits<float, uint32_t>(half); }
static inline uint16_t FloatToHalf(float value) {
  return static_cast<uint16_t>(HalfBitsFromFloat<uint32_t>(value));
}
static inline float Bfloat16ToFloat(uint16_t bfloat16) {
  return FloatFromBfloat16Bits<float, uint32_t>(bfloat16);
}
static inline uint16_t FloatToBfloat16(float value) {
  return static_cast<uint16_t>(Bfloat16BitsFromFloat<uint32_t>(value));
}

}  // namespace hororing
