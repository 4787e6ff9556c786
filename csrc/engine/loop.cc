#include "engine/loop.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/arithmetic.h"
#include "base/log.h"
#include "negotiation/codec.h"

namespace hororing {
// Time limits for the last messages: the agreement to stop, and the end of the timeline. The short
// one is for a revoked transport, which only announces its failure.
constexpr TimeNs kFinalTimeout = 2 * kSecond, kTimelineTimeout = 4 * kSecond;
constexpr TimeNs kRevokedTimeout = kSecond / 5;
// Fewer bytes wait for the batch on the wire: with what comes by its end, they make a better one.
constexpr int64_t kWorthABatch = 2 << 20;

Loop::Loop(Shared& shared, World& world, const BackendOptions& options,
           std::vector<std::unique_ptr<Backend>> backends, std::vector<TimeNs> clock_offsets)
    : shared_(shared),
      mailbox_(shared.mailbox),
      backend_options_(options),
      transport_(*world.transport),
      eventcount_(world.transport->eventcount()),
      topology_(world.topology),
      timeline_(*world.transport, world.topology, std::move(clock_offsets), shared.trace),
      runner_(shared,
              {Members::World(topology_.size).ranks, nullptr, std::move(backends), topology_.rank}),
      agreement_groups_(AgreementGroups(world)),
      group_(GroupOf(world.topology.rank)),
      pace_(shared.config.cycle_time_ns),
      applier_(shared, world, backend_options_, runner_, timeline_, group_),
      liveness_(shared, world),
      parent_pid_(getppid()) {
  const auto warn = [&tensors = shared.tensors](const std::string& text) {
    Log(LogLevel::kWarning, "stall: " + tensors.Titles({"REDUCE", "PLAN"}) + " (REDUCE): " + text);
  };
  transport_.SetWaitLimits(
      {shared.config.stall.warning_ns, warn, shared.config.timeout_ns, [this] { Negotiate(); }});
  shared_.stats.fusion_bytes = shared_.config.fusion_bytes;
  shared_.stats.cycle_time_ns = shared_.config.cycle_time_ns;
  if (topology_.rank == group_[0] && group_.size() > 1) {
    host_reports_.emplace(group_, ReportPace::kUnansweredCycles * shared.config.cycle_time_ns);
  }
  if (topology_.rank == 0) {
    coordinator_.emplace(
        Coordinator::Options{topology_.size, shared.config.cache_capacity, shared.config.stall});
  }
}

Status Loop::Run(std::unique_lock<std::mutex>& progress) {
  try {
    while (!final_) {
      const uint32_t epoch = eventcount_ != nullptr ? eventcount_->Epoch() : 0;
      const bool busy = Step();
      if (final_) continue;
      if (eventcount_ != nullptr && mailbox_.poll_by.load() != kForever) {
        Park(progress, poll_epoch_);
      } else if (busy) {
        continue;
      } else if (eventcount_ != nullptr) {
        Park(progress, epoch);
      } else {
        transport_.Sleep(NextDeadline());
      }
      ++shared_.stats.loop_wakeups;
    }
  } catch (const std::exception& error) {
    OnException(error);
  }
  DrainAndStop();
  return *final_;
}

// Sleeps without the lock. Returns with the lock, when there is work and no caller runs the loop. A
// caller that stops driving progress wakes this thread if it leaves work.
void Loop::Park(std::unique_lock<std::mutex>& progress, uint32_t epoch) {
  const TimeNs until = parked_until_ns_ = NextDeadline();
  const bool gathers = mailbox_.poll_by.load() != kForever;  // then `until` is not later
  progress.unlock();
  if (gathers) {
    if (NowNs() < until) eventcount_->Park(epoch, until);
    epoch = eventcount_->Epoch();
    if (progress.try_lock()) return;  // otherwise a caller runs the loop
  }
  for (;;) {
    eventcount_->SpinThenPark(epoch, until);
    if (NowNs() >= until) return progress.lock();
    epoch = eventcount_->Epoch();  // read it before try_lock: later events change it again
    if (progress.try_lock()) return;
  }
}

Loop::Handoff Loop::ProgressUntil(const std::function<bool()>& done, TimeNs deadline) {
  // Peers ring while the last batch runs. A few more steps usually save waking the engine's thread.
  constexpr int kFinalSteps = 3;
  const StandardArithmetic arithmetic;
  eventcount_->BeginCallerProgress();
  run_by_caller_ = true;
  uint32_t epoch = 0;
  int final_steps = 0;
  try {
    for (;;) {
      epoch = eventcount_->Epoch();
      const bool busy = Step();
      if (final_ || !shared_.CallersMayProgress()) break;
      if (done()) {
        if (++final_steps > kFinalSteps || eventcount_->Epoch() == epoch) break;
        continue;
      }
      if (busy) continue;
      if (NowNs() >= deadline) break;
      transport_.Sleep(std::min(deadline, NextDeadline()));
      ++shared_.stats.loop_wakeups;
    }
  } catch (const std::exception& error) {
    OnException(error);
  }
  run_by_caller_ = false;
  eventcount_->EndCallerProgress();
  return {epoch, final_ || !shared_.CallersMayProgress() || NextDeadline() < parked_until_ns_};
}

// Polls everything once. Returns whether there was anything to do.
bool Loop::Step() {
  if (transport_.revoked()) {
    End(transport_.CheckPeers());
    return true;
  }
  bool busy = ReportSubmitted();
  busy |= Receive();
  if (!final_ && host_reports_) busy |= Forward();
  if (!final_ && coordinator_) busy |= Decide();
  if (!final_) busy |= ServeCommand();
  if (!final_) RunPeriodicChecks(NowNs());
  return busy;
}

bool Loop::Decide() {
  const TimeNs now = NowNs();
  const StallInspector::Finding stall = coordinator_->InspectStalls(now);
  if (!stall.warning.empty()) liveness_.Ask(stall, now);
  liveness_.Warn(now, /*at_once=*/!stall.abort.ok());
  // CheckPeers also notices that this process was stopped. RunPeriodicChecks ends the job.
  const bool waits = !stall.missing.empty() && stall.abort.ok();
  if (waits && transport_.CheckPeers().ok()) End(liveness_.Check(stall.missing, now));
  if (final_) return true;
  std::optional<Agreement> agreement = coordinator_->TakeAgreement();
  if (!agreement) return false;
  Send(*agreement);
  if (coordinator_->IsForAll(*agreement)) {
    Carry(*std::move(agreement));
  } else if (std::optional<Agreement> part = coordinator_->PartFor(group_, *agreement)) {
    Carry(*std::move(part));
  }
  return true;
}

// Negotiates the next batch while one is on the wire. A failure ends the loop after that one: its
// memory is in use, and the other ranks need nothing more to carry it out.
void Loop::Negotiate() try {
  if (final_ || agreed_.empty()) return;
  Receive();
  if (!final_) ReportSubmitted();
  if (!final_ && host_reports_) Forward();
  if (!final_ && coordinator_ && coordinator_->ready_bytes() >= kWorthABatch) Decide();
} catch (const std::exception& error) {
  OnException(error);
}

void Loop::Carry(Agreement agreement) {
  agreed_.push_back(std::move(agreement));
  if (agreed_.size() > 1) return;  // it has come while another one is carried out
  for (; !agreed_.empty() && !final_; agreed_.pop_front()) End(applier_.Apply(agreed_.front()));
}

// Rank 0: the timeline at the chosen steps, by tensors' names: a first step has no cache ids.
void Loop::FollowSteps(const Request& request) {
  const EngineConfig& config = shared_.config;
  if (request.kind != Collective::kAllreduce || request.process_set != kWorldSet) return;
  if (step_ > config.timeline_to) return;
  if (names_.insert(request.name).second && step_ > 0) return;
  names_ = {request.name};
  ++step_;
  if (step_ == config.timeline_from && timeline_.closed()) {
    const Status opened = timeline_.Open(config.timeline, config.timeline_bytes);
    if (opened.ok()) coordinator_->SwitchTimeline(true, config.timeline_cycles);
    if (!opened.ok()) Log(LogLevel::kError, "no timeline: " + opened.message());
  } else if (step_ > config.timeline_to) {
    coordinator_->SwitchTimeline(false, false);
  }
}

bool Loop::ServeCommand() {
  const std::shared_ptr<Mailbox::Command> command = mailbox_.command();
  if (command == nullptr) return false;
  const bool first = !std::exchange(command->begun, true);
  Status status;
  if (command->path) {
    const std::string& path = *command->path;
    if (!path.empty()) status = timeline_.Open(path, shared_.config.timeline_bytes);
    if (status.ok() && !timeline_.closed())
      coordinator_->SwitchTimeline(true, command->mark_cycles);
  } else if (!timeline_.closed()) {
    if (first) coordinator_->SwitchTimeline(false, false);
    return first;
  }
  mailbox_.Answer(*command, status);
  return true;
}

void Loop::RunPeriodicChecks(TimeNs now) {
  if (shared_.trace.enabled()) timeline_.Ship(now);
  if (now < next_checks_ns_) return;
  next_checks_ns_ = After(now, shared_.config.checks_ns);
  // A failed peer's error is more precise than the end of the launcher or of work on the device,
  // which it caused. It may arrive while the device's check blocks.
  const Status devices = runner_.CheckDevices();
  End(transport_.CheckPeers());
  End(devices);
  CheckForReply(now);
  ExitIfOrphaned();
}

// Rank 0 checks its own missing ranks in Decide.
void Loop::CheckForReply(TimeNs now) {
  const bool waits = left_ || shared_.stats.submitted.load() != shared_.stats.completed.load();
  if (!liveness_.WaitsLong(waits, applier_.applied(), now)) return;
  if (liveness_.MustReportBlocked(now)) {
    Report report;
    report.applied = applier_.applied();
    report.blocked = true;
    SendReport(report, now);
  }
  if (!coordinator_) End(liveness_.CheckParents(parent_rank(), now));
}

void Loop::ExitIfOrphaned() {
  if (!shared_.config.watch_parent || getppid() == parent_pid_) return;
  End(Status(Code::kPeerLost, "the launcher of this rank has ended"));
  kill(getpid(), SIGTERM);
}

TimeNs Loop::NextDeadline() const {
  TimeNs next = next_checks_ns_;
  if (shared_.trace.enabled()) next = std::min(next, timeline_.NextDeadline());
  if (coordinator_) next = std::min(next, coordinator_->NextDeadline());
  if (host_reports_) next = std::min(next, host_reports_->NextDeadline());
  next = std::min(next, liveness_.NextDeadline());
  return run_by_caller_ ? next : std::min(next, mailbox_.poll_by.load());
}

void Loop::OnException(const std::exception& error) {
  End(Status(Code::kInternal, std::string("an internal error of hororing: ") + error.what()));
}

void Loop::End(Status why) {
  if (!final_ && !why.ok()) final_ = std::move(why);
}

// Tells the peers that this rank takes no further part. Rank 0 also collects events in transit.
void Loop::DrainAndStop() {
  ExitIfOrphaned();  // a peer may have died of the same cause, and been noticed first
  liveness_.Warn(NowNs(), /*at_once=*/true);
  // After a failure, the runner's destructor aborts GPU operations once all handles are done.
  if (peaceful()) {
    runner_.Leave(After(NowNs(), kFinalTimeout));
  } else {
    // All ranks receive an agreed end; an announcement would overtake it, as the loss of a peer.
    if (!end_agreed()) transport_.AnnounceFailure(*final_);
    // If this rank's own script revoked the engine, its traceback gives the reason.
    if (topology_.size > 1 && !transport_.revoked()) {
      Log(LogLevel::kError, "communication has failed: " + final_->message());
    }
  }
  if (coordinator_ && step_ < shared_.config.timeline_from) {
    Log(LogLevel::kWarning, "no timeline: HORORING_TIMELINE_STEPS begins with step " +
                                std::to_string(shared_.config.timeline_from) + ", of " +
                                std::to_string(step_));
  }
  timeline_.Switch(false, false);
  const TimeNs begin = NowNs(), deadline = After(begin, kTimelineTimeout);
  transport_.Flush(After(begin, transport_.revoked() ? kRevokedTimeout : kFinalTimeout));
  if (!timeline_.closed() && peaceful()) {
    int peer = 0;
    std::string message;
    std::vector<TraceEvent> events;
    bool last = false;
    while (!timeline_.closed() && NowNs() < deadline && transport_.CheckPeers().ok()) {
      if (!transport_.Poll(&peer, &message)) {
        transport_.Sleep(std::min(deadline, After(NowNs(), 20 * kMillisecond)));
      } else if (DecodeTrace(message, &events, &last)) {
        timeline_.Receive(peer, events, last);
      }
    }
  }
  timeline_.CloseNow();
}

}  // namespace hororing
