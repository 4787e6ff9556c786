// A training job on a clock that is a number, over a network that is a formula: the real
// coordinator, and ranks that submit, cache and forget as the engine's do.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "negotiation/coordinator.h"
#include "negotiation/planned_reports.h"
#include "schedule/cost_model.h"

namespace hororing_test {

using namespace hororing;

using Names = std::vector<std::string>;

inline Request Allreduce(const std::string& name, int64_t bytes, int32_t process_set = kWorldSet) {
  Request request;
  request.name = name;
  request.process_set = process_set;
  request.tensors = {{DataType::kUint8, {bytes}}};
  return request;
}

inline Report Fresh(const Request& request) {
  Report report;
  report.fresh = {request};
  return report;
}

struct Submission {
  TimeNs at = 0;  // from the begin of the step, or from the end of `after`
  std::string name;
  int64_t bytes = 1000;
  std::string after{};  // a tensor that the caller waits for before it submits this one
  int32_t process_set = kWorldSet;
};

// Ranks, coordinator and network. Batches run one after another; nothing is received meanwhile,
// as in the loop.
class SimulatedWorld {
 public:
  SimulatedWorld(const Coordinator::Options& options, std::function<double(int64_t)> network)
      : cost(std::move(network)),
        ranks(options.size),
        members_(static_cast<size_t>(options.size)),
        coordinator(options) {}

  // One step: all ranks submit the same, rank r `skew` * r later. Returns when the last batch
  // was done, from the begin of the step.
  TimeNs Play(std::vector<Submission> waiting, TimeNs skew = 0) {
    batches.clear();
    reports.assign(members_.size(), 0);
    const TimeNs begin = now;
    std::map<std::string, TimeNs> done;
    std::map<std::string, int> reported;  // by how many ranks
    const size_t all = waiting.size();
    const TimeNs patience = now + 3600 * kSecond;
    while (done.size() < all && now < patience) {
      TimeNs next = kForever;
      for (const Submission& each : waiting) {
        TimeNs at = begin + each.at;
        if (!each.after.empty()) {
          if (done.count(each.after) == 0) continue;
          at = done[each.after] + each.at;
        }
        int& told = reported[each.name];
        for (; told < members(each.process_set) && at + skew * told <= now; ++told) {
          Gather(each, told, at + skew * told);
        }
        if (told < members(each.process_set)) next = std::min(next, at + skew * told);
      }
      for (int rank = 0; rank < ranks; ++rank) next = std::min(next, Tell(rank));
      std::vector<Agreement> agreed;
      while (auto agreement = coordinator.Decide(now)) agreed.push_back(std::move(*agreement));
      for (const Agreement& agreement : agreed) Run(agreement, waiting, &done);
      if (agreed.empty()) now = std::min(next, coordinator.NextDeadline());
    }
    CHECK(done.size() == all);
    return now - begin;
  }

  // Steps that follow one another as a training loop's do.
  TimeNs Play(int steps, const std::vector<Submission>& submissions) {
    TimeNs last = 0;
    for (int i = 0; i < steps; ++i) {
      last = Play(submissions);
      now += kMillisecond;
    }
    return last;
  }

  std::vector<Names> batches;     // of the latest step, as they were agreed
  std::vector<int> reports;       // of the latest step, by rank
  bool buckets_together = false;  // ranks report what the plan says together; else each by itself
  std::function<double(int64_t)> cost;
  TimeNs now = kSecond;
  TimeNs hold = -1, tried = -1;  // the latest that was decided; with it the latest tensor went
  int ranks;                     // that take part: fewer once some have joined

  // All ranks submit a tensor that they did before.
  void Submit(const std::string& name, int32_t process_set = kWorldSet) {
    for (int rank = 0; rank < members(process_set); ++rank) {
      Send({0, name, 0, "", process_set}, rank, 0);
    }
  }
  // All ranks make a call that is no allreduce.
  void Call(Collective kind, int32_t root = 0) {
    Request request;
    request.kind = kind;
    request.name = Name(kind);
    request.root = root;
    for (int rank = 0; rank < ranks; ++rank) coordinator.Receive(rank, Fresh(request), now);
  }

