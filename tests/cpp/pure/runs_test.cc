// What is reported and agreed upon by runs of ids: the same is decided, in the same order, as by
// single requests.
#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "negotiation/coordinator.h"
#include "negotiation/pending_runs.h"
#include "negotiation/recent_runs.h"
#include "negotiation/stretches.h"

namespace hororing_test {
namespace {

using namespace hororing;

std::vector<uint64_t> IdsOf(const std::vector<IdRun>& runs) {
  std::vector<uint64_t> ids;
  for (const IdRun& run : runs) {
    for (uint64_t id = run.first; id < run.end(); ++id) ids.push_back(id);
  }
  return ids;
}

TEST(ids_are_cut_where_they_do_not_follow_one_another_or_are_of_another_set) {
  Stretches stretches;
  for (uint64_t id = 10; id < 20; ++id) stretches.Add(id, id < 15 ? 0 : 3);
  stretches.Add(22, 3);
  std::vector<Stretches::Part> parts;
  CHECK(stretches.Cut({11, 12, 13, 14, 15, 16, 19, 22, 10}, 5, &parts));
  CHECK_EQ(parts.size(), size_t{5});
  const IdRun expected[] = {{11, 4}, {15, 2}, {19, 1}, {22, 1}, {10, 1}};
  for (size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i].ids == expected[i]);
    CHECK_EQ(parts[i].process_set, i == 0 || i == 4 ? 0 : 3);
  }
  CHECK(!stretches.Cut({11, 13, 15, 17, 19, 22}, 5, &parts));
  for (const uint64_t none : {9, 20, 21, 23}) CHECK(!stretches.Cut({none}, 5, &parts));
  CHECK(stretches.Cut({}, 5, &parts));
  CHECK(parts.empty());
}

TEST(what_is_removed_is_in_no_stretch) {
  std::mt19937 random(Seed());
  for (int round = 0; round < 100; ++round) {
    Stretches stretches;
    std::set<uint64_t> left;
    for (uint64_t id = 1; id <= 20; ++id) {
      if (random() % 5 == 0) continue;
      stretches.Add(id, 0);
      left.insert(id);
    }
    for (int removed = 0; removed < 10; ++removed) {
      const uint64_t id = 1 + random() % 20;
      stretches.Remove(id);
      left.erase(id);
      std::vector<Stretches::Part> parts;
      for (uint64_t each = 0; each <= 21; ++each) {
        CHECK_EQ(stretches.Cut({each}, 1, &parts), left.count(each) != 0);
      }
      std::vector<IdRun> runs;
      CHECK(stretches.Cut({left.begin(), left.end()}, 20, &parts));
      for (const Stretches::Part& part : parts) runs.push_back(part.ids);
      CHECK(IdsOf(runs) == std::vector<uint64_t>(left.begin(), left.end()));
    }
  }
}

// Members that cut the same ids in different places, against sets of who has reported each.
TEST(what_all_have_reported_is_complete_wherever_they_cut_it) {
  std::mt19937 random(Seed());
  for (int round = 0; round < 300; ++round) {
    const size_t size = 1 + random() % 4;
    ProcessSet set;
    for (size_t rank = 0; rank < size; ++rank) set.ranks.push_back(static_cast<int>(rank));
    constexpr uint64_t kEnd = 40;
    PendingRuns pending;
    std::vector<std::set<size_t>> who(kEnd);
    std::vector<uint64_t> next(size, 1);
    size_t left = size;
    while (left > 0) {
      const size_t member = random() % size;
      if (next[member] == kEnd) continue;
      const uint64_t count = 1 + random() % (kEnd - next[member]);
      const IdRun run{next[member], count};
      std::vector<size_t> together = {member};
      for (size_t other = 0; other < size; ++other) {  // of the same host
        if (other != member && next[other] == run.first && random() % 2 == 0) {
          together.push_back(other);
        }
      }
      std::vector<uint64_t> expected;
      for (uint64_t id = run.first; id < run.end(); ++id) {
        who[id].insert(together.begin(), together.end());
        if (who[id].size() == size) expected.push_back(id);
      }
      std::vector<IdRun> complete;
      pending.Report(run, set, together, 0, &complete);
      CHECK(IdsOf(complete) == expected);
      for (const size_t each : together) {
        next[each] = run.end();
        if (next[each] == kEnd) --left;
      }
    }
    CHECK(pending.empty());
  }
}

