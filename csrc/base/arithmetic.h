// The floating-point environment of the calling thread, set by whoever started it. TensorFlow's
// threads flush subnormal numbers to zero, for example; a new thread inherits that.
#pragma once

#include <cstdint>

namespace hororing {

#if defined(__SSE__)
// MXCSR: bits 0 to 5 are flags, which say what has happened.
constexpr uint64_t kArithmeticFlags = 0x3f;
// All exceptions are masked; rounds to nearest; keeps subnormals.
constexpr uint64_t kStandardArithmetic = 0x1f80;
inline uint64_t Arithmetic() { return __builtin_ia32_stmxcsr(); }
inline void SetArithmetic(uint64_t to) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(to)); }
#elif defined(__aarch64__)
// FPCR, as above.
constexpr uint64_t kArithmeticFlags = 0, kStandardArithmetic = 0;
inline uint64_t Arithmetic() {
  uint64_t now;
  asm volatile("mrs %0, fpcr" : "=r"(now));
  return now;
}
inline void SetArithmetic(uint64_t to) { asm volatile("msr fpcr, %0" ::"r"(to) : "memory"); }
#else
constexpr uint64_t kArithmeticFlags = 0, kStandardArithmetic = 0;
inline uint64_t Arithmetic() { return 0; }
inline void SetArithmetic(uint64_t) {}
#endif

// While it lives, this thread rounds to nearest and keeps subnormals: any thread has equal results.
class StandardArithmetic {
 public:
  StandardArithmetic() : before_(Arithmetic()) {
    if (differs()) SetArithmetic(kStandardArithmetic);
  }
  ~StandardArithmetic() {
    if (differs()) SetArithmetic(before_);
  }
  StandardArithmetic(const StandardArithmetic&) = delete;

 private:
  bool differs() const { return (before_ & ~kArithmeticFlags) != kStandardArithmetic; }
  const uint64_t before_;
};

}  // namespace hororing