 private:
  struct Member {
    PlannedReports planned;
    std::vector<std::pair<Submission, TimeNs>> gathered;
    std::map<uint64_t, TimeNs> under_way;  // reported and not decided: when it was submitted
  };

  int members(int32_t process_set) const { return process_set == kWorldSet ? ranks : 2; }

  void Gather(const Submission& each, int rank, TimeNs at) {
    if (!buckets_together) {
      ++reports[static_cast<size_t>(rank)];
      return Send(each, rank, now - at);
    }
    Member& member = members_[static_cast<size_t>(rank)];
    member.planned.Add(IdOf(each), at);
    member.gathered.emplace_back(each, at);
  }

  // Reports what the rank has gathered, if it is time; when it will be.
  TimeNs Tell(int rank) {
    Member& member = members_[static_cast<size_t>(rank)];
    if (member.gathered.empty()) return kForever;
    if (member.planned.others().count == 0 && now < member.planned.due()) {
      return member.planned.due();
    }
    ++reports[static_cast<size_t>(rank)];
    for (const auto& [each, at] : member.gathered) {
      Send(each, rank, now - at);
      member.under_way[IdOf(each)] = at;
    }
    member.gathered.clear();
    member.planned.Reported();
    return kForever;
  }

  void Learn(const Decision& plan) {
    for (Member& member : members_) {
      member.planned.Learn(plan.process_set, plan.details().plan);
      for (const auto& [id, at] : member.under_way) member.planned.Add(id, at);
      member.planned.Reported();
      for (const auto& [each, at] : member.gathered) member.planned.Add(IdOf(each), at);
    }
  }

  uint64_t IdOf(const Submission& each) const {
    const auto id = ids_.find(each.name);
    return id == ids_.end() ? 0 : id->second;
  }

  void Send(const Submission& each, int rank, TimeNs age) {
    const auto id = ids_.find(each.name);
    Report report;
    if (id != ids_.end()) {
      report.cached = {id->second};
      report.ages_us = {age / kMicrosecond};
    } else {
      report.fresh = {Allreduce(each.name, each.bytes, each.process_set)};
    }
    coordinator.Receive(rank, report, now);
  }

  void Run(const Agreement& agreement, const std::vector<Submission>& submitted,
           std::map<std::string, TimeNs>* done) {
    batches.emplace_back();
    int64_t bytes = 0;
    int32_t process_set = kWorldSet;
    for (const Decision& decision : agreement.decisions) {
      if (decision.kind == Decision::Kind::kTune) {
        hold = decision.details().hold_ns;
        continue;
      }
      if (decision.kind == Decision::Kind::kPlan) {
        Learn(decision);
        continue;
      }
      tried = hold;
      if (!decision.details().name.empty() && decision.cache_id != 0) {
        ids_[decision.details().name] = decision.cache_id;
        names_[decision.cache_id] = decision.details().name;
      }
      const bool known = !decision.details().name.empty() || names_.count(decision.cache_id) != 0;
      CHECK(known);  // by the ranks, which forget what was evicted
      const std::string name =
          decision.details().name.empty() ? names_[decision.cache_id] : decision.details().name;
      batches.back().push_back(name);
      for (Member& member : members_) member.under_way.erase(ids_[name]);
      for (const Submission& each : submitted) {
        if (each.name != name) continue;
        bytes += each.bytes;
        process_set = each.process_set;
      }
    }
    for (const uint64_t id : agreement.evicted) {
      ids_.erase(names_[id]);
      names_.erase(id);
    }
    if (batches.back().empty()) return batches.pop_back();
    const TimeNs begin = now;
    now += static_cast<TimeNs>(cost(bytes) * 1e9);
    coordinator.Ran(process_set, bytes, begin, now);
    for (const std::string& name : batches.back()) (*done)[name] = now;
  }

  std::map<std::string, uint64_t> ids_;
  std::map<uint64_t, std::string> names_;
  std::vector<Member> members_;

 public:
  Coordinator coordinator;
};

}  // namespace hororing_test
