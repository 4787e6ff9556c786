// The C interface: stochastic rounding.
#include "base/stochastic_rounding.h"

#include <string>

#include "base/status.h"
#include "capi/hororing.h"
#include "capi/process.h"

using namespace hororing;

HR_EXPORT int hr_round_stochastically(const hr_rounding* rounding, uintptr_t result,
                                      uintptr_t source, int64_t count) {
  if (rounding->dtype != HR_FLOAT16 && rounding->dtype != HR_BFLOAT16) {
    return Remember(Status(Code::kInvalidArgument,
                           "stochastic rounding is to float16 or bfloat16, not to dtype number " +
                               std::to_string(rounding->dtype)));
  }
  if (count < 0) {
    return Remember(Status(Code::kInvalidArgument,
                           "stochastic rounding of " + std::to_string(count) + " numbers"));
  }
  RoundStochastically(static_cast<DataType>(rounding->dtype),
                      {rounding->seed, rounding->tensor, rounding->stream, rounding->step},
                      rounding->first, reinterpret_cast<void*>(result),
                      reinterpret_cast<const float*>(source), static_cast<size_t>(count));
  return HR_OK;
}