TEST(a_piece_counts_from_its_first_report_on) {
  ProcessSet set;
  set.ranks = {0, 1, 2};
  PendingRuns pending;
  std::vector<IdRun> complete;
  pending.Report({10, 10}, set, {0}, 5, &complete);
  pending.Report({12, 2}, set, {1}, 6, &complete);
  pending.Report({20, 1}, set, {1}, 7, &complete);
  CHECK(complete.empty());
  std::vector<PendingRuns::Piece> pieces = pending.TakeAll();
  std::sort(pieces.begin(), pieces.end(),
            [](const auto& a, const auto& b) { return a.ids.first < b.ids.first; });
  CHECK_EQ(pieces.size(), size_t{4});
  const IdRun expected[] = {{10, 2}, {12, 2}, {14, 6}, {20, 1}};
  for (size_t i = 0; i < pieces.size(); ++i) {
    CHECK(pieces[i].ids == expected[i]);
    CHECK_EQ(pieces[i].since_ns, i == 3 ? 7 : 5);
    CHECK_EQ(pieces[i].count, i == 1 ? size_t{2} : size_t{1});
  }
  CHECK(pending.empty());
}

TEST(runs_are_remembered_in_the_order_of_their_last_use) {
  std::mt19937 random(Seed());
  for (int round = 0; round < 200; ++round) {
    RecentRuns recent;
    std::vector<uint64_t> order;
    for (int use = 0; use < 10; ++use) {
      const IdRun run{random() % 20, 1 + random() % 10};
      recent.Add(run);
      for (uint64_t id = run.first; id < run.end(); ++id) {
        order.erase(std::remove(order.begin(), order.end(), id), order.end());
        order.push_back(id);
      }
    }
    CHECK(recent.size() <= 20);
    CHECK(IdsOf(recent.TakeAll()) == order);
    CHECK_EQ(recent.size(), size_t{0});
  }
}

Request Allreduce(const std::string& name, int64_t elements = 4, int32_t process_set = kWorldSet) {
  Request request;
  request.name = name;
  request.process_set = process_set;
  request.tensors = {{DataType::kFloat32, {elements}}};
  return request;
}

// A coordinator and what its ranks know of it.
class World {
 public:
  World(int size, int cache_capacity) : coordinator(Options(size, cache_capacity)) {}

  void Report(int rank, const std::vector<Request>& requests, TimeNs now) {
    struct Report report;
    report.applied = sequence_;
    for (const Request& request : requests) {
      const auto known = ids_.find(Key(request));
      if (known != ids_.end() && known->second.second == request) {
        report.cached.push_back(known->second.first);
      } else {
        report.fresh.push_back(request);
      }
    }
    coordinator.Receive(rank, report, now);
  }

  // "run x", "fail y: why", "forget z", in order; none where nothing is decided.
  std::vector<std::string> Decide() {
    std::vector<std::string> said;
    while (const auto agreement = coordinator.Decide()) {
      sequence_ = agreement->sequence;
      decisions += static_cast<int>(agreement->decisions.size());
      for (const Decision& decision : agreement->decisions) {
        const Decision::Details& details = decision.details();
        if (decision.kind == Decision::Kind::kFail) {
          said.push_back("fail " + details.name + ": " + details.status.message());
          continue;
        }
        CHECK(decision.kind == Decision::Kind::kRun);
        for (uint64_t id = decision.cache_id; id < decision.cache_id + decision.count; ++id) {
          std::string name = details.name.empty() ? names_.at(id) : details.name;
          said.push_back("run " + name + " as " + std::to_string(id));
          if (details.stand_in || details.name.empty() || id == 0) continue;
          const Request request = asked_.at(Key(decision.process_set, name));
          ids_[Key(request)] = {id, request};
          names_[id] = name;
        }
      }
      for (const uint64_t id : agreement->evicted) {
        said.push_back("forget " + std::to_string(id));
        for (auto known = ids_.begin(); known != ids_.end();) {
          known = known->second.first == id ? ids_.erase(known) : std::next(known);
        }
      }
    }
    return said;
  }

  // Of all ranks, as they ask for it next.
  void Asks(const Request& request) { asked_[Key(request)] = request; }

