// Requests reported by their ids lead to the same decisions as requests reported in full.
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "negotiation/coordinator.h"

namespace hororing_test {
namespace {

using namespace hororing;

Request Allreduce(const std::string& name, int64_t elements = 4, int32_t process_set = kWorldSet) {
  Request request;
  request.name = name;
  request.process_set = process_set;
  request.tensors = {{DataType::kFloat32, {elements}}};
  return request;
}

// A coordinator, and the knowledge of its ranks.
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

  // Returns the decisions in order: "run x as 1", "fail y: why", "forget z".
  std::vector<std::string> Decide() {
    std::vector<std::string> said;
    while (const auto agreement = coordinator.TakeAgreement()) {
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
          if (details.neutral || details.name.empty() || id == 0) continue;
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

  // The next request of all ranks with this name.
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
    std::string title = waiting.title + " since " + std::to_string(waiting.since_ns) + " without";
    for (const int rank : waiting.missing) title += " " + std::to_string(rank);
    titles.push_back(title);
  }
  return titles;
}

// The decisions without ids, sorted, because a report has new requests after known ones.
std::vector<std::string> NamesOf(std::vector<std::string> said) {
  std::vector<std::string> names;
  for (std::string& each : said) {
    if (each.rfind("forget ", 0) == 0) continue;
    if (each.rfind("run ", 0) == 0) each.resize(each.find(" as "));
    names.push_back(std::move(each));
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(reports_by_id_come_to_the_decisions_of_reports_in_full) {
  std::mt19937 random(Seed());
  for (int round = 0; round < 300; ++round) {
    const int size = 2 + static_cast<int>(random() % 3);
    const int capacity = random() % 2 == 0 ? 100 : 5 + static_cast<int>(random() % 10);
    World by_id(size, capacity), in_full(size, 0);
    const int names = 1 + static_cast<int>(random() % 12);
    TimeNs now = 0;
    for (int step = 0; step < 8; ++step) {
      std::vector<std::vector<Request>> todo(static_cast<size_t>(size));
      for (int n = 0; n < names; ++n) {
        if (random() % 16 == 0) continue;
        std::string name = "t" + std::to_string(n);
        if (random() % 32 == 0) name += "." + std::to_string(step);  // a name used only once
        // Another shape than before, on all ranks or on one.
        const int64_t elements = random() % 32 == 0 ? 5 : 4;
        const size_t odd = random() % 64 == 0 ? random() % todo.size() : todo.size();
        Request request = Allreduce(name, elements);
        if (random() % 32 == 0) request.kind = Collective::kBroadcast;
        for (size_t rank = 0; rank < todo.size(); ++rank) {
          todo[rank].push_back(request);
          if (rank == odd) todo[rank].back() = Allreduce(name, 6);
        }
        by_id.Asks(request);
        in_full.Asks(request);
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
        for (World* world : {&by_id, &in_full}) {
          world->Report(static_cast<int>(rank), some, now);
        }
        if (random() % 8 == 0) CHECK(TitlesOf(by_id) == TitlesOf(in_full));
        if (random() % 2 == 0) CHECK(NamesOf(by_id.Decide()) == NamesOf(in_full.Decide()));
      }
      CHECK(NamesOf(by_id.Decide()) == NamesOf(in_full.Decide()));
      CHECK(TitlesOf(by_id).empty());
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

TEST(what_was_agreed_upon_longest_ago_is_forgotten_first_by_id_too) {
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

// A rank's index in the set differs from its rank in the world.
TEST(requests_of_a_process_set_wait_for_its_members_alone) {
  World world(4, 100);
  Request add;
  add.name = "add";
  add.kind = Collective::kAddProcessSet;
  add.ranks = {1, 3};
  for (int rank = 0; rank < 4; ++rank) world.Report(rank, {add}, 0);
  const int32_t set =
      static_cast<int32_t>(world.coordinator.TakeAgreement()->decisions.at(0).details().rows.at(0));
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

TEST(who_joins_while_requests_wait_counts_for_each_of_them) {
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

TEST(what_waits_by_its_id_is_a_stall_in_time) {
  Coordinator::Options options;
  options.size = 2;
  options.cache_capacity = 100;
  options.stall.warning_ns = kSecond;
  Coordinator coordinator(options);
  Report report;
  report.fresh = {Allreduce("a"), Allreduce("b")};
  for (int rank = 0; rank < 2; ++rank) coordinator.Receive(rank, report, 0);
  const Agreement agreed = *coordinator.TakeAgreement();
  report.fresh.clear();
  for (const Decision& decision : agreed.decisions) report.cached.push_back(decision.cache_id);
  coordinator.Receive(1, report, 10 * kSecond);
  CHECK(coordinator.NextDeadline() > 10 * kSecond);
  CHECK(coordinator.NextDeadline() <= 11 * kSecond);
  const std::string warning = coordinator.InspectStalls(12 * kSecond).warning;
  const std::string both =
      "2 s for allreduce 'a', allreduce 'b': submitted by rank 1, missing rank 0";
  CHECK(warning.find(both) != std::string::npos);
  CHECK(coordinator.NextDeadline() > 12 * kSecond);
  coordinator.Receive(0, report, 13 * kSecond);
  CHECK_EQ(coordinator.TakeAgreement()->decisions.size(), size_t{1});
  CHECK_EQ(coordinator.NextDeadline(), kForever);
}

}  // namespace
}  // namespace hororing_test
