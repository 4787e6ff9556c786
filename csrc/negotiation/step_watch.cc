#include "negotiation/step_watch.h"

#include <algorithm>
#include <utility>

namespace hororing {

std::optional<Step> StepWatch::Submitted(uint64_t id, TimeNs when) {
  std::optional<Step> over;
  if (tensors_.count(id) != 0) {
    over = std::exchange(step_, std::nullopt);
    tensors_.clear();
  }
  if (!step_) step_.emplace().begin_ns = when;
  if (id != 0) tensors_.insert(id);
  return over;
}

void StepWatch::Ran(int64_t bytes, TimeNs end) {
  if (!step_) return;
  step_->bytes += bytes;
  step_->end_ns = std::max(step_->end_ns, end);
}

}  // namespace hororing
