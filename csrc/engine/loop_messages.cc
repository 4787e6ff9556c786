// Loop: its messages. Ranks on rank 0's host report to it directly. Ranks of another host that
// share memory report to its first rank, which forwards their reports as one message
// (negotiation/host_reports.h) and passes on rank 0's answer.
#include <algorithm>
#include <string>
#include <utility>

#include "base/recorder.h"
#include "engine/loop.h"
#include "negotiation/codec.h"

namespace hororing {
std::vector<std::vector<int>> Loop::AgreementGroups(const World& world) {
  std::vector<std::vector<int>> groups;
  for (const std::vector<int>& ranks : world.topology.ranks_on()) {
    if (world.local != nullptr && ranks[0] != 0) {
      groups.push_back(ranks);
    } else {
      for (const int rank : ranks) groups.push_back({rank});
    }
  }
  return groups;
}

std::vector<int> Loop::GroupOf(int rank) const {
  for (const std::vector<int>& ranks : agreement_groups_) {
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) return ranks;
  }
  return {rank};
}

// The rank that this rank reports to, and gets agreements from.
int Loop::parent_rank() const {
  const int first = group_[0];
  return first == topology_.rank ? 0 : first;
}

// Whether the loop should hold the requests submitted since the last report. If so, the loop's
// thread promises to poll in time, and callers that submit meanwhile need not wake it. A caller
// that runs the loop reports everything, and does not change that promise.
bool Loop::ShouldHoldReport() {
  if (!run_by_caller_) mailbox_.poll_by = kForever;  // before the scan, so that it misses nothing
  mailbox_.BeginScan();
  const TimeNs cycle_time_ns = shared_.CycleTime();
  pace_.set_cycle_time(cycle_time_ns);
  shared_.stats.cycle_time_ns = cycle_time_ns;
  if (mailbox_.IsUrgent()) return false;
  const TensorTable::Submitted submitted = shared_.tensors.submitted();
  if (submitted.count == 0 && !pace_.unanswered()) return true;
  const TimeNs now = NowNs();
  const TimeNs due = pace_.Due(submitted.first_ns, submitted.count, now);
  if (now >= due) return submitted.count == 0;
  if (eventcount_ != nullptr) poll_epoch_ = eventcount_->Epoch();
  mailbox_.poll_by = due;
  return !mailbox_.IsUrgent();  // a waiting caller may not have seen the promise
}

// SUBMIT -> NEGOTIATE: reports the requests submitted since the last report.
bool Loop::ReportSubmitted() {
  if (ShouldHoldReport()) return false;
  Report report;
  report.applied = applier_.applied();
  mailbox_.ClearPollRequest();
  shared_.tensors.TakeSubmitted(&submitted_);
  const TimeNs now = NowNs();
  for (TensorEntry* entry : submitted_) {
    if (!shared_.sets->Contains(entry->request.process_set, topology_.rank)) {
      // Removed since it was submitted.
      applier_.FailRemoved(shared_.tensors.Remove(Key(entry->request)));
      continue;
    }
    entry->reported_ns = now;
    Record(Event::kSubmitted, now, entry->request.kind, entry->request.process_set,
           entry->request.name);
    if (entry->cache_id == 0) entry->cache_id = shared_.tensors.IdOf(entry->request);
    const uint64_t id = entry->cache_id;
    if (coordinator_ && shared_.config.timeline_to > 0) FollowSteps(entry->request);
    if (id != 0) {
      RequestRecord* const known = shared_.tensors.FindRecord(id);
      known->reported = entry;
      if (IsReduction(entry->request.kind)) CountStep(now, known);
      if (const std::optional<double>& weight = entry->request.weight) {
        report.weights.resize(report.cached.size());
        report.weights.push_back(*weight);
      }
      report.cached.push_back(id);
    } else {
      report.fresh.push_back(entry->request);
    }
  }
  Add(Total::kRequests, static_cast<int64_t>(report.cached.size() + report.fresh.size()));
  shared_.stats.cache_hits += static_cast<int64_t>(report.cached.size());
  shared_.stats.cache_misses += static_cast<int64_t>(report.fresh.size());
  if (mailbox_.stopping() && !left_) {
    report.leaving = left_ = true;
    report.reason = mailbox_.stop_reason();
  }
  if (report.cached.empty() && report.fresh.empty() && !report.leaving) return false;
  SendReport(report, now);
  if (coordinator_) {
    pace_.OnLocalReport(now);
  } else {
    pace_.OnReportSent(now);
  }
  return true;
}

