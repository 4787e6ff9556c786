// From the C interface's request to the engine's, and what one rank alone can see to be wrong in
// it.
#pragma once

#include "base/status.h"
#include "capi/hororing.h"
#include "engine/shared_process_sets.h"
#include "engine/tensor_table.h"

namespace hororing {

inline std::optional<double> WeightOf(const hr_request& from) {
  return from.weight != nullptr ? std::optional<double>(*from.weight) : std::nullopt;
}

// kInvalidArgument, naming the request, when it makes no sense. `entry`: a new one, or one that
// Engine::Submit has left.
Status MakeEntry(const hr_request& from, const SharedProcessSets& sets, int rank,
                 TensorEntry* entry);

}  // namespace hororing
