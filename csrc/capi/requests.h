// Converts requests of the C interface to the engine's, and finds errors that one rank can see
// alone.
#pragma once

#include "base/status.h"
#include "capi/hororing.h"
#include "engine/shared_process_sets.h"
#include "engine/tensor_table.h"

namespace hororing {

inline std::optional<double> WeightOf(const hr_request& from) {
  return from.weight != nullptr ? std::optional<double>(*from.weight) : std::nullopt;
}

// kInvalidArgument, naming the request, if it is invalid. `entry`: a new one, or one that
// Engine::Submit has returned.
Status MakeEntry(const hr_request& from, const SharedProcessSets& sets, int rank,
                 TensorEntry* entry);

}  // namespace hororing
