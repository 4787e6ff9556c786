// TraceSink: collects the events of one rank until the engine ships them to rank 0, which
// writes the file (trace/writer.h). Costs one relaxed atomic load while the timeline is off.
//
// Thread-safety: all methods from any thread.
//
// The stage names are the words of docs/architecture.md; see Note [Timeline tracks] there.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"

namespace hororing {

enum class Stage : uint8_t {
  kHook = 0,
  kView = 1,
  kSubmit = 2,
  kNegotiate = 3,
  kPlan = 4,
  kPack = 5,
  kReduce = 6,
  kUnpack = 7,
  kComplete = 8,
  kGuard = 9,  // something that a guard of the package has found
};
const char* Name(Stage stage);  // "HOOK", ...

// The row of an event: callers', or the loop's. Negotiations overlap, so they are async spans.
enum class Track : uint8_t {
  kCaller = 0,     // the thread that submits and waits: HOOK, VIEW, SUBMIT
  kLoop = 1,       // the loop: PLAN, <COLLECTIVE>, PACK, REDUCE, UNPACK, COMPLETE
  kNegotiate = 2,  // async spans NEGOTIATE_<COLLECTIVE>
};

struct TraceEvent {
  std::string name;    // "PACK", "NEGOTIATE_ALLREDUCE", "CYCLE_START"
  std::string tensor;  // argument; empty if none applies
  Track track = Track::kLoop;
  bool instant = false;
  TimeNs begin_ns = 0;
  TimeNs end_ns = 0;
  int64_t bytes = -1;  // argument; -1 if none applies
  // Arguments of a negotiation: the process set, if it is not that of all ranks, and whether this
  // rank had nothing to report because it had joined.
  int32_t process_set = 0;
  bool joined = false;
};

class TraceSink {
 public:
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void Enable(bool mark_cycles);
  void Disable();
  bool mark_cycles() const { return mark_cycles_.load(std::memory_order_relaxed); }

  void Add(TraceEvent event);  // dropped while disabled
  // Short forms that return at once while disabled.
  void Span(Stage stage, Track track, const std::string& tensor, TimeNs begin_ns, TimeNs end_ns,
            int64_t bytes = -1);
  void CycleStart(TimeNs now);

  bool empty() const;
  // Removes and returns the collected events, in order of arrival.
  std::vector<TraceEvent> Drain();
  int64_t dropped() const;  // Events lost because more than kMaxPending waited to be shipped.

  static constexpr size_t kMaxPending = 1 << 20;

 private:
  std::atomic<bool> enabled_{false};
  std::atomic<bool> mark_cycles_{false};
  mutable std::mutex mutex_;
  std::vector<TraceEvent> events_;  // GUARDED_BY(mutex_)
  int64_t dropped_ = 0;             // GUARDED_BY(mutex_)
};

}  // namespace hororing
