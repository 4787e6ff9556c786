#include "negotiation/stall_inspector.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/text.h"
#include "negotiation/validate.h"

namespace hororing {
namespace {

constexpr size_t kNamesPerGroup = 6;

std::string Describe(const std::vector<const Waiting*>& stalled) {
  // Requests that wait for the same ranks share a line.
  std::map<std::pair<std::vector<int>, std::vector<int>>, std::vector<const Waiting*>> groups;
  for (const Waiting* request : stalled) {
    groups[{request->missing, request->submitted}].push_back(request);
  }
  std::string text;
  for (const auto& [ranks, requests] : groups) {
    if (!text.empty()) text += "; ";
    text += Listed(requests, [](const Waiting* each) { return each->title; }, kNamesPerGroup);
    text += ": submitted by " + RanksText(ranks.second) + ", missing " + RanksText(ranks.first);
  }
  return text;
}

// The requests all of whose ranks are stuck. One that waits for a rank that is not stuck is not.
std::vector<const Waiting*> Deadlocked(const std::vector<Waiting>& waiting,
                                       std::vector<char> stuck) {
  std::vector<const Waiting*> left;
  for (bool changed = true; changed;) {
    changed = false;
    left.clear();
    for (const Waiting& request : waiting) {
      if (request.never_stalls) continue;
      std::vector<int> ranks = request.submitted;
      ranks.insert(ranks.end(), request.missing.begin(), request.missing.end());
      const auto is_stuck = [&](int rank) { return stuck[static_cast<size_t>(rank)] != 0; };
      if (std::all_of(ranks.begin(), ranks.end(), is_stuck)) {
        left.push_back(&request);
        continue;
      }
      for (const int rank : ranks) {
        changed = std::exchange(stuck[static_cast<size_t>(rank)], 0) != 0 || changed;
      }
    }
  }
  return left;
}

}  // namespace

StallInspector::StallInspector(const Options& options)
    : interval_ns(std::clamp<TimeNs>(
          std::min({options.warning_ns, options.shutdown_ns, options.deadlock_ns}) / 4,
          10 * kMillisecond, kSecond / 2)),
      options_(options) {}

StallInspector::Finding StallInspector::Inspect(const std::vector<Waiting>& waiting,
                                                const std::vector<char>& stuck,
                                                const std::vector<char>& soon, TimeNs now) {
  Finding finding;
  std::unordered_map<std::string, Known> still_waiting;
  std::vector<const Waiting*> to_warn, to_abort, younger;
  const auto deadlocked = Deadlocked(waiting, stuck), soon_said = Deadlocked(waiting, soon);
  TimeNs longest = 0;
  for (const Waiting& request : waiting) {
    const TimeNs age = now - request.since_ns;
    for (const int rank : request.missing) {
      TimeNs& since = finding.missing.try_emplace(rank, request.since_ns).first->second;
      since = std::min(since, request.since_ns);
    }
    if (request.never_stalls) continue;
    const auto known = known_.find(request.title);
    TimeNs next = known != known_.end() && known->second.since_ns == request.since_ns
                      ? known->second.next_warning_ns
                      : After(request.since_ns, options_.warning_ns);
    if (now >= next && std::count(soon_said.begin(), soon_said.end(), &request) == 0) {
      to_warn.push_back(&request);
      longest = std::max(longest, age);
      next = After(request.since_ns, age > kForever / 2 ? kForever : 2 * age);
    }
    still_waiting[request.title] = {request.since_ns, next};
    (age >= options_.shutdown_ns ? to_abort : younger).push_back(&request);
  }
  known_ = std::move(still_waiting);
  if (!to_abort.empty()) {
    finding.abort = Status(
        Code::kStalled,
        "stalled for more than " + Seconds(options_.shutdown_ns) + ": " + Describe(to_abort) +
            // Often what the missing ranks called instead.
            (younger.empty() ? "" : "; also waiting: " + Describe(younger)) +
            ". Every rank must submit every tensor; a rank may have taken another branch, have "
            "fewer batches, or be stuck outside the library.",
        to_abort.front()->missing.front());
  } else if (!deadlocked.empty()) {
    finding.abort = Status(
        Code::kStalled,
        "deadlock: for " + Seconds(options_.deadlock_ns) +
            " each of these ranks has waited for another one: " + Describe(deadlocked) +
            ". A rank may have fewer batches, or have taken another branch (HORORING_DEADLOCK_S "
            "sets the time; 0: such ranks wait on)",
        deadlocked.front()->missing.front());
  } else if (!to_warn.empty()) {
    finding.warning = "waited up to " + Seconds(longest) + " for " + Describe(to_warn) +
                      ". A rank may have taken another branch, have fewer batches, or be busy.";
    std::set<int> missing;
    for (const Waiting* request : to_warn) {
      missing.insert(request->missing.begin(), request->missing.end());
    }
    for (const Waiting& request : waiting) {
      for (const int rank : request.missing) {
        if (!request.never_stalls && missing.count(rank) != 0) {
          finding.expected.try_emplace(rank, request.title);
        }
      }
    }
  }
  return finding;
}

std::string StallInspector::StatusText(const std::map<int, std::string>& expected,
                                       const std::map<int, std::string>& said,
                                       const std::function<std::string(int)>& host_of) {
  std::string text;
  size_t left = expected.size();
  for (const auto& [rank, title] : expected) {
    const auto found = said.find(rank);
    if (expected.size() - left == kMaxAsked) break;
    --left;
    text += "\nrank " + std::to_string(rank) + " on host " + host_of(rank) + " has yet to submit " +
            title;
    text += found != said.end()
                ? ": " + found->second
                : " and does not answer: its process is stopped, its host is unreachable, or it "
                  "is in another batch";
  }
  if (left > 0) text += "\n" + std::to_string(left) + " more ranks are missing";
  return text;
}

}  // namespace hororing
