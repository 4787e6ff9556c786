#include "negotiation/coordinator.h"

#include <algorithm>
#include <utility>

#include "negotiation/validate.h"

namespace hororing {
namespace {

// First dimensions of gathered tensors, [tensor * ranks + rank]; empty for other collectives.
std::vector<int64_t> RowsOf(const std::vector<const Request*>& requests) {
  std::vector<int64_t> rows;
  if (requests[0]->kind != Collective::kAllgather) return rows;
  for (size_t tensor = 0; tensor < requests[0]->tensors.size(); ++tensor) {
    for (const Request* request : requests) rows.push_back(request->tensors[tensor].shape[0]);
  }
  return rows;
}

}  // namespace

Coordinator::Coordinator(const Options& options)
    : options_(options),
      stall_inspector_(options.stall),
      applied_(static_cast<size_t>(options.size), 0) {}

void Coordinator::Receive(int rank, const Report& report, TimeNs now) {
  if (stopped_) return;
  applied_[static_cast<size_t>(rank)] = report.applied;
  ForgetRetired();
  for (uint64_t id : report.cached) ReportCached(rank, id, now);
  for (const Request& request : report.fresh) ReportFresh(rank, request, now);
  if (report.leaving) {
    std::string text = "rank " + std::to_string(rank) + " has shut down";
    if (!report.reason.empty()) text += " (" + report.reason + ")";
    text += "; every rank must make the same calls: see whether it had fewer batches, say";
    Decision leave;
    leave.kind = Decision::Kind::kLeave;
    leave.status = Status(Code::kShutDown, text, rank);
    Ready(std::move(leave), 0, /*urgent=*/true, now);
    stopped_ = true;
  }
}

void Coordinator::SwitchTimeline(bool on, bool mark_cycles) {
  if (stopped_) return;
  Decision decision;
  decision.kind = Decision::Kind::kTimeline;
  decision.timeline_on = on;
  decision.timeline_cycles = mark_cycles;
  Ready(std::move(decision), 0, /*urgent=*/true, 0);
}

void Coordinator::ReportCached(int rank, uint64_t id, TimeNs now) {
  const auto found = records_.find(id);
  if (found == records_.end()) return;  // excluded by invariant 3
  const Record& record = *found->second;
  const std::string& name = record.request.name;
  Pending& pending = PendingFor(name, now);
  if (pending.count == 0) {
    pending.id = id;
    pending.record = &record;
  } else if (pending.id != id) {
    Expand(pending);
  }
  if (pending.id == 0) pending.requests[static_cast<size_t>(rank)] = RequestOf(record, rank);
  Count(rank, name, pending, now);
}

void Coordinator::ReportFresh(int rank, const Request& request, TimeNs now) {
  Pending& pending = PendingFor(request.name, now);
  Expand(pending);
  pending.requests[static_cast<size_t>(rank)] = request;
  Count(rank, request.name, pending, now);
}

Coordinator::Pending& Coordinator::PendingFor(const std::string& name, TimeNs now) {
  if (pending_.empty()) stall_check_ns_ = After(now, stall_inspector_.interval_ns());
  Pending& pending = pending_[name];
  if (pending.reported.empty()) {
    pending.reported.resize(static_cast<size_t>(options_.size));
    pending.since_ns = now;
  }
  return pending;
}

// From "all reports so far named one cached request" to one request per rank.
void Coordinator::Expand(Pending& pending) {
  if (pending.requests.empty()) pending.requests.resize(static_cast<size_t>(options_.size));
  if (pending.id == 0) return;
  for (int rank = 0; rank < options_.size; ++rank) {
    const size_t r = static_cast<size_t>(rank);
    if (pending.reported[r]) pending.requests[r] = RequestOf(*pending.record, rank);
  }
  pending.id = 0;
  pending.record = nullptr;
}

void Coordinator::Count(int rank, const std::string& name, Pending& pending, TimeNs now) {
  char& reported = pending.reported[static_cast<size_t>(rank)];
  pending.count += reported ? 0 : 1;
  reported = 1;
  if (pending.count == options_.size) Complete(name, pending, now);
}

void Coordinator::Complete(const std::string& name, Pending& pending, TimeNs now) {
  Decision decision;
  int64_t bytes = 0;
  bool urgent = true;
  if (pending.id != 0) {
    const auto record = records_.find(pending.id);
    decision.cache_id = pending.id;
    bytes = record->second->request.bytes();
    urgent = record->second->request.kind != Collective::kAllreduce;
    if (retired_.count(pending.id) == 0) {
      recency_.splice(recency_.begin(), recency_, record->second->recency);
    } else {
      // The ranks have forgotten the id, or are about to.
      decision.cache_id = 0;
      decision.name = record->second->request.name;
      decision.rows = record->second->rows;
    }
  } else {
    std::vector<const Request*> requests;
    for (const Request& request : pending.requests) requests.push_back(&request);
    decision.name = name;
    decision.status = Validate(requests);
    if (decision.status.ok()) {
      decision.rows = RowsOf(requests);
      decision.cache_id = Remember(*requests[0], decision.rows);
      bytes = requests[0]->bytes();
      urgent = requests[0]->kind != Collective::kAllreduce;
    } else {
      decision.kind = Decision::Kind::kFail;
    }
  }
  pending_.erase(pending_.find(decision.name.empty() ? name : decision.name));
  Ready(std::move(decision), bytes, urgent, now);
}

void Coordinator::Ready(Decision decision, int64_t bytes, bool urgent, TimeNs now) {
  if (ready_.empty()) ready_since_ns_ = now;
  ready_.push_back(std::move(decision));
  ready_bytes_ += bytes;
  urgent_ = urgent_ || urgent;
}

std::optional<Agreement> Coordinator::Decide(TimeNs now) {
  if (ready_.empty()) return std::nullopt;
  const bool hold = !urgent_ && !pending_.empty() && ready_bytes_ < options_.fusion_bytes &&
                    now < After(ready_since_ns_, options_.hold_ns);
  if (hold) return std::nullopt;
  Agreement agreement;
  agreement.sequence = ++sequence_;
  agreement.evicted = std::move(evicted_);
  agreement.decisions = std::move(ready_);
  for (uint64_t id : agreement.evicted) retired_[id] = sequence_;
  evicted_.clear();
  ready_.clear();
  ready_bytes_ = 0;
  urgent_ = false;
  return agreement;
}

TimeNs Coordinator::NextDeadline() const {
  if (stopped_) return kForever;
  TimeNs next = kForever;
  if (!ready_.empty()) next = After(ready_since_ns_, options_.hold_ns);
  return pending_.empty() ? next : std::min(next, stall_check_ns_);
}

std::string Coordinator::InspectStalls(TimeNs now) {
  if (stopped_ || pending_.empty() || now < stall_check_ns_) return "";
  stall_check_ns_ = After(now, stall_inspector_.interval_ns());
  StallInspector::Finding finding = stall_inspector_.Inspect(AllWaiting(), now);
  if (!finding.abort.ok()) {
    Decision abort;
    abort.kind = Decision::Kind::kAbort;
    abort.status = finding.abort;
    Ready(std::move(abort), 0, /*urgent=*/true, now);
    stopped_ = true;
  }
  return finding.warning;
}

std::vector<Waiting> Coordinator::AllWaiting() const {
  std::vector<Waiting> all;
  for (const auto& [name, pending] : pending_) {
    Waiting waiting;
    waiting.name = name;
    waiting.since_ns = pending.since_ns;
    for (int rank = 0; rank < options_.size; ++rank) {
      const size_t r = static_cast<size_t>(rank);
      (pending.reported[r] ? waiting.submitted : waiting.missing).push_back(rank);
    }
    const Request& any = pending.record != nullptr
                             ? pending.record->request
                             : pending.requests[static_cast<size_t>(waiting.submitted.front())];
    waiting.collective = Name(any.kind);
    all.push_back(std::move(waiting));
  }
  std::sort(all.begin(), all.end(),
            [](const Waiting& a, const Waiting& b) { return a.name < b.name; });
  return all;
}

Request Coordinator::RequestOf(const Record& record, int rank) const {
  Request request = record.request;
  if (record.rows.empty()) return request;
  for (size_t tensor = 0; tensor < request.tensors.size(); ++tensor) {
    request.tensors[tensor].shape[0] =
        record.rows[tensor * static_cast<size_t>(options_.size) + static_cast<size_t>(rank)];
  }
  return request;
}

// Gives `request` an id, in place of the one that its name may have had; evicts the request
// that was agreed longest ago when the cache is full.
uint64_t Coordinator::Remember(const Request& request, const std::vector<int64_t>& rows) {
  if (options_.cache_capacity <= 0 || request.kind == Collective::kBarrier) return 0;
  const auto older = ids_.find(request.name);
  if (older != ids_.end()) {
    // All ranks have reported the name just now, so no report of the old id is on its way.
    recency_.erase(records_.at(older->second)->recency);
    records_.erase(older->second);
    ids_.erase(older);
  } else if (static_cast<int>(ids_.size()) >= options_.cache_capacity) {
    const uint64_t victim = recency_.back();
    recency_.pop_back();
    ids_.erase(records_.at(victim)->request.name);
    evicted_.push_back(victim);
    // Announced with the next agreement; until then "retired at the sequence to come".
    retired_[victim] = sequence_ + 1;
  }
  const uint64_t id = next_id_++;
  recency_.push_front(id);
  records_[id] = std::make_unique<Record>(Record{id, request, rows, recency_.begin()});
  ids_[request.name] = id;
  return id;
}

void Coordinator::ForgetRetired() {
  if (retired_.empty()) return;
  const uint64_t applied_by_all = *std::min_element(applied_.begin(), applied_.end());
  for (auto retired = retired_.begin(); retired != retired_.end();) {
    const auto record = records_.find(retired->first);
    const auto pending = pending_.find(record->second->request.name);
    const bool in_use = pending != pending_.end() && pending->second.id == retired->first;
    if (retired->second <= applied_by_all && !in_use) {
      records_.erase(record);
      retired = retired_.erase(retired);
    } else {
      ++retired;
    }
  }
}

}  // namespace hororing
