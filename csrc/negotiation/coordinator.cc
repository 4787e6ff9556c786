#include "negotiation/coordinator.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "negotiation/validate.h"

namespace hororing {
namespace {

// Stands for the sequence of an agreement that is yet to be made.
constexpr uint64_t kNotAnnounced = std::numeric_limits<uint64_t>::max();

// Fills in the rows of gathered tensors, or the splits.
void SetRows(const std::vector<const Request*>& requests, const std::vector<int>& ranks,
             Decision::Details* details) {
  if (requests[0]->kind == Collective::kAllgather) {
    for (size_t tensor = 0; tensor < requests[0]->tensors.size(); ++tensor) {
      for (const Request* request : requests) {
        details->rows.push_back(request->tensors[tensor].shape[0]);
      }
    }
  } else if (requests[0]->kind == Collective::kAlltoall) {
    auto splits = std::make_shared<Splits>();
    splits->ranks = ranks;
    for (const Request* request : requests) {
      splits->rows.insert(splits->rows.end(), request->splits.begin(), request->splits.end());
    }
    details->splits = std::move(splits);
  }
}

// How much of the cache's capacity a request takes: memory, not names, is limited.
size_t CacheUse(const Request& request, const Decision::Details& rows) {
  constexpr size_t kRowsPerTensor = 32;  // take as much memory as a tensor
  const size_t numbers = rows.splits != nullptr ? rows.splits->rows.size() : rows.rows.size();
  return request.tensors.size() + numbers / kRowsPerTensor;
}

}  // namespace

Coordinator::Coordinator(const Options& options)
    : options_(options),
      stall_inspector_(options.stall),
      sets_(options.size),
      joined_(static_cast<size_t>(options.size), 0),
      blocked_(static_cast<size_t>(options.size)),
      applied_(static_cast<size_t>(options.size), 0) {}

void Coordinator::Receive(const int* ranks, size_t count, const Report& report, TimeNs now) {
  if (stopped_) return;
  for (size_t i = 0; i < count; ++i) {
    const size_t rank = static_cast<size_t>(ranks[i]);
    applied_[rank] = report.applied;
    blocked_[rank].OnReport(report.blocked, now);
  }
  answered_ = nullptr;
  if (!retired_.empty()) ForgetRetired();
  for (size_t i = 0; i < report.cached.size(); ++i) {
    const double weight = i < report.weights.size() ? report.weights[i] : 0;
    ReportCached(ranks, count, report.cached[i], weight, now);
  }
  for (const Request& request : report.fresh) {
    for (size_t i = 0; i < count; ++i) ReportFresh(ranks[i], request, now);
  }
  if (report.leaving) {
    const int rank = ranks[0];
    std::string text = "rank " + std::to_string(rank) + " has shut down";
    if (!report.reason.empty()) text += " (" + report.reason + ")";
    const bool failed = report.reason.find(kWhileHandling) != std::string::npos;
    if (!failed) {
      text += ". All ranks must make the same calls: check whether rank " + std::to_string(rank) +
              " had fewer batches.";
    }
    Push({Decision::Kind::kLeave, Status(failed ? Code::kPeerLost : Code::kShutDown, text, rank)});
    stopped_ = true;
  }
}

void Coordinator::SwitchTimeline(bool on, bool mark_cycles) {
  if (stopped_) return;
  Decision decision;
  decision.kind = Decision::Kind::kTimeline;
  decision.set_details().timeline_on = on;
  decision.set_details().timeline_cycles = mark_cycles;
  Push(std::move(decision));
}

// A missing record belongs to a removed process set, whose requests have failed.
void Coordinator::ReportCached(const int* ranks, size_t count, uint64_t id, double weight,
                               TimeNs now) {
  const auto found = records_.find(id);
  if (found == records_.end()) return;
  Record& record = found->second;
  Pending& pending = PendingFor(record.request, *record.tensor, now);
  if (pending.reported.count() == 0) {
    pending.id = id;
    pending.record = &record;
  } else if (pending.id != id) {
    Expand(pending);
  }
  for (size_t i = 0; i < count; ++i) {
    const size_t member = static_cast<size_t>(pending.set->IndexOf(ranks[i]));
    if (pending.id == 0) pending.requests[member] = RequestOf(record, static_cast<int>(member));
    if (record.request.weight) pending.weights[member] = weight;
    pending.reported.Add(member);
  }
  if (IsComplete(pending)) Decide(*record.tensor);
}

void Coordinator::ReportFresh(int rank, const Request& request, TimeNs now) {
  const ProcessSet* set = sets_.Find(request.process_set);
  if (set == nullptr || set->IndexOf(rank) < 0) return;  // removed meanwhile, as above
  if (request.kind == Collective::kJoin) Join(rank);
  TensorState& tensor = StateOf(request);
  Pending& pending = PendingFor(request, tensor, now);
  Expand(pending);
  const size_t member = static_cast<size_t>(pending.set->IndexOf(rank));
  pending.requests[member] = request;
  if (request.weight) pending.weights[member] = *request.weight;
  pending.reported.Add(member);
  if (IsComplete(pending)) Decide(tensor);
}

Coordinator::TensorState& Coordinator::StateOf(const Request& request) {
  const std::string key = Key(request);
  std::unique_ptr<TensorState>& tensor = tensors_[key];
  if (tensor == nullptr) {
    tensor = std::make_unique<TensorState>();
    tensor->key = key;
  }
  return *tensor;
}

// Returns the pending request of a tensor, to which the caller is about to add a report.
Coordinator::Pending& Coordinator::PendingFor(const Request& request, TensorState& tensor,
                                              TimeNs now) {
  if (waiting_ == 0) stall_check_ns_ = After(now, stall_inspector_.interval_ns);
  Pending& pending = tensor.pending;
  if (!pending.waits) {
    pending.waits = true;
    ++waiting_;
    if (request.of_members_alone()) {
      pending.new_set.ranks.assign(request.ranks.begin(), request.ranks.end());
      pending.set = &pending.new_set;
    } else if (pending.set == nullptr) {
      pending.set = sets_.Find(request.process_set);
    }
    pending.id = 0;
    pending.record = nullptr;
    pending.reported.Clear(pending.set->ranks.size());
    pending.requests.clear();
    pending.weights.clear();
    pending.since_ns = now;
  }
  if (request.weight) pending.weights.resize(pending.reported.size());
  return pending;
}

// Replaces "all reports so far had one cache id" by one request per member.
void Coordinator::Expand(Pending& pending) {
  if (pending.requests.empty()) pending.requests.resize(pending.reported.size());
  if (pending.id == 0) return;
  for (size_t member = 0; member < pending.reported.size(); ++member) {
    if (!pending.reported.Has(member)) continue;
    pending.requests[member] = RequestOf(*pending.record, static_cast<int>(member));
  }
  pending.id = 0;
  pending.record = nullptr;
}

void Coordinator::Decide(TensorState& tensor) {
  Pending& pending = tensor.pending;
  Decision decision;
  Status status = Agree(tensor, &decision);
  const Request& request = pending.any();
  decision.process_set = request.process_set;
  if (status.ok() && (request.kind == Collective::kAddProcessSet ||
                      request.kind == Collective::kRemoveProcessSet)) {
    status = ChangeSets(request, &decision.set_details().rows);
  }
  const bool joins =
      std::any_of(pending.requests.begin(), pending.requests.end(),
                  [](const Request& each) { return each.kind == Collective::kJoin; });
  if (joins) {  // all ranks have joined, or the join fails for all: a rank used its name otherwise
    if (status.ok()) decision.set_details().rows = {last_joined_};
    std::fill(joined_.begin(), joined_.end(), 0);
    joined_count_ = 0;
  }
  if (!status.ok()) {
    decision = {Decision::Kind::kFail, std::move(status), request.process_set, request.name};
  }
  for (const Request::Tensor& each : request.tensors) {
    ready_bytes_ += Elements(each.shape) * static_cast<int64_t>(ElementSize(each.dtype));
  }
  ClearPending(tensor);
  Push(std::move(decision));
}

// Fills in the decision on a request that all members have reported, except for joined ones.
Status Coordinator::Agree(TensorState& tensor, Decision* decision) {
  Pending& pending = tensor.pending;
  std::vector<int> joined;
  if (joined_count_ > 0) joined = JoinedAmong(pending);
  Status possible = joined.empty() ? Status() : CheckJoined(joined, pending.any());
  if (!pending.weights.empty() && possible.ok()) {
    std::vector<double>& weights = decision->set_details().weights = pending.weights;
    possible = Weigh(pending.any(), pending.set->ranks, &weights);
  }
  if (pending.id == 0) {
    std::vector<const Request*> requests;
    std::vector<int> ranks;
    for (size_t member = 0; member < pending.reported.size(); ++member) {
      if (!pending.reported.Has(member)) continue;
      requests.push_back(&pending.requests[member]);
      ranks.push_back(pending.set->ranks[member]);
    }
    HORORING_RETURN_IF_ERROR(Validate(requests, ranks));
    HORORING_RETURN_IF_ERROR(possible);
    Decision::Details& details = decision->set_details();
    details.name = requests[0]->name;
    SetRows(requests, ranks, &details);
    decision->cache_id = Remember(tensor, *requests[0], details);
    if (requests[0]->of_members_alone()) details.neutral = *requests[0];
  } else {
    HORORING_RETURN_IF_ERROR(possible);
    Record& record = *pending.record;
    if (!record.retired) {
      decision->cache_id = pending.id;
      record.used = true;
      return Status::Ok();  // joined members know the request by its id
    }
    // The ranks have forgotten the id, or are about to.
    decision->set_details().name = record.request.name;
    decision->set_details().rows = record.rows;
    decision->set_details().splits = record.splits;
  }
  if (!joined.empty()) decision->set_details().neutral = pending.any();
  return Status::Ok();
}

// The request is decided. Its members are not blocked: a later report of that is of another one.
void Coordinator::ClearPending(TensorState& tensor) {
  const ProcessSet* const set = tensor.pending.set;
  if (std::exchange(answered_, set) != set) {
    for (const int rank : set->ranks) blocked_[static_cast<size_t>(rank)] = {};
  }
  --waiting_;
  tensor.pending.waits = false;
  if (tensor.records == 0) tensors_.erase(tensors_.find(tensor.key));
}

// Consecutive ids become one decision.
void Coordinator::Push(Decision decision) {
  if (ready_.empty() || !ready_.back().Extend(decision)) ready_.push_back(std::move(decision));
}

std::optional<Agreement> Coordinator::TakeAgreement() {
  if (ready_.empty()) return std::nullopt;
  Agreement agreement;
  agreement.sequence = ++sequence_;
  ready_bytes_ = 0;
  agreement.decisions = std::exchange(ready_, {});
  agreement.evicted = std::exchange(evicted_, {});
  removed_now_ = std::exchange(removed_, {});
  for (uint64_t id : agreement.evicted) retired_[id] = sequence_;
  return agreement;
}

TimeNs Coordinator::NextDeadline() const {
  if (stopped_) return kForever;
  if (!ready_.empty()) return 0;
  return waiting_ > 0 ? stall_check_ns_ : kForever;
}

StallInspector::Finding Coordinator::InspectStalls(TimeNs now) {
  if (stopped_ || waiting_ == 0 || now < stall_check_ns_) return {};
  stall_check_ns_ = After(now, stall_inspector_.interval_ns);
  std::vector<char> stuck = joined_, soon = joined_;
  for (size_t rank = 0; ready_.empty() && rank < stuck.size(); ++rank) {
    const TimeNs blocked_ns = blocked_[rank].Elapsed(now);
    if (blocked_ns >= options_.stall.deadlock_ns) stuck[rank] = 1;
    if (blocked_ns >= options_.stall.deadlock_ns - options_.stall.warning_ns) soon[rank] = 1;
  }
  StallInspector::Finding finding =
      stall_inspector_.Inspect(AllWaiting(/*joins=*/true), stuck, soon, now);
  if (!finding.abort.ok()) {
    Push({Decision::Kind::kAbort, finding.abort});
    stopped_ = true;
  }
  return finding;
}

// In no particular order.
std::vector<Coordinator::TensorState*> Coordinator::PendingTensors() const {
  std::vector<TensorState*> pending;
  for (const auto& [key, tensor] : tensors_) {
    if (tensor->pending.waits) pending.push_back(tensor.get());
  }
  return pending;
}

std::vector<Waiting> Coordinator::AllWaiting(bool joins) {
  std::vector<Waiting> all;
  for (const TensorState* tensor : PendingTensors()) {
    const Pending& pending = tensor->pending;
    const Request& request = pending.any();
    Waiting waiting;
    waiting.never_stalls = request.kind == Collective::kJoin;
    if (waiting.never_stalls && !joins) continue;
    waiting.name = request.name;
    waiting.title = request.Title();
    waiting.since_ns = pending.since_ns;
    for (size_t member = 0; member < pending.reported.size(); ++member) {
      const int rank = pending.set->ranks[member];
      if (pending.reported.Has(member)) {
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

// Returns the request of one member of the record's process set.
Request Coordinator::RequestOf(const Record& record, int member) const {
  Request request = record.request;
  const size_t size = sets_.Find(request.process_set)->ranks.size();
  const size_t index = static_cast<size_t>(member);
  if (record.splits != nullptr) {
    const auto first = record.splits->rows.begin() + static_cast<std::ptrdiff_t>(index * size);
    request.splits.assign(first, first + static_cast<std::ptrdiff_t>(size));
    request.tensors[0].shape[0] =
        std::accumulate(request.splits.begin(), request.splits.end(), int64_t{0});
    return request;
  }
  for (size_t tensor = 0; tensor < record.rows.size() / size; ++tensor) {
    request.tensors[tensor].shape[0] = record.rows[tensor * size + index];
  }
  return request;
}

// Gives `request` a cache id, which replaces its name's previous one.
uint64_t Coordinator::Remember(TensorState& tensor, const Request& request,
                               const Decision::Details& details) {
  if (request.tensors.empty()) return 0;
  const size_t capacity = static_cast<size_t>(std::max(options_.cache_capacity, 0));
  const size_t weighs = CacheUse(request, details);
  if (tensor.id != 0) {
    // All members have just reported the name, so no report of the old id is in transit.
    Record& older = records_.at(tensor.id);
    if (weighs > capacity) {
      Retire(older);
    } else {
      by_age_.erase(older.age);
      Erase(older);
    }
  }
  if (weighs > capacity) return 0;
  while (cached_ + weighs > capacity) Evict();
  cached_ += weighs;
  const uint64_t id = next_id_++;
  by_age_.push_front(id);
  records_[id] = {id,     &tensor, false,        false,         by_age_.begin(),
                  weighs, request, details.rows, details.splits};
  tensor.id = id;
  ++tensor.records;
  return id;
}

// Evicts the oldest record that was not used since the last check ("second chance").
void Coordinator::Evict() {
  for (;;) {
    Record& oldest = records_.at(by_age_.back());
    if (!std::exchange(oldest.used, false)) break;
    by_age_.splice(by_age_.begin(), by_age_, oldest.age);
  }
  Retire(records_.at(by_age_.back()));
}

// The ranks are yet to hear that they must forget it.
void Coordinator::Retire(Record& record) {
  by_age_.erase(record.age);
  cached_ -= record.weighs;
  record.tensor->id = 0;
  record.retired = true;
  evicted_.push_back(record.id);
  retired_[record.id] = kNotAnnounced;
}

void Coordinator::Erase(const Record& record) {
  TensorState& tensor = *record.tensor;
  if (tensor.id == record.id) tensor.id = 0;
  if (!record.retired) cached_ -= record.weighs;
  if (--tensor.records == 0 && !tensor.pending.waits) tensors_.erase(tensors_.find(tensor.key));
  records_.erase(record.id);
}

// Does its work only once in a while, so that its cost per report does not grow with the evictions.
void Coordinator::ForgetRetired() {
  if (++reports_since_forgetting_ < retired_.size()) return;
  reports_since_forgetting_ = 0;
  for (auto retired = retired_.begin(); retired != retired_.end();) {
    const Record& record = records_.at(retired->first);
    const Request& request = record.request;
    const TensorState& tensor = *record.tensor;
    const bool in_use = tensor.pending.waits && tensor.pending.id == retired->first;
    const std::vector<int>& members = sets_.Find(request.process_set)->ranks;
    // A joined rank applies all agreements so far before it reports anything.
    const bool applied = std::all_of(members.begin(), members.end(), [&](int rank) {
      const size_t r = static_cast<size_t>(rank);
      return joined_[r] || applied_[r] >= retired->second;
    });
    if (retired->second <= sequence_ && applied && !in_use) {
      Erase(record);
      retired = retired_.erase(retired);
    } else {
      ++retired;
    }
  }
}

}  // namespace hororing
