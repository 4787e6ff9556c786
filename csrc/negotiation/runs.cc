// Coordinator, third part: what is reported and agreed upon by runs of ids, as the gradients of a
// step are that goes like the one before. Counting a run costs as much as counting one request.
// Everything out of the ordinary goes the way of single requests, which knows all cases: until
// nothing waits there any more, runs go that way, too.

#include "negotiation/coordinator.h"

namespace hororing {
namespace {

// Beyond them single requests cost as much.
constexpr size_t kMostRuns = 16;    // of a report
constexpr size_t kMostPieces = 64;  // that pend, or whose order is remembered

}  // namespace

// Where a rank has joined, that join waits.
bool Coordinator::MayGoByRuns() const {
  return waiting_.empty() && !queue_.tunes() && pending_runs_.size() < kMostPieces;
}

// Whether the ranks' report of these ids was counted so.
bool Coordinator::ReportRuns(const int* ranks, size_t count, const std::vector<uint64_t>& ids,
                             TimeNs now) {
  if (!MayGoByRuns() || !stretches_.Cut(ids, kMostRuns, &parts_)) return false;
  if (pending_runs_.empty()) stall_check_ns_ = After(now, stall_inspector_.interval_ns());
  for (const Stretches::Part& part : parts_) {
    const ProcessSet& set = *sets_.Find(part.process_set);
    members_.clear();
    for (size_t i = 0; i < count; ++i) {
      members_.push_back(static_cast<size_t>(set.IndexOf(ranks[i])));
    }
    complete_.clear();
    pending_runs_.Report(part.ids, set, members_, now, &complete_);
    if (!complete_.empty()) Unblock(set);
    for (const IdRun& run : complete_) {
      if (recent_runs_.size() >= kMostPieces) BringUpToDate();
      recent_runs_.Add(run);
      Decision decision;
      decision.process_set = part.process_set;
      decision.cache_id = run.first;
      decision.count = run.count;
      queue_.Push(std::move(decision));
    }
  }
  return true;
}

// What pends as runs pends as single requests from now on.
void Coordinator::Dissolve() {
  for (const PendingRuns::Piece& piece : pending_runs_.TakeAll()) {
    for (uint64_t id = piece.ids.first; id < piece.ids.end(); ++id) {
      for (size_t member = 0; member < piece.reported.size(); ++member) {
        if (!piece.reported[member]) continue;
        ReportCached(&piece.set->ranks[member], 1, id, piece.since_ns);
      }
    }
  }
}

// The order in which requests were agreed upon, where they were so by runs. Nothing is evicted
// before that is known.
void Coordinator::BringUpToDate() {
  for (const IdRun& run : recent_runs_.TakeAll()) {
    for (uint64_t id = run.first; id < run.end(); ++id) {
      const auto record = records_.find(id);
      if (record == records_.end()) continue;  // its set was removed
      recency_.splice(recency_.begin(), recency_, record->second->recency);
    }
  }
}

}  // namespace hororing
