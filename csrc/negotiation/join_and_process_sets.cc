// Coordinator: join and process sets.

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "negotiation/coordinator.h"
#include "negotiation/validate.h"

namespace hororing {
namespace {

// Decision::Details::rows for these ranks.
std::vector<int64_t> RowsFor(const std::vector<int>& ranks, const Splits& splits) {
  std::vector<int64_t> rows{std::accumulate(splits.rows.begin(), splits.rows.end(), int64_t{0})};
  const size_t members = splits.ranks.size();
  for (const int rank : ranks) {
    const auto found = std::lower_bound(splits.ranks.begin(), splits.ranks.end(), rank);
    if (found == splits.ranks.end() || *found != rank) continue;
    const size_t receiver = static_cast<size_t>(found - splits.ranks.begin());
    for (size_t sender = 0; sender < members; ++sender) {
      rows.push_back(splits.rows[sender * members + receiver]);
    }
  }
  return rows;
}

}  // namespace

// Adds or removes a process set. `rows`: see Decision::Details.
Status Coordinator::ChangeSets(const Request& request, std::vector<int64_t>* rows) {
  if (request.kind == Collective::kAddProcessSet) {
    const bool internal = request.scope() != SetScope::kPublic;
    const Status possible = sets_.Check(request.ranks, internal);
    if (!possible.ok()) return Status(possible.code(), request.Title() + ": " + possible.message());
    const int32_t id = sets_.NextId();
    sets_.Add(id, request.ranks, internal);
    *rows = {id};
    return Status::Ok();
  }
  const int32_t id = request.root;
  const bool there = id != kWorldSet && sets_.Find(id) != nullptr;
  if (there) RemoveSet(id);
  *rows = {there ? 1 : 0};
  return Status::Ok();
}

void Coordinator::RemoveSet(int32_t id) {
  const ProcessSet* set = sets_.Find(id);
  for (TensorState* tensor : PendingTensors()) {
    if (tensor->pending.set != set) continue;
    const Request& request = tensor->pending.any();
    Decision fail(Decision::Kind::kFail,
                  Status(Code::kMismatch, request.Title() + ": the process set was " +
                                              "removed before all of its ranks had made this call"),
                  id, request.name);
    ClearPending(*tensor);
    Push(std::move(fail));
  }
  const auto erased = [&](uint64_t each) {
    const Record& record = records_.at(each);
    if (record.request.process_set != id) return false;
    Erase(record);
    return true;
  };
  by_age_.remove_if(erased);
  for (auto each = retired_.begin(); each != retired_.end();) {
    each = erased(each->first) ? retired_.erase(each) : std::next(each);
  }
  evicted_.erase(std::remove_if(evicted_.begin(), evicted_.end(),
                                [&](uint64_t each) { return records_.count(each) == 0; }),
                 evicted_.end());
  sets_.Remove(id);
  removed_.insert(id);
}

// From now on, the rank contributes neutral elements to the other ranks' reductions.
void Coordinator::Join(int rank) {
  char& joined = joined_[static_cast<size_t>(rank)];
  if (joined) return;
  joined = 1;
  ++joined_count_;
  last_joined_ = rank;
  std::vector<TensorState*> complete;
  for (TensorState* tensor : PendingTensors()) {
    if (IsComplete(tensor->pending)) complete.push_back(tensor);
  }
  std::sort(complete.begin(), complete.end(),
            [](const TensorState* a, const TensorState* b) { return a->key < b->key; });
  for (TensorState* tensor : complete) Decide(*tensor);
}

bool Coordinator::MissingRanksJoined(const Pending& pending) const {
  if (pending.any().kind == Collective::kJoin) return false;
  return pending.reported.count() + JoinedAmong(pending).size() == pending.reported.size();
}

// Returns the members, by their ranks in the job, that have joined and have not reported.
std::vector<int> Coordinator::JoinedAmong(const Pending& pending) const {
  std::vector<int> joined;
  for (size_t member = 0; member < pending.reported.size(); ++member) {
    const int rank = pending.set->ranks[member];
    if (!pending.reported.Has(member) && joined_[static_cast<size_t>(rank)]) joined.push_back(rank);
  }
  return joined;
}

Status Coordinator::CheckJoined(const std::vector<int>& joined, const Request& request) {
  if (request.kind == Collective::kBarrier) return Status::Ok();
  const std::string title = request.Title() + ": ";
  const std::string who = RanksText(joined) + (joined.size() == 1 ? " has" : " have") + " joined";
  if (request.kind != Collective::kAllreduce) {
    return Status(Code::kMismatch, title + Name(request.kind) + " is not supported with join: " +
                                       who + " and can contribute to allreduce only; call it " +
                                       "before the first rank joins, or after join has returned");
  }
  const bool scaled = request.prescale != 1.0;
  if (scaled && (request.op == ReduceOp::kMin || request.op == ReduceOp::kMax ||
                 request.op == ReduceOp::kProduct)) {
    return Status(Code::kMismatch, title + "op=" + Name(request.op) +
                                       " with a prescale_factor is not supported with join: " +
                                       who + ", and scaling would change the neutral element. " +
                                       "Scale the tensor before the call");
  }
  return Status::Ok();
}

bool Coordinator::IsForAll(const Agreement& agreement) const {
  return sets_.only_world() && std::none_of(agreement.decisions.begin(), agreement.decisions.end(),
                                            [](const Decision& decision) {
                                              return decision.details().splits != nullptr;
                                            });
}

std::optional<Agreement> Coordinator::PartFor(const std::vector<int>& ranks,
                                              const Agreement& agreement) const {
  // A removed set concerns every rank that may have been in it; a new set may have its id by now.
  const auto concerns = [&](int32_t process_set) {
    const ProcessSet* set = sets_.Find(process_set);
    return set == nullptr || removed_now_.count(process_set) != 0 ||
           std::any_of(ranks.begin(), ranks.end(),
                       [set](int rank) { return set->IndexOf(rank) >= 0; });
  };
  Agreement part;
  part.sequence = agreement.sequence;
  for (const Decision& decision : agreement.decisions) {
    if (!concerns(decision.process_set)) continue;
    part.decisions.push_back(decision);
    const Splits* const splits = decision.details().splits.get();
    if (splits != nullptr) part.decisions.back().set_details().rows = RowsFor(ranks, *splits);
  }
  for (uint64_t id : agreement.evicted) {
    if (concerns(records_.at(id).request.process_set)) part.evicted.push_back(id);
  }
  if (part.decisions.empty() && part.evicted.empty()) return std::nullopt;
  return part;
}

}  // namespace hororing
