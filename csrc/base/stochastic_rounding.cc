#include "base/stochastic_rounding.h"

#include "base/reduce_kernels.h"

namespace hororing {

void RoundStochastically(DataType to, const RandomStream& stream, uint64_t first, void* result,
                         const float* source, size_t n) {
  const KernelTable& kernels = KernelsNow();
  const RoundFunction round =
      to == DataType::kFloat16 ? kernels.round_float16 : kernels.round_bfloat16;
  round(stream, first, static_cast<uint16_t*>(result), source, n);
}

}  // namespace hororing
