// Loop: what an engine does, from the first report to the last.
//
// Event-driven: it sleeps until a request is submitted, a control message arrives or a deadline
// comes; there is no cycle. Runs on the engine's thread; where the transport permits it, a caller
// that waits for a request runs it meanwhile, which saves two changes of threads (ADR 0012).
//
// Thread-safety: everything under Engine::progress_mutex_, whoever calls.
#pragma once

#include <exception>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/batch_runner.h"
#include "engine/report_pace.h"
#include "engine/shared.h"
#include "engine/timeline.h"
#include "negotiation/coordinator.h"
#include "negotiation/host_reports.h"
#include "transport/factory.h"

namespace hororing {

class Loop {
 public:
  Loop(Shared& shared, World& world, const BackendOptions& options,
       std::vector<std::unique_ptr<Backend>> backends, std::vector<TimeNs> clock_offsets);

  // Until a rank shuts down (kShutDown) or something breaks; tells the peers, and returns why.
  // `progress` is held, but while the thread sleeps.
  Status Run(std::unique_lock<std::mutex>& progress);
  // All ranks have agreed on the end.
  bool end_agreed() const { return end_agreed_; }

  // What a caller leaves to the engine's thread, which may be asleep.
  struct Left {
    uint32_t epoch;  // as it was before the caller's last look
    bool wake;       // in any case: the end, or an earlier deadline than it sleeps to
  };
  // Does the same, for a caller that waits, until done() or `deadline`. REQUIRES: drivable().
  Left ProgressUntil(const std::function<bool()>& done, TimeNs deadline);
  bool drivable() const { return eventcount_ != nullptr && !final_; }

 private:
  bool Step();
  void Park(std::unique_lock<std::mutex>& progress, uint32_t epoch);
  // Each of the steps returns true when there was something to do, and sets final_ to end.
  bool Report();
  bool Receive();
  bool Forward();
  bool Decide();
  bool ServeCommand();
  // messages.cc, with the first three steps
  bool LetsMoreCome();
  void Tell(const struct Report& report, TimeNs now);
  bool IsOfWorld(const struct Report& report) const;
  static std::vector<std::vector<int>> AgreementGroups(const World& world);
  std::vector<int> Neighbours(int rank) const;
  int parent_rank() const;
  void Post(int peer, std::string message);
  void Send(const Agreement& agreement);
  // silence.cc
  void LookAtAnswers(TimeNs now);
  void LookForSigns(const std::map<int, TimeNs>& awaited, TimeNs now);
  void AskWhatIsDone(const StallInspector::Finding& stall, TimeNs now);
  void HearDoing(int rank, const std::string& text);
  void Warn(bool now);
  // apply.cc
  void Apply(const Agreement& agreement);
  void SetCycleTime(TimeNs cycle_time_ns);
  void Run(std::vector<Work>* work);
  TensorEntry* Reported(uint64_t id);
  std::optional<Work> Agreed(const Decision& decision, uint64_t id);
  TensorEntry* StandIn(const Request& request);
  Status ToDevice(size_t bytes, GatheredTensor* memory);
  void Settle(const Work& work);
  void AddSet(int32_t id, const Request& request);
  Status RemoveSet(int32_t id);
  void FailSettled(TensorEntry& entry, const Status& why);
  void Fail(const Decision& decision);
  void FailRemoved(std::unique_ptr<TensorEntry> entry);
  void TraceNegotiation(const TensorEntry& entry);
  // loop.cc
  void FollowTuner();
  void FollowSteps(const TensorEntry& entry);
  void RunPeriodicChecks(TimeNs now);
  void ExitIfOrphaned();
  void End(Status why);
  void OnException(const std::exception& error);
  void DrainAndStop();
  TimeNs NextDeadline() const;

  Shared& shared_;
  Mailbox& mailbox_;
  World& world_;
  const BackendOptions backend_options_;
  Transport& transport_;
  Eventcount* const eventcount_;  // null: only the engine's thread may use the transport
  const Topology& topology_;
  Timeline timeline_;
  BatchRunner runner_;
  // Ranks that report to rank 0 and hear from it together, by the first of them; this rank's own.
  const std::vector<std::vector<int>> agreement_groups_;
  const std::vector<int> neighbours_;
  std::optional<Coordinator> coordinator_;   // on rank 0
  std::optional<HostReports> host_reports_;  // on the first of the others
  std::ofstream tune_log_;                   // on rank 0
  StepWatch steps_;                          // on rank 0, where the timeline is about some
  int64_t step_ = 0;                         // the one under way, from 1
  std::vector<TensorEntry*> submitted_;      // of Report; its memory is used again
  ReportPace pace_;
  uint32_t poll_epoch_ = 0;  // as it was when the loop's thread promised to poll
  bool run_by_caller_ = false;
  // Of the agreement under way: what this rank contributes although it has joined.
  std::vector<std::unique_ptr<TensorEntry>> stand_ins_;
  uint64_t applied_ = 0;
  uint64_t sets_added_ = 0;  // equal on all ranks
  bool left_ = false;        // this rank's leaving has been reported
  // Of the last look at answers: what was applied by then, and since when nothing else has been,
  // although something is in flight.
  uint64_t answered_ = 0;
  TimeNs waits_since_ns_ = 0;
  TimeNs next_blocked_ns_ = 0;    // when it may say again that a caller is blocked
  TimeNs warned_silence_ns_ = 0;  // how long a rank had been silent at the last warning
  // On rank 0: a warning that waits for what the missing ranks say.
  struct Asked {
    StallInspector::Finding stall;
    TimeNs deadline;
    std::map<int, std::string> said;  // by rank
  };
  std::optional<Asked> asked_;
  TimeNs next_checks_ns_ = 0;
  TimeNs parked_until_ns_ = 0;  // when the engine's thread wakes by itself
  const int parent_pid_;
  std::optional<Status> final_;
  bool end_agreed_ = false;
};

}  // namespace hororing
