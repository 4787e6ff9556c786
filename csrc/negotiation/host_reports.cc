#include "negotiation/host_reports.h"

#include <algorithm>
#include <map>
#include <utility>

#include "negotiation/codec.h"

namespace hororing {
namespace {

// What is remembered of tensors that come no more, at most; then everything is learned anew.
constexpr size_t kMostTensors = 1 << 13;

}  // namespace

HostReports::HostReports(std::vector<int> ranks, TimeNs hold_ns)
    : ranks_(std::move(ranks)), hold_ns_(hold_ns), held_(ranks_.size()) {}

void HostReports::Receive(int rank, const Report& report, TimeNs now) {
  const auto found = std::find(ranks_.begin(), ranks_.end(), rank);
  const size_t place = static_cast<size_t>(found - ranks_.begin());
  Held& held = held_[place];
  if (held_count_ == 0) since_ns_ = now;
  if (!held.any) {
    held.any = true;
    ++held_count_;
    // The older one of those that are combined: no id may be forgotten that is named below.
    held.report.applied = report.applied;
  }
  for (const uint64_t id : report.cached) {
    held.report.cached.push_back(id);
    Count(cached_[id], place, nullptr);
  }
  for (const Request& request : report.fresh) {
    held.report.fresh.push_back(request);
    std::string key = Key(request), &latest = latest_[request.process_set];
    const auto before = fresh_.find(latest);
    const Tensor* const like = before == fresh_.end() ? nullptr : &before->second;
    Count(fresh_[key], place, like);
    latest = std::move(key);
  }
  if (report.leaving) {
    held.report.leaving = urgent_ = true;
    held.report.reason = report.reason;
  }
}

// `like`: the tensor that a new one is expected of the same ranks as; null: of all.
void HostReports::Count(Tensor& tensor, size_t place, const Tensor* like) {
  if (tensor.reported.empty()) {
    tensor.reported.assign(ranks_.size(), 0);
    tensor.usual = like != nullptr ? like->reported : std::vector<char>(ranks_.size(), 1);
    tensor.missing = static_cast<size_t>(std::count(tensor.usual.begin(), tensor.usual.end(), 1));
  } else if (tensor.reported[place]) {
    // It comes again, so all have reported it that will: they are the usual ones.
    tensor.usual = std::exchange(tensor.reported, std::vector<char>(ranks_.size(), 0));
    tensor.missing = static_cast<size_t>(std::count(tensor.usual.begin(), tensor.usual.end(), 1));
  }
  tensor.reported[place] = 1;
  if (tensor.usual[place] && --tensor.missing == 0 && std::exchange(tensor.held, false)) {
    --waiting_for_;
  }
  if (tensor.missing == 0 || tensor.held) return;
  tensor.held = true;
  incomplete_.push_back(&tensor);
  ++waiting_for_;
}

bool HostReports::MoreIsExpected(TimeNs now) const {
  if (waiting_for_ == 0 || urgent_ || now >= After(since_ns_, hold_ns_)) return false;
  return held_count_ < ranks_.size();
}

std::optional<std::string> HostReports::Take(TimeNs now) {
  if (held_count_ == 0 || MoreIsExpected(now)) return std::nullopt;
  std::map<std::string, std::vector<int>> alike;
  for (size_t place = 0; place < held_.size(); ++place) {
    Held held = std::exchange(held_[place], {});
    if (!held.any) continue;
    alike[Encode(held.report)].push_back(ranks_[place]);
  }
  for (Tensor* tensor : incomplete_) tensor->held = false;
  incomplete_.clear();
  waiting_for_ = 0;
  held_count_ = 0;
  urgent_ = false;
  if (cached_.size() + fresh_.size() > kMostTensors) {
    cached_.clear();
    fresh_.clear();
    latest_.clear();
  }
  return EncodeCombined(alike);
}

TimeNs HostReports::NextDeadline() const {
  return held_count_ > 0 ? After(since_ns_, hold_ns_) : kForever;
}

}  // namespace hororing
