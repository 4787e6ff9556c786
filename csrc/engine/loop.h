// Loop: what an engine does, from the first report to the last.
//
// Event-driven: it sleeps until a request is submitted, a control message arrives or a deadline
// passes. There is no fixed cycle, unlike Horovod's background loop; `cycle_time` only bounds how
// long requests are held for fusion. The loop runs on the engine's thread. If the transport permits
// it, a caller that waits for a request runs it, which saves two thread switches (ADR 12).
//
// Thread-safety: every call REQUIRES Engine::progress_mutex_, on any thread.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/applier.h"
#include "engine/batch_runner.h"
#include "engine/liveness_watch.h"
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

  // Runs until a rank shuts down (kShutDown) or an error occurs; informs the peers, and returns the
  // reason. `progress` is held except while the thread sleeps.
  Status Run(std::unique_lock<std::mutex>& progress);
  bool end_agreed() const { return applier_.end_agreed(); }
  // Whether it ended because a rank left: in peace, even if that rank handles an exception.
  bool peaceful() const {
    return applier_.rank_left() || (final_ && final_->code() == Code::kShutDown);
  }

  // State that a caller hands back when it stops driving progress.
  struct Handoff {
    uint32_t epoch;  // the eventcount before its last poll
    bool wake;       // wake the engine's thread unconditionally
  };
  // Runs the loop for a caller that waits, until done() or `deadline`. REQUIRES: CallersMayRun().
  Handoff ProgressUntil(const std::function<bool()>& done, TimeNs deadline);
  // For the thread that has abandoned the loop's. See BatchRunner.
  BatchRunner& runner() { return runner_; }
  bool CallersMayRun() const { return eventcount_ != nullptr && !final_; }

 private:
  bool Step();
  void Park(std::unique_lock<std::mutex>& progress, uint32_t epoch);
  // Each step returns whether it did anything, and sets final_ to end the loop.
  bool ReportSubmitted();
  bool Receive();
  bool Forward();
  bool Decide();
  void Negotiate();
  void Carry(Agreement agreement);
  bool ServeCommand();
  // loop_messages.cc, with the first three steps
  bool ShouldHoldReport();
  void SendReport(const Report& report, TimeNs now);
  bool ConcernsAllRanks(const Report& report) const;
  static std::vector<std::vector<int>> AgreementGroups(const World& world);
  std::vector<int> GroupOf(int rank) const;
  int parent_rank() const;
  void Post(int peer, std::string message);
  void Send(const Agreement& agreement);
  // loop.cc
  void FollowSteps(const Request& request);
  void CountStep(TimeNs now, RequestRecord* known);
  void RunPeriodicChecks(TimeNs now);
  void ExitIfOrphaned();
  void CheckForReply(TimeNs now);
  // Ends the loop, unless `why` is ok. The first call counts.
  void End(Status why);
  void OnException(const std::exception& error);
  void DrainAndStop();
  TimeNs NextDeadline() const;

  Shared& shared_;
  Mailbox& mailbox_;
  const BackendOptions backend_options_;
  Transport& transport_;
  Eventcount* const eventcount_;  // null: only the engine's thread may use the transport
  const Topology& topology_;
  Timeline timeline_;
  BatchRunner runner_;
  // Groups of ranks that share one report to rank 0 and one answer, through their first rank.
  const std::vector<std::vector<int>> agreement_groups_;
  const std::vector<int> group_;
  std::optional<Coordinator> coordinator_;   // on rank 0
  std::optional<HostReports> host_reports_;  // on the first rank of every other host
  int64_t steps_ = 0;
  // On rank 0, if the timeline covers some steps only: the current step, from 1, and its names.
  int64_t step_ = 0;
  std::unordered_set<std::string> names_;
  std::vector<TensorEntry*> submitted_;  // scratch of ReportSubmitted; reused
  ReportPace pace_;
  uint32_t poll_epoch_ = 0;  // the eventcount when the loop's thread promised to poll
  bool run_by_caller_ = false;
  Applier applier_;
  std::deque<Agreement> agreed_;  // the first is being carried out
  LivenessWatch liveness_;
  bool left_ = false;  // this rank has reported its shutdown
  TimeNs next_checks_ns_ = 0;
  TimeNs parked_until_ns_ = 0;  // when the engine's thread wakes by itself
  const int parent_pid_;
  std::optional<Status> final_;  // the loop has ended
};

}  // namespace hororing
