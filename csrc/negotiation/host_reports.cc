#include "negotiation/host_reports.h"

#include <algorithm>
#include <map>
#include <utility>

#include "negotiation/codec.h"

namespace hororing {
// Limits counts that never complete: some ranks report an id, others the request in full.
constexpr size_t kMaxCounts = 1 << 16;

HostReports::HostReports(std::vector<int> ranks, TimeNs longest_ns)
    : ranks_(std::move(ranks)), longest_ns_(longest_ns), held_(ranks_.size()) {}

void HostReports::Receive(int rank, const Report& report, bool concerns_all, TimeNs now) {
  const auto index = std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
  std::optional<Report>& held = held_[static_cast<size_t>(index)];
  if (held_count_ == 0) since_ns_ = now;
  if (!held) {
    held.emplace();
    ++held_count_;
    // Keep the smaller sequence: the coordinator must not forget ids in this report.
    held->applied = report.applied;
  }
  if (!report.weights.empty()) {
    held->weights.resize(held->cached.size());
    held->weights.insert(held->weights.end(), report.weights.begin(), report.weights.end());
  }
  held->cached.insert(held->cached.end(), report.cached.begin(), report.cached.end());
  held->fresh.insert(held->fresh.end(), report.fresh.begin(), report.fresh.end());
  for (const uint64_t id : report.cached) Count(cached_, id);
  for (const Request& request : report.fresh) {
    Count(fresh_, Key(request));
    if (request.kind == Collective::kJoin) join_ = Key(request);
  }
  held->blocked = report.blocked;
  if (report.leaving) {
    held->leaving = true;
    held->reason = report.reason;
  }
  send_now_ = send_now_ || !concerns_all || report.leaving || !join_.empty();
}

template <typename Id>
void HostReports::Count(std::unordered_map<Id, size_t>& requests, const Id& id) {
  if (++requests[id] < ranks_.size()) return;
  requests.erase(id);
  send_now_ = true;
}

void HostReports::Decided(const Agreement& agreement) {
  if (cached_.empty() && fresh_.empty() && join_.empty()) return;
  for (const Decision& decision : agreement.decisions) {
    for (uint64_t i = 0; i < decision.count; ++i) cached_.erase(decision.cache_id + i);
    const std::string key = Key(decision.process_set, decision.details().name);
    fresh_.erase(key);
    if (key == join_) join_.clear();
  }
}

std::optional<std::string> HostReports::Take(TimeNs now) {
  const bool all = held_count_ == ranks_.size();
  if (held_count_ == 0 || (!send_now_ && !all && now < NextDeadline())) return std::nullopt;
  std::map<std::string, std::vector<int>> alike;
  for (size_t index = 0; index < held_.size(); ++index) {
    if (held_[index]) alike[Encode(*held_[index])].push_back(ranks_[index]);
    held_[index].reset();
  }
  held_count_ = 0;
  send_now_ = false;
  if (cached_.size() > kMaxCounts) cached_.clear();
  return EncodeCombined(alike);
}

}  // namespace hororing
