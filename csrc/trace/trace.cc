#include "trace/trace.h"

#include <utility>

namespace hororing {
const char* Name(Stage stage) {
  constexpr const char* kNames[] = {"HOOK", "VIEW",   "SUBMIT", "NEGOTIATE", "PLAN",
                                    "PACK", "REDUCE", "UNPACK", "COMPLETE",  "GUARD"};
  return kNames[static_cast<size_t>(stage)];
}

void TraceSink::Enable(bool mark_cycles) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!enabled_.load(std::memory_order_relaxed)) {
    events_.clear();
    dropped_ = 0;
  }
  mark_cycles_.store(mark_cycles, std::memory_order_relaxed);
  enabled_.store(true, std::memory_order_relaxed);
}

void TraceSink::Disable() {
  std::lock_guard<std::mutex> lock(mutex_);
  enabled_.store(false, std::memory_order_relaxed);
}

void TraceSink::Add(TraceEvent event) {
  if (!enabled()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  // Checked again under the lock, so that no event is added after Disable and the last Drain.
  if (!enabled()) return;
  if (events_.size() >= kMaxPending) {
    ++dropped_;
    return;
  }
  events_.push_back(std::move(event));
}

void TraceSink::Span(Stage stage, Track track, const std::string& tensor, TimeNs begin_ns,
                     TimeNs end_ns, int64_t bytes) {
  if (!enabled()) return;
  Add(TraceEvent{Name(stage), tensor, track, false, begin_ns, end_ns, bytes});
}

void TraceSink::CycleStart(TimeNs now) {
  if (!enabled() || !mark_cycles()) return;
  Add(TraceEvent{"CYCLE_START", "", Track::kLoop, true, now, now, -1});
}

bool TraceSink::empty() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return events_.empty();
}

std::vector<TraceEvent> TraceSink::Drain() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(events_, {});
}

int64_t TraceSink::dropped() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return dropped_;
}

}  // namespace hororing
