// Loop: what an engine's thread does, from the first report to the last.
//
// Event-driven: it sleeps in Transport::Sleep until a request is submitted, a control message
// arrives or a deadline comes; there is no cycle. See docs/threading.md.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/batch_runner.h"
#include "engine/engine.h"
#include "engine/timeline.h"
#include "negotiation/coordinator.h"
#include "negotiation/response_cache.h"

namespace hororing {

class Loop {
 public:
  Loop(Engine& engine, World& world, std::vector<std::unique_ptr<Backend>> backends,
       std::vector<TimeNs> clock_offsets);

  // Until a rank shuts down (kShutDown) or something breaks; tells the peers, and returns why.
  Status Run();

 private:
  // Each of the steps returns true when there was something to do, and sets final_ to end.
  bool Report();
  bool Receive();
  bool Decide();
  bool ServeCommands();
  void Apply(const Agreement& agreement);
  std::optional<Work> Agreed(const Decision& decision);
  void Fail(const Decision& decision);
  void KeepHouse(TimeNs now);
  void TraceNegotiation(const TensorEntry& entry, TimeNs end);
  void End(Status why);
  void Farewell();
  TimeNs NextDeadline() const;

  Engine& engine_;
  Transport& transport_;
  const Topology& topology_;
  Timeline timeline_;
  BatchRunner runner_;
  std::optional<Coordinator> coordinator_;  // on rank 0
  ResponseCache cache_;
  uint32_t applied_ = 0;
  bool left_ = false;  // this rank's leaving has been reported
  TimeNs next_house_ns_ = 0;
  const int parent_pid_;
  std::optional<Status> final_;
};

}  // namespace hororing