void Loop::CountStep(TimeNs now, RequestRecord* known) {
  if (known->in_step == steps_) {
    ++steps_;
    Add(Total::kSteps, 1);
    Set(Total::kStepBeganAt, now);
  }
  known->in_step = steps_;
}

void Loop::SendReport(const Report& report, TimeNs now) {
  if (coordinator_) {
    coordinator_->Receive(0, report, now);
  } else if (host_reports_) {
    host_reports_->Receive(topology_.rank, report, ConcernsAllRanks(report), now);
  } else {
    Post(parent_rank(), Encode(report));
  }
}

// Whether every request of a report concerns all ranks. False if this rank does not know an id.
bool Loop::ConcernsAllRanks(const Report& report) const {
  if (shared_.sets->only_world()) return true;
  return std::all_of(report.fresh.begin(), report.fresh.end(),
                     [](const Request& each) { return each.process_set == kWorldSet; }) &&
         std::all_of(report.cached.begin(), report.cached.end(), [this](uint64_t id) {
           const RequestRecord* const known = shared_.tensors.FindRecord(id);
           return known != nullptr && known->agreed.process_set == kWorldSet;
         });
}

// Sends the reports of this host's ranks to rank 0.
bool Loop::Forward() {
  std::optional<std::string> message = host_reports_->Take(NowNs());
  if (!message) return false;
  Post(0, std::move(*message));
  return true;
}

void Loop::Post(int peer, std::string message) {
  transport_.Post(peer, std::move(message));
  ++shared_.stats.control_messages_sent;
}

bool Loop::Receive() {
  const std::vector<int>& host_of = topology_.host_of;
  const auto on_host = [&](int rank, int of) {
    return rank >= 0 && rank < topology_.size &&
           host_of[static_cast<size_t>(rank)] == host_of[static_cast<size_t>(of)];
  };
  bool any = false;
  int peer = 0;
  std::string message;
  while (!final_ && transport_.Poll(&peer, &message)) {
    any = true;
    ++shared_.stats.control_messages_received;
    MessageKind kind = MessageKind::kReport;
    bool understood = KindOf(message, &kind);
    if (understood && kind == MessageKind::kReport && (coordinator_ || host_reports_)) {
      Report report;
      understood = Decode(message, &report);
      if (understood && coordinator_) {
        coordinator_->Receive(peer, report, NowNs());
      } else if (understood && on_host(peer, topology_.rank)) {
        host_reports_->Receive(peer, report, ConcernsAllRanks(report), NowNs());
      }
    } else if (understood && kind == MessageKind::kCombined && coordinator_) {
      std::vector<std::pair<std::vector<int>, Report>> combined;
      understood = DecodeCombined(message, &combined);
      for (const auto& [ranks, report] : combined) {
        understood = understood && std::all_of(ranks.begin(), ranks.end(),
                                               [&](int rank) { return on_host(rank, peer); });
        if (understood) coordinator_->Receive(ranks, report, NowNs());
      }
    } else if (understood && kind == MessageKind::kAgreement && peer == parent_rank()) {
      Agreement agreement;
      understood = Decode(message, &agreement);
      // Forward it before carrying it out, which needs all ranks; and before that, report.
      for (size_t i = 1; host_reports_ && i < group_.size(); ++i) Post(group_[i], message);
      if (host_reports_) host_reports_->Decided(agreement);
      pace_.OnAnswer();
      ReportSubmitted();
      if (understood) Carry(std::move(agreement));
    } else if (understood && kind == MessageKind::kStatus) {
      liveness_.OnStatusMessage(peer, message.substr(1));
    } else if (understood && kind == MessageKind::kTrace) {
      std::vector<TraceEvent> events;
      bool last = false;
      understood = DecodeTrace(message, &events, &last);
      if (understood) timeline_.Receive(peer, events, last);
    } else {
      understood = false;
    }
    if (!understood) {
      End(Status(Code::kInternal, "malformed control message from rank " + std::to_string(peer),
                 peer));
    }
  }
  return any;
}

void Loop::Send(const Agreement& agreement) {
  const bool to_all = coordinator_->IsForAll(agreement);
  const std::string message = to_all ? Encode(agreement) : std::string();
  for (const std::vector<int>& ranks : agreement_groups_) {
    if (ranks[0] == 0) continue;
    if (to_all) {
      Post(ranks[0], message);
    } else {
      const std::optional<Agreement> part = coordinator_->PartFor(ranks, agreement);
      if (part) Post(ranks[0], Encode(*part));
    }
  }
}

}  // namespace hororing
