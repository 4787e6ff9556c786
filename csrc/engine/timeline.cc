#include "engine/timeline.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "negotiation/codec.h"

namespace hororing {
constexpr TimeNs kShipInterval = 200 * kMillisecond;
constexpr std::ptrdiff_t kEventsPerMessage = 2000;  // about 100 KB: too little to stall a pipe

Timeline::Timeline(Transport& transport, const Topology& topology,
                   std::vector<TimeNs> clock_offsets, TraceSink& sink)
    : transport_(transport),
      topology_(topology),
      clock_offsets_(std::move(clock_offsets)),
      sink_(sink) {}

Status Timeline::Open(const std::string& path, int64_t max_bytes) {
  std::vector<std::string> hosts;
  for (int host : topology_.host_of) hosts.push_back(topology_.hosts[static_cast<size_t>(host)]);
  ended_.assign(hosts.size(), 0);
  return writer_.Open(path, hosts, max_bytes);
}

void Timeline::Switch(bool on, bool mark_cycles) {
  if (on) {
    sink_.Enable(mark_cycles);
    next_ship_ns_ = After(NowNs(), kShipInterval);
    return;
  }
  if (!sink_.enabled()) return;
  sink_.Disable();
  ShipAll(/*last=*/true);
}

void Timeline::Receive(int rank, const std::vector<TraceEvent>& events, bool last) {
  if (!writer_.is_open()) return;
  if (!events.empty()) {
    const bool was_whole = !writer_.wrapped();
    Check(writer_.Append(rank, clock_offsets_[static_cast<size_t>(rank)], events));
    if (was_whole && writer_.wrapped()) {
      Log(LogLevel::kWarning,
          "timeline: it has HORORING_TIMELINE_BYTES; from now on the oldest events are lost");
    }
  }
  if (!last) return;
  ended_[static_cast<size_t>(rank)] = 1;
  if (std::all_of(ended_.begin(), ended_.end(), [](char ended) { return ended != 0; })) CloseNow();
}

void Timeline::Ship(TimeNs now) {
  if (now < NextDeadline()) return;
  next_ship_ns_ = After(now, kShipInterval);
  ShipAll(/*last=*/false);
}

void Timeline::CloseNow() {
  if (!writer_.is_open()) return;
  if (sink_.dropped() > 0) {
    Log(LogLevel::kWarning, "timeline: " + std::to_string(sink_.dropped()) +
                                " events of rank 0 were dropped because too many were waiting");
  }
  Check(writer_.Close());
}

void Timeline::ShipAll(bool last) {
  std::vector<TraceEvent> events = sink_.Drain();
  if (topology_.rank == 0) {
    Receive(0, events, last);
    return;
  }
  auto next = events.begin();
  do {
    const auto end = next + std::min<std::ptrdiff_t>(events.end() - next, kEventsPerMessage);
    const std::vector<TraceEvent> part(std::make_move_iterator(next), std::make_move_iterator(end));
    next = end;
    transport_.Post(0, EncodeTrace(part, last && next == events.end()));
  } while (next != events.end());
}

void Timeline::Check(const Status& status) {
  // A full disk must not stop the training; written events stay readable.
  if (!status.ok() && !failing_) Log(LogLevel::kError, "timeline: " + status.message());
  failing_ = !status.ok();
}

}  // namespace hororing