  Coordinator coordinator;
  int decisions = 0;

 private:
  static Coordinator::Options Options(int size, int cache_capacity) {
    Coordinator::Options options;
    options.size = size;
    options.cache_capacity = cache_capacity;
    return options;
  }

  uint64_t sequence_ = 0;
  std::map<std::string, std::pair<uint64_t, Request>> ids_;
  std::map<uint64_t, std::string> names_;
  std::map<std::string, Request> asked_;
};

std::vector<std::string> TitlesOf(World& world) {
  std::vector<std::string> titles;
  for (const Waiting& waiting : world.coordinator.AllWaiting()) {
    if (waiting.name == "anchor") continue;
    std::string title = waiting.title + " since " + std::to_string(waiting.since_ns) + " without";
    for (const int rank : waiting.missing) title += " " + std::to_string(rank);
    titles.push_back(title);
  }
  return titles;
}

// A request that waits for ever makes the other world go by single requests.
TEST(runs_come_to_the_decisions_of_single_requests) {
  std::mt19937 random(Seed());
  for (int round = 0; round < 300; ++round) {
    const int size = 2 + static_cast<int>(random() % 3);
    const int capacity = random() % 2 == 0 ? 100 : 5 + static_cast<int>(random() % 10);
    World by_runs(size, capacity), singly(size, capacity);
    singly.Report(0, {Allreduce("anchor")}, 0);
    const int names = 1 + static_cast<int>(random() % 12);
    TimeNs now = 0;
    for (int step = 0; step < 8; ++step) {
      std::vector<std::vector<Request>> todo(static_cast<size_t>(size));
      for (int n = 0; n < names; ++n) {
        if (random() % 16 == 0) continue;
        std::string name = "t" + std::to_string(n);
        if (random() % 32 == 0) name += "." + std::to_string(step);  // for this once
        // Another shape than before, on all ranks or on one.
        const int64_t elements = random() % 32 == 0 ? 5 : 4;
        const size_t odd = random() % 64 == 0 ? random() % todo.size() : todo.size();
        Request request = Allreduce(name, elements);
        if (random() % 32 == 0) request.kind = Collective::kBroadcast;
        for (size_t rank = 0; rank < todo.size(); ++rank) {
          todo[rank].push_back(request);
          if (rank == odd) todo[rank].back() = Allreduce(name, 6);
        }
        by_runs.Asks(request);
        singly.Asks(request);
      }
      if (random() % 8 == 0) std::shuffle(todo[0].begin(), todo[0].end(), random);
      while (
          std::any_of(todo.begin(), todo.end(), [](const auto& each) { return !each.empty(); })) {
        const size_t rank = random() % todo.size();
        const size_t count = std::min(todo[rank].size(), 1 + random() % 12);
        const auto end = todo[rank].begin() + static_cast<std::ptrdiff_t>(count);
        const std::vector<Request> some(todo[rank].begin(), end);
        todo[rank].erase(todo[rank].begin(), end);
        ++now;
        for (World* world : {&by_runs, &singly}) {
          world->Report(static_cast<int>(rank), some, now);
        }
        if (random() % 8 == 0) CHECK(TitlesOf(by_runs) == TitlesOf(singly));
        if (random() % 2 == 0) CHECK(by_runs.Decide() == singly.Decide());
      }
      CHECK(by_runs.Decide() == singly.Decide());
      CHECK(TitlesOf(by_runs).empty());
    }
  }
}

TEST(a_step_that_goes_like_the_one_before_is_one_decision) {
  World world(3, 100);
  std::vector<Request> step;
  for (int i = 0; i < 50; ++i) step.push_back(Allreduce("t" + std::to_string(i)));
  for (const Request& request : step) world.Asks(request);
  for (int repeat = 0; repeat < 4; ++repeat) {
    const std::vector<Request> first(step.begin(), step.begin() + 20 + repeat);
    const std::vector<Request> rest(step.begin() + 20 + repeat, step.end());
    world.decisions = 0;
    world.Report(0, step, 0);
    world.Report(1, first, 0);
    world.Report(2, step, 0);
    const size_t early = repeat == 0 ? 20 : first.size();
    CHECK_EQ(world.Decide().size(), early);
    world.Report(1, rest, 0);
    CHECK_EQ(world.Decide().size(), step.size() - early);
    CHECK_EQ(world.decisions, repeat == 0 ? 50 : 2);
  }
}

