// StepWatch: recognises the steps of a training loop in the allreduces of one process set.
//
// A step ends when a tensor is reported that this step had already; nobody needs to say so.
//
// Pure: time is an argument. See docs/scheduling.md.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/clock.h"

namespace hororing {

struct Step {
  struct Tensor {
    uint64_t id = 0;
    int64_t bytes = 0;
    TimeNs ready_ns = 0;  // when the last rank submitted it, from `begin_ns` on
  };
  std::vector<Tensor> tensors;  // in the order in which they became ready
  TimeNs begin_ns = 0;          // when the first rank submitted the first of them
  TimeNs end_ns = 0;            // when the last batch was done
  int64_t bytes = 0;            // of all batches
  // Every tensor had an id, and what was reported in this step became ready in it. Only such steps
  // tell what the next one will be like.
  bool whole = true;
};

class StepWatch {
 public:
  // The first rank has reported tensor `id` (0: one that is not cached) and submitted it at
  // `when`. Returns the step that is over thereby, if one is.
  std::optional<Step> Announced(uint64_t id, TimeNs when);
  // The last rank has.
  void Ready(uint64_t id, int64_t bytes, TimeNs when);
  // A batch was carried out.
  void Ran(int64_t bytes, TimeNs end);

  TimeNs begin_ns() const { return step_.begin_ns; }
  // When the latest batch of this step was done; 0: there was none.
  TimeNs end_ns() const { return step_.end_ns; }

 private:
  bool begun_ = false;
  Step step_;
  std::unordered_map<uint64_t, bool> ready_;  // of the tensors of this step, whether they are
};

}  // namespace hororing
