#include "negotiation/coordinator.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "negotiation/validate.h"

namespace hororing {
namespace {

// As in Decision::rows, of requests that carry some.
std::vector<int64_t> RowsOf(const std::vector<const Request*>& requests) {
  std::vector<int64_t> rows;
  if (requests[0]->kind == Collective::kAllgather) {
    for (size_t tensor = 0; tensor < requests[0]->tensors.size(); ++tensor) {
      for (const Request* request : requests) rows.push_back(request->tensors[tensor].shape[0]);
    }
  } else if (requests[0]->kind == Collective::kAlltoall) {
    for (const Request* request : requests) {
      rows.insert(rows.end(), request->splits.begin(), request->splits.end());
    }
  }
  return rows;
}

}  // namespace

Coordinator::Coordinator(const Options& options)
    : options_(options),
      stall_inspector_(options.stall),
      sets_(options.size),
      joined_(static_cast<size_t>(options.size), 0),
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

const Request& Coordinator::Pending::any() const {
  if (record != nullptr) return record->request;
  const auto first = std::find(reported.begin(), reported.end(), 1);
  return requests[static_cast<size_t>(first - reported.begin())];
}

// A record that is not there belongs to a process set that was removed: its requests have failed.
void Coordinator::ReportCached(int rank, uint64_t id, TimeNs now) {
  const auto found = records_.find(id);
  if (found == records_.end()) return;
  const Record& record = *found->second;
  const std::string key = Key(record.request);
  Pending& pending = PendingFor(record.request, key, now);
  if (pending.count == 0) {
    pending.id = id;
    pending.record = &record;
  } else if (pending.id != id) {
    Expand(pending);
  }
  if (pending.id == 0) {
    const int member = pending.set->IndexOf(rank);
    pending.requests[static_cast<size_t>(member)] = RequestOf(record, member);
  }
  Count(rank, key, pending, now);
}

void Coordinator::ReportFresh(int rank, const Request& request, TimeNs now) {
  const ProcessSet* set = sets_.Find(request.process_set);
  if (set == nullptr || set->IndexOf(rank) < 0) return;  // removed meanwhile, as above
  if (request.kind == Collective::kJoin) Join(rank, now);
  const std::string key = Key(request);
  Pending& pending = PendingFor(request, key, now);
  Expand(pending);
  pending.requests[static_cast<size_t>(set->IndexOf(rank))] = request;
  Count(rank, key, pending, now);
}

Coordinator::Pending& Coordinator::PendingFor(const Request& request, const std::string& key,
                                              TimeNs now) {
  if (pending_.empty()) stall_check_ns_ = After(now, stall_inspector_.interval_ns());
  Pending& pending = pending_[key];
  if (pending.set == nullptr) {
    pending.set = sets_.Find(request.process_set);
    pending.reported.resize(pending.set->ranks.size());
    pending.since_ns = now;
    pending.fusable = request.kind == Collective::kAllreduce;
    if (pending.fusable) ++fusable_[request.process_set];
  }
  return pending;
}

// From "all reports so far named one cached request" to one request per member.
void Coordinator::Expand(Pending& pending) {
  if (pending.requests.empty()) pending.requests.resize(pending.reported.size());
  if (pending.id == 0) return;
  for (size_t member = 0; member < pending.reported.size(); ++member) {
    if (!pending.reported[member]) continue;
    pending.requests[member] = RequestOf(*pending.record, static_cast<int>(member));
  }
  pending.id = 0;
  pending.record = nullptr;
}

void Coordinator::Count(int rank, const std::string& key, Pending& pending, TimeNs now) {
  char& reported = pending.reported[static_cast<size_t>(pending.set->IndexOf(rank))];
  pending.count += reported ? 0 : 1;
  reported = 1;
  if (AllHere(pending)) Complete(key, pending, now);
}

void Coordinator::Complete(const std::string& key, Pending& pending, TimeNs now) {
  int64_t bytes = 0;
  Decision decision = Agree(pending, &bytes);
  const Request& request = pending.any();
  decision.process_set = request.process_set;
  const bool urgent = request.kind != Collective::kAllreduce;
  if (decision.status.ok() && (request.kind == Collective::kAddProcessSet ||
                               request.kind == Collective::kRemoveProcessSet)) {
    decision.status = ChangeSets(request, &decision.rows, now);
  }
  const bool joins =
      std::any_of(pending.requests.begin(), pending.requests.end(),
                  [](const Request& each) { return each.kind == Collective::kJoin; });
  if (joins) {  // of all ranks; or nobody's, where some rank did something else under its name
    if (decision.status.ok()) decision.rows = {last_joined_};
    std::fill(joined_.begin(), joined_.end(), 0);
    joined_count_ = 0;
  }
  if (!decision.status.ok()) {
    decision.kind = Decision::Kind::kFail;
    decision.name = request.name;
    decision.cache_id = 0;
  }
  Forget(pending_.find(key));
  Ready(std::move(decision), bytes, urgent, now);
}

// What becomes of a request that all members have reported, or cannot report any more.
Decision Coordinator::Agree(Pending& pending, int64_t* bytes) {
  Decision decision;
  const std::vector<int> joined = JoinedAmong(pending);
  if (!joined.empty()) decision.status = CheckJoined(joined, pending.any());
  if (pending.id == 0) {
    std::vector<const Request*> requests;
    std::vector<int> ranks;
    for (size_t member = 0; member < pending.reported.size(); ++member) {
      if (!pending.reported[member]) continue;
      requests.push_back(&pending.requests[member]);
      ranks.push_back(pending.set->ranks[member]);
    }
    const Status valid = Validate(requests, ranks);
    if (!valid.ok()) decision.status = valid;
    decision.name = requests[0]->name;
    if (!decision.status.ok()) return decision;
    decision.rows = RowsOf(requests);
    decision.cache_id = Remember(*requests[0], decision.rows);
  } else if (decision.status.ok()) {
    const Record& record = *records_.at(pending.id);
    if (retired_.count(pending.id) == 0) {
      decision.cache_id = pending.id;
      recency_.splice(recency_.begin(), recency_, record.recency);
    } else {
      // The ranks have forgotten the id, or are about to.
      decision.name = record.request.name;
      decision.rows = record.rows;
    }
  }
  *bytes = pending.any().bytes();
  // An id that all know now, joined members got with a stand-in.
  if (!joined.empty() && !decision.name.empty()) decision.stand_in = pending.any();
  return decision;
}

void Coordinator::Ready(Decision decision, int64_t bytes, bool urgent, TimeNs now) {
  if (ready_.empty()) ready_since_ns_ = now;
  ready_.push_back(std::move(decision));
  ready_bytes_ += bytes;
  urgent_ = urgent_ || urgent;
}

void Coordinator::Forget(std::unordered_map<std::string, Pending>::iterator pending) {
  if (pending->second.fusable) {
    const auto count = fusable_.find(pending->second.any().process_set);
    if (--count->second == 0) fusable_.erase(count);
  }
  pending_.erase(pending);
}

// Whether nothing is pending that what is ready could share a batch with.
bool Coordinator::BurstIsComplete() const {
  if (fusable_.empty()) return true;
  return std::none_of(ready_.begin(), ready_.end(), [this](const Decision& decision) {
    return fusable_.count(decision.process_set) != 0;
  });
}

std::optional<Agreement> Coordinator::Decide(TimeNs now) {
  if (ready_.empty()) return std::nullopt;
  const bool hold = !urgent_ && ready_bytes_ < options_.fusion_bytes &&
                    now < After(ready_since_ns_, options_.hold_ns) && !BurstIsComplete();
  if (hold) return std::nullopt;
  Agreement agreement;
  agreement.sequence = ++sequence_;
  agreement.evicted = std::move(evicted_);
  agreement.decisions = std::move(ready_);
  for (uint64_t id : agreement.evicted) retired_[id] = sequence_;
  removed_now_ = std::exchange(removed_, {});
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
  for (const auto& [key, pending] : pending_) {
    const Request& request = pending.any();
    if (request.kind == Collective::kJoin) continue;  // it may take as long as it likes
    Waiting waiting;
    waiting.name = request.name;
    waiting.title = request.Title();
    waiting.since_ns = pending.since_ns;
    for (size_t member = 0; member < pending.reported.size(); ++member) {
      const int rank = pending.set->ranks[member];
      if (pending.reported[member]) {
        waiting.submitted.push_back(rank);
      } else if (!joined_[static_cast<size_t>(rank)]) {
        waiting.missing.push_back(rank);
      }
    }
    all.push_back(std::move(waiting));
  }
  std::sort(all.begin(), all.end(), [](const Waiting& a, const Waiting& b) {
    return std::tie(a.since_ns, a.title) < std::tie(b.since_ns, b.title);
  });
  return all;
}

// The request of one member of the record's process set.
Request Coordinator::RequestOf(const Record& record, int member) const {
  Request request = record.request;
  if (record.rows.empty()) return request;
  const size_t size = sets_.Find(request.process_set)->ranks.size();
  const size_t index = static_cast<size_t>(member);
  if (request.kind == Collective::kAlltoall) {
    const auto first = record.rows.begin() + static_cast<std::ptrdiff_t>(index * size);
    request.splits.assign(first, first + static_cast<std::ptrdiff_t>(size));
    request.tensors[0].shape[0] =
        std::accumulate(request.splits.begin(), request.splits.end(), int64_t{0});
    return request;
  }
  for (size_t tensor = 0; tensor < request.tensors.size(); ++tensor) {
    request.tensors[tensor].shape[0] = record.rows[tensor * size + index];
  }
  return request;
}

// Gives `request` an id, in place of the one that its name may have had; evicts the request
// that was agreed longest ago when the cache is full.
uint64_t Coordinator::Remember(const Request& request, const std::vector<int64_t>& rows) {
  if (options_.cache_capacity <= 0 || request.tensors.empty()) return 0;
  const auto older = ids_.find(Key(request));
  if (older != ids_.end()) {
    // All members have reported the name just now, so no report of the old id is on its way.
    recency_.erase(records_.at(older->second)->recency);
    records_.erase(older->second);
    ids_.erase(older);
  } else if (static_cast<int>(ids_.size()) >= options_.cache_capacity) {
    const uint64_t victim = recency_.back();
    recency_.pop_back();
    ids_.erase(Key(records_.at(victim)->request));
    evicted_.push_back(victim);
    // Announced with the next agreement; until then "retired at the sequence to come".
    retired_[victim] = sequence_ + 1;
  }
  const uint64_t id = next_id_++;
  recency_.push_front(id);
  records_[id] = std::make_unique<Record>(Record{id, request, rows, recency_.begin()});
  ids_[Key(request)] = id;
  return id;
}

void Coordinator::ForgetRetired() {
  for (auto retired = retired_.begin(); retired != retired_.end();) {
    const auto record = records_.find(retired->first);
    const Request& request = record->second->request;
    const auto pending = pending_.find(Key(request));
    const bool in_use = pending != pending_.end() && pending->second.id == retired->first;
    const std::vector<int>& members = sets_.Find(request.process_set)->ranks;
    // A rank that has joined reports nothing before it has applied all there is by then.
    const bool applied = std::all_of(members.begin(), members.end(), [&](int rank) {
      const size_t r = static_cast<size_t>(rank);
      return joined_[r] || applied_[r] >= retired->second;
    });
    if (retired->second <= sequence_ && applied && !in_use) {
      records_.erase(record);
      retired = retired_.erase(retired);
    } else {
      ++retired;
    }
  }
}

}  // namespace hororing