TEST(what_was_agreed_upon_longest_ago_is_forgotten_first_by_runs_too) {
  World world(2, 4);
  const auto ask = [&](std::vector<std::string> names) {
    std::vector<Request> requests;
    for (const std::string& name : names) {
      requests.push_back(Allreduce(name));
      world.Asks(requests.back());
    }
    for (int rank = 0; rank < 2; ++rank) world.Report(rank, requests, 0);
    return world.Decide();
  };
  ask({"a", "b", "c", "d"});  // as 1 to 4
  ask({"a", "b"});
  CHECK(ask({"e"}) == (std::vector<std::string>{"run e as 5", "forget 3"}));
  ask({"b"});
  CHECK(ask({"f"}) == (std::vector<std::string>{"run f as 6", "forget 4"}));
  CHECK(ask({"g"}) == (std::vector<std::string>{"run g as 7", "forget 1"}));
}

// Its ranks are other members than those of the world are.
TEST(runs_of_a_process_set_wait_for_its_members_alone) {
  World world(4, 100);
  Request add;
  add.name = "add";
  add.kind = Collective::kAddProcessSet;
  add.ranks = {1, 3};
  for (int rank = 0; rank < 4; ++rank) world.Report(rank, {add}, 0);
  const int32_t set =
      static_cast<int32_t>(world.coordinator.Decide()->decisions.at(0).details().rows.at(0));
  std::vector<Request> step;
  for (int i = 0; i < 6; ++i) step.push_back(Allreduce("t" + std::to_string(i), 4, set));
  for (const Request& request : step) world.Asks(request);
  for (int repeat = 0; repeat < 3; ++repeat) {
    world.decisions = 0;
    world.Report(3, step, 0);
    CHECK(world.Decide().empty());
    world.Report(1, step, 0);
    CHECK_EQ(world.Decide().size(), step.size());
    CHECK_EQ(world.decisions, repeat == 0 ? 6 : 1);
  }
}

TEST(who_joins_while_runs_wait_counts_for_each_of_their_requests) {
  World world(3, 100);
  const std::vector<Request> step = {Allreduce("a"), Allreduce("b"), Allreduce("c")};
  for (const Request& request : step) world.Asks(request);
  for (int rank = 0; rank < 3; ++rank) world.Report(rank, step, 0);
  CHECK_EQ(world.Decide().size(), size_t{3});
  world.Report(0, step, 0);
  world.Report(1, {step[0], step[1]}, 0);
  CHECK(world.Decide().empty());
  Request join;
  join.name = "join";
  join.kind = Collective::kJoin;
  world.Report(2, {join}, 0);
  CHECK_EQ(world.Decide().size(), size_t{2});
  world.Report(1, {step[2]}, 0);
  CHECK_EQ(world.Decide().size(), size_t{1});
}

TEST(runs_that_wait_are_a_stall_in_time) {
  Coordinator::Options options;
  options.size = 2;
  options.cache_capacity = 100;
  options.stall.warning_ns = kSecond;
  Coordinator coordinator(options);
  Report report;
  report.fresh = {Allreduce("a"), Allreduce("b")};
  for (int rank = 0; rank < 2; ++rank) coordinator.Receive(rank, report, 0);
  const Agreement agreed = *coordinator.Decide();
  report.fresh.clear();
  for (const Decision& decision : agreed.decisions) report.cached.push_back(decision.cache_id);
  coordinator.Receive(1, report, 10 * kSecond);
  CHECK(coordinator.NextDeadline() > 10 * kSecond);
  CHECK(coordinator.NextDeadline() <= 11 * kSecond);
  const std::string warning = coordinator.InspectStalls(12 * kSecond).warning;
  const std::string both = "2 s: allreduce 'a', allreduce 'b': submitted by rank 1, missing rank 0";
  CHECK(warning.find(both) != std::string::npos);
  CHECK(coordinator.NextDeadline() > 12 * kSecond);
  coordinator.Receive(0, report, 13 * kSecond);
  CHECK_EQ(coordinator.Decide()->decisions.size(), size_t{2});
  CHECK_EQ(coordinator.NextDeadline(), kForever);
}

}  // namespace
}  // namespace hororing_test
