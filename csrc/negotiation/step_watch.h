// StepWatch: recognises the steps of a training loop in the allreduces that a rank submits.
//
// A step ends when one of its tensors is submitted again. The script need not mark steps.
//
// Pure: time is an argument. See docs/scheduling.md.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_set>

#include "base/clock.h"

namespace hororing {

struct Step {
  TimeNs begin_ns = 0;  // when the first of its tensors was submitted
  TimeNs end_ns = 0;    // when its last batch was done
  int64_t bytes = 0;    // of all batches
};

class StepWatch {
 public:
  // Tensor `id` (0: one that is not cached) was submitted at `when`. Returns the step that this
  // ends, if any.
  std::optional<Step> Submitted(uint64_t id, TimeNs when);
  // A batch was carried out.
  void Ran(int64_t bytes, TimeNs end);

 private:
  std::optional<Step> step_;              // the current step
  std::unordered_set<uint64_t> tensors_;  // of the current step
};

}  // namespace hororing
