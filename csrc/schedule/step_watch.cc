#include "schedule/step_watch.h"

#include <algorithm>
#include <utility>

namespace hororing {

std::optional<Step> StepWatch::Announced(uint64_t id, TimeNs when) {
  std::optional<Step> over;
  if (id != 0 && ready_.count(id) != 0) {
    for (const auto& [tensor, ready] : ready_) step_.whole = step_.whole && ready;
    over = std::exchange(step_, {});
    for (Step::Tensor& tensor : over->tensors) tensor.ready_ns -= over->begin_ns;
    ready_.clear();
    begun_ = false;
  }
  // Reports come in any order, and some late.
  step_.begin_ns = begun_ ? std::min(step_.begin_ns, when) : when;
  begun_ = true;
  if (id != 0) {
    ready_[id] = false;
  } else {
    step_.whole = false;
  }
  return over;
}

void StepWatch::Ready(uint64_t id, int64_t bytes, TimeNs when) {
  const auto tensor = ready_.find(id);
  if (tensor == ready_.end() || tensor->second) {
    step_.whole = false;  // it was reported in the step before
    return;
  }
  tensor->second = true;
  step_.tensors.push_back({id, bytes, when});
}

void StepWatch::Ran(int64_t bytes, TimeNs end) {
  if (!begun_) return;
  step_.bytes += bytes;
  step_.end_ns = std::max(step_.end_ns, end);
}

}  // namespace hororing
