// Timeline: collects the events of all ranks in rank 0's file. Every rank ships its events a few
// times a second over the control plane; rank 0 appends them as they arrive.
//
// Thread-safety: only for the holder of Engine::progress_mutex_.
#pragma once

#include <string>
#include <vector>

#include "trace/trace.h"
#include "trace/writer.h"
#include "transport/factory.h"
#include "transport/transport.h"

namespace hororing {

class Timeline {
 public:
  Timeline(Transport& transport, const Topology& topology, std::vector<TimeNs> clock_offsets,
           TraceSink& sink);

  // Rank 0, before the switch is agreed upon. `max_bytes` is as for TraceWriter.
  Status Open(const std::string& path, int64_t max_bytes);
  // The agreed switch. Off: ships the last events; rank 0 closes the file when it has those of all.
  void Switch(bool on, bool mark_cycles);
  // Rank 0: events of `rank`.
  void Receive(int rank, const std::vector<TraceEvent>& events, bool last);
  void Ship(TimeNs now);  // While the timeline is on: ships if it is time.
  // When Ship must be called next; kForever if there is nothing to ship.
  TimeNs NextDeadline() const { return sink_.empty() ? kForever : next_ship_ns_; }
  // Rank 0: false while a file is open.
  bool closed() const { return !writer_.is_open(); }
  // Rank 0: closes without waiting for missing ranks (they are dead, or too late).
  void CloseNow();

 private:
  void ShipAll(bool last);
  void Check(const Status& status);

  Transport& transport_;
  const Topology& topology_;
  const std::vector<TimeNs> clock_offsets_;
  TraceSink& sink_;
  TraceWriter writer_;
  bool failing_ = false;     // the last write failed, which is logged once
  std::vector<char> ended_;  // rank 0, by rank: its last events have arrived
  TimeNs next_ship_ns_ = 0;
};

}  // namespace hororing
