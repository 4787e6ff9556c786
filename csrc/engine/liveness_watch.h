// LivenessWatch: a negotiation without progress, as one rank sees it. A rank that computes still
// answers through its engine; a rank without signs of life is stopped, or its network is cut.
//
// Thread-safety: only for the loop (the holder of Engine::progress_mutex_). It never blocks, except
// for half a second while it describes this rank's own activity.
//
// Invariants
//   1. Silence counts only from the beginning of the wait for that rank.
//   2. At most one warning of a stall is pending. It is logged as one record, when the ranks that
//      were asked have answered, or after two seconds.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "engine/shared.h"
#include "negotiation/stall_inspector.h"
#include "transport/factory.h"

namespace hororing {

class LivenessWatch {
 public:
  LivenessWatch(Shared& shared, World& world)
      : shared_(shared), transport_(*world.transport), topology_(world.topology) {}

  // Call it with the periodic checks. `waits`: whether this rank waits for an agreement; `applied`:
  // the last that it has applied. Returns whether its wait is a long one by now.
  bool WaitsLong(bool waits, uint64_t applied, TimeNs now);
  // During a long wait: whether to report (again) that a caller is blocked.
  bool MustReportBlocked(TimeNs now);
  // During a long wait: an error if this rank's parent or rank 0 has given no sign of life.
  Status CheckParents(int parent, TimeNs now) {
    return Check({{parent, waits_since_ns_}, {0, waits_since_ns_}}, now);
  }
  // The same for any ranks, and since when this rank waits for them. Warns before it fails.
  Status Check(const std::map<int, TimeNs>& awaited, TimeNs now);

  // Rank 0: asks missing ranks what they are doing, for the warning of `stall`.
  void Ask(const StallInspector::Finding& stall, TimeNs now);
  // A question, to which it answers, or an answer.
  void OnStatusMessage(int rank, const std::string& text);
  // Logs the pending warning if it is complete or due, or at once.
  void Warn(TimeNs now, bool at_once = false);
  // When the pending warning is due; kForever if there is none.
  TimeNs NextDeadline() const { return asked_ ? asked_->deadline : kForever; }

 private:
  struct Asked {
    StallInspector::Finding stall;
    TimeNs deadline;
    std::map<int, std::string> texts;  // by rank
  };

  void Send(int rank, const std::string& text);
  const std::string& HostOf(int rank) const {
    return topology_.hosts[static_cast<size_t>(topology_.host_of[static_cast<size_t>(rank)])];
  }

  Shared& shared_;
  Transport& transport_;
  const Topology& topology_;
  uint64_t answered_ = 0;         // the last agreement that WaitsLong saw
  TimeNs waits_since_ns_ = 0;     // for the next one
  TimeNs next_blocked_ns_ = 0;    // when to report again that a caller is blocked
  TimeNs warned_silence_ns_ = 0;  // how long a rank had been silent at the last warning
  std::optional<Asked> asked_;    // the pending warning
};

}  // namespace hororing
