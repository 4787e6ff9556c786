#include "negotiation/ready_queue.h"

#include <cstddef>
#include <utility>

namespace hororing {

void ReadyQueue::Push(Decision decision, int64_t bytes) {
  if (!tuner_ && !ready_.empty() && ready_.back().decision.Extend(decision)) return;
  ready_.push_back({std::move(decision), bytes});
}

// Returns how many of ready_ to send now, while thresholds are tried. REQUIRES: ready_ is not
// empty.
size_t ReadyQueue::CountToTake() const {
  const int64_t limit = tuner_->setting().fusion_bytes;
  if (limit >= max_bytes_) return ready_.size();
  size_t count = 1;
  for (int64_t bytes = ready_[0].bytes; count < ready_.size(); ++count) {
    bytes += ready_[count].bytes;
    if (bytes > limit) break;
  }
  return count;
}

std::vector<Decision> ReadyQueue::Take() {
  if (ready_.empty()) return {};
  const size_t count = tuner_ ? CountToTake() : ready_.size();
  std::vector<Decision> taken;
  for (size_t i = 0; i < count; ++i) {
    Decision& decision = ready_[i].decision;
    if (taken.empty() || !taken.back().Extend(decision)) taken.push_back(std::move(decision));
  }
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
  return taken;
}

void ReadyQueue::Submitted(const Request& request, uint64_t id, TimeNs when) {
  if (!tuner_ || tuner_->done()) return;
  if (request.kind != Collective::kAllreduce || request.process_set != kWorldSet) return;
  const std::optional<Step> over = watch_.Submitted(id, when);
  if (!over) return;
  const TimeNs before = tuner_->setting().cycle_time_ns;
  tuner_->Learn(*over);
  const TimeNs now = tuner_->setting().cycle_time_ns;
  if (now == before) return;
  Decision tune;
  tune.kind = Decision::Kind::kTune;
  tune.set_details().cycle_time_ns = now;
  Push(std::move(tune));
}

}  // namespace hororing
