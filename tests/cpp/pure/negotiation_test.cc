// Rung 1: coordinator, cache, codec, stall inspector and the texts of mismatches, without
// threads, transports or time.
#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "negotiation/codec.h"
#include "negotiation/coordinator.h"
#include "negotiation/validate.h"

using namespace hororing;

namespace {

Request Allreduce(const std::string& name, std::vector<int64_t> shape = {4},
                  DataType dtype = DataType::kFloat32) {
  Request request;
  request.name = name;
  request.tensors = {{dtype, std::move(shape)}};
  return request;
}

Request Allgather(const std::string& name, int64_t rows) {
  Request request = Allreduce(name, {rows, 3});
  request.kind = Collective::kAllgather;
  return request;
}

Report Fresh(std::vector<Request> requests) {
  Report report;
  report.fresh = std::move(requests);
  return report;
}

Coordinator::Options Options(int size) {
  Coordinator::Options options;
  options.size = size;
  options.cache_capacity = 8;
  return options;
}

// A report with one of each request.
std::vector<Decision> Apart(const std::vector<Decision>& decisions) {
  std::vector<Decision> apart;
  for (const Decision& decision : decisions) {
    for (uint64_t i = 0; i < decision.count; ++i) {
      apart.push_back(decision);
      apart.back().cache_id += i;
      apart.back().count = 1;
    }
  }
  return apart;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(events_of_the_timeline_survive_the_wire) {
  const std::vector<TraceEvent> events = {
      {"PACK", "x", Track::kLoop, false, -5, 7},
      {"", std::string("\0\xff\"", 3), Track::kNegotiate, true, 0, kForever, -1, 7, true}};
  std::vector<TraceEvent> decoded;
  bool last = false;
  const std::string whole = EncodeTrace(events, true);
  CHECK(DecodeTrace(whole, &decoded, &last));
  CHECK(last);
  CHECK_EQ(decoded.size(), size_t{2});
  for (size_t i = 0; i < decoded.size(); ++i) {
    CHECK_EQ(decoded[i].name, events[i].name);
    CHECK_EQ(decoded[i].tensor, events[i].tensor);
    CHECK(decoded[i].track == events[i].track);
    CHECK_EQ(decoded[i].instant, events[i].instant);
    CHECK_EQ(decoded[i].begin_ns, events[i].begin_ns);
    CHECK_EQ(decoded[i].end_ns, events[i].end_ns);
    CHECK_EQ(decoded[i].bytes, events[i].bytes);
    CHECK_EQ(decoded[i].process_set, events[i].process_set);
    CHECK_EQ(decoded[i].joined, events[i].joined);
  }
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    CHECK(!DecodeTrace(whole.substr(0, bytes), &decoded, &last));
  }
  CHECK(DecodeTrace(EncodeTrace({}, false), &decoded, &last));
  CHECK(decoded.empty() && !last);
}

}  // namespace

TEST(a_request_is_agreed_once_every_rank_has_reported_it) {
  Coordinator coordinator(Options(3));
  coordinator.Receive(2, Fresh({Allreduce("x")}), 0);
  coordinator.Receive(0, Fresh({Allreduce("x")}), 0);
  CHECK(!coordinator.TakeAgreement().has_value());
  coordinator.Receive(1, Fresh({Allreduce("x")}), 2);
  const auto agreement = coordinator.TakeAgreement();
  CHECK(agreement.has_value());
  CHECK_EQ(agreement->decisions.size(), size_t{1});
  CHECK(agreement->decisions[0].kind == Decision::Kind::kRun);
  CHECK_EQ(agreement->decisions[0].details().name, std::string("x"));
  CHECK(!coordinator.TakeAgreement().has_value());
}

TEST(cached_reports_are_agreed_by_id_and_mix_with_full_ones) {
  Coordinator coordinator(Options(2));
  for (int rank : {0, 1}) coordinator.Receive(rank, Fresh({Allreduce("x")}), 0);
  const uint64_t id = coordinator.TakeAgreement()->decisions[0].cache_id;
  CHECK(id != 0);
  Report cached;
  cached.cached = {id};
  for (int rank : {1, 0}) coordinator.Receive(rank, cached, 1);
  auto agreement = coordinator.TakeAgreement();
  CHECK_EQ(agreement->decisions[0].cache_id, id);
  CHECK(agreement->decisions[0].details().name.empty());

  // Rank 1 changes the shape: rank 0's id still stands for the old one.
  coordinator.Receive(0, cached, 2);
  coordinator.Receive(1, Fresh({Allreduce("x", {5})}), 2);
  agreement = coordinator.TakeAgreement();
  CHECK(agreement->decisions[0].kind == Decision::Kind::kFail);
  CHECK(Contains(agreement->decisions[0].details().status.message(), "rank 0: [4]; rank 1: [5]"));

  // Both ranks change it, which makes a new id.
  for (int rank : {0, 1}) coordinator.Receive(rank, Fresh({Allreduce("x", {5})}), 3);
  agreement = coordinator.TakeAgreement();
  CHECK(agreement->decisions[0].kind == Decision::Kind::kRun);
  CHECK(agreement->decisions[0].cache_id != id);
}

TEST(weights_are_told_with_every_decision_and_a_bad_one_is_an_error_for_all) {
  Coordinator coordinator(Options(3));
  const auto weighted = [](const char* name, double weight) {
    Request request = Allreduce(name);
    request.op = ReduceOp::kAverage;
    request.weight = weight;
    return request;
  };
  const auto decided = [&] {
    const std::string message = Encode(*coordinator.TakeAgreement());
    Agreement agreement;
    CHECK(Decode(message, &agreement));
    return agreement.decisions;
  };
  for (int rank : {0, 1, 2}) {
    coordinator.Receive(rank, Fresh({weighted("x", rank), weighted("y", rank)}), 0);
  }
  std::vector<Decision> decisions = decided();
  CHECK_EQ(decisions.size(), size_t{2});
  CHECK(decisions[0].details().weights == (std::vector<double>{0, 0.5, 1, 1.5}));
  const uint64_t id = decisions[0].cache_id;

  const auto report = [&](int rank, double weight) {
    Report cached, read;
    cached.cached = {id, id + 1};
    cached.weights = {weight, weight};
    CHECK(Decode(Encode(cached), &read));
    CHECK(read.weights.size() == 2);
    coordinator.Receive(rank, read, 1);
  };
  report(0, 8);
  report(1, 0);
  report(2, 2);
  decisions = decided();
  CHECK_EQ(decisions.size(), size_t{1});  // one for both, since their weights are equal
  CHECK_EQ(decisions[0].count, uint64_t{2});
  CHECK(decisions[0].details().weights == (std::vector<double>{1, 0, 0.25, 1.25}));

  for (int rank : {0, 1, 2}) report(rank, 0);
  CHECK(decided()[0].details().weights == (std::vector<double>{0, 0, 0, 1}));

  for (const double bad : {-1.0, std::nan(""), HUGE_VAL}) {
    for (int rank : {0, 1, 2}) report(rank, rank == 1 ? bad : 1);
    decisions = decided();
    CHECK_EQ(decisions.size(), size_t{2});
    CHECK(decisions[0].kind == Decision::Kind::kFail);
    CHECK(decisions[0].details().status.code() == Code::kInvalidArgument);
    CHECK(Contains(decisions[0].details().status.message(), "ranks 0,2: 1; rank 1: "));
  }

  // A joined rank has no weight. One rank reports in full, the other by id.
  Request join;
  join.name = "join";
  join.kind = Collective::kJoin;
  coordinator.Receive(1, Fresh({join}), 2);
  report(0, 3);
  coordinator.Receive(2, Fresh({weighted("x", 1), weighted("y", 4)}), 2);
  decisions = decided();
  CHECK(decisions[0].details().weights == (std::vector<double>{1, 0, 1.0 / 3, 4.0 / 3}));
  CHECK(decisions[1].details().weights == (std::vector<double>{0.75, 0, 1, 1.75}));
}

TEST(gathered_rows_travel_with_the_agreement_and_are_cached) {
  Coordinator coordinator(Options(2));
  coordinator.Receive(0, Fresh({Allgather("g", 2)}), 0);
  coordinator.Receive(1, Fresh({Allgather("g", 0)}), 0);
  auto agreement = coordinator.TakeAgreement();
  CHECK(agreement->decisions[0].details().rows == (std::vector<int64_t>{2, 0}));
  const uint64_t id = agreement->decisions[0].cache_id;
  // Rank 1 gathers more rows this time; rank 0 does not.
  Report cached;
  cached.cached = {id};
  coordinator.Receive(0, cached, 1);
  coordinator.Receive(1, Fresh({Allgather("g", 7)}), 1);
  agreement = coordinator.TakeAgreement();
  CHECK(agreement->decisions[0].details().rows == (std::vector<int64_t>{2, 7}));
}

// Four ranks, of which rank r sends 10 * r + k rows to rank k.
TEST(an_alltoall_tells_ranks_what_they_receive_and_no_more) {
  Coordinator coordinator(Options(4));
  for (int rank = 0; rank < 4; ++rank) {
    Request request = Allreduce("x", {40 * rank + 6});
    request.kind = Collective::kAlltoall;
    for (int to = 0; to < 4; ++to) request.splits.push_back(10 * rank + to);
    coordinator.Receive(rank, Fresh({request}), 0);
  }
  const auto agreement = coordinator.TakeAgreement();
  CHECK(!coordinator.IsForAll(*agreement));
  const auto rows = [&](const std::vector<int>& ranks) {
    return coordinator.PartFor(ranks, *agreement)->decisions[0].details().rows;
  };
  CHECK(rows({1}) == (std::vector<int64_t>{264, 1, 11, 21, 31}));
  CHECK(rows({2, 3}) == (std::vector<int64_t>{264, 2, 12, 22, 32, 3, 13, 23, 33}));
}

TEST(the_cache_is_limited_by_tensors_and_rows_not_by_names) {
  Coordinator::Options options = Options(2);
  options.cache_capacity = 100;
  Coordinator coordinator(options);
  std::set<uint64_t> known;
  uint64_t applied = 0;
  const auto call = [&](const Request& request) {
    Report report = Fresh({request});
    report.applied = applied;
    for (int rank : {0, 1}) coordinator.Receive(rank, report, 0);
    const auto agreement = coordinator.TakeAgreement();
    applied = agreement->sequence;
    const uint64_t id = agreement->decisions[0].cache_id;
    if (id != 0) known.insert(id);
    for (const uint64_t each : agreement->evicted) known.erase(each);
    return id;
  };
  Request group = Allreduce("");
  group.tensors.resize(30, group.tensors[0]);
  for (int i = 0; i < 20; ++i) {
    group.name = "group" + std::to_string(i);
    CHECK(call(group) != 0);
    CHECK(known.size() <= 3);
  }
  // It alone exceeds the limit. Its name had an id, which the ranks must forget.
  group.tensors.resize(101, group.tensors[0]);
  CHECK_EQ(call(group), uint64_t{0});
  CHECK_EQ(known.size(), size_t{2});
  Request sparse = Allreduce("a", {2});
  sparse.kind = Collective::kAlltoall;
  sparse.splits.assign(900, 0);  // 2 ranks of 900 splits: 57 tensors
  for (int i = 0; i < 20; ++i) {
    sparse.name = "a" + std::to_string(i);
    CHECK(call(sparse) != 0);
    CHECK(known.size() <= 2);
  }
}

TEST(evicted_ids_are_understood_until_every_rank_knows) {
  Coordinator::Options options = Options(2);
  options.cache_capacity = 1;
  Coordinator coordinator(options);
  for (int rank : {0, 1}) coordinator.Receive(rank, Fresh({Allreduce("a")}), 0);
  const uint64_t a = coordinator.TakeAgreement()->decisions[0].cache_id;
  for (int rank : {0, 1}) coordinator.Receive(rank, Fresh({Allreduce("b")}), 1);
  auto agreement = coordinator.TakeAgreement();
  CHECK(agreement->evicted == std::vector<uint64_t>{a});
  // Both reports of `a` were in transit when the eviction was agreed.
  Report late;
  late.applied = 1;
  late.cached = {a};
  for (int rank : {0, 1}) coordinator.Receive(rank, late, 2);
  agreement = coordinator.TakeAgreement();
  CHECK_EQ(agreement->decisions[0].details().name, std::string("a"));
  CHECK_EQ(agreement->decisions[0].cache_id, uint64_t{0});
}

TEST(a_mismatch_names_the_tensor_and_groups_values_by_rank) {
  const Request good = Allreduce("layer3.weight", {256, 128});
  const Request bad = Allreduce("layer3.weight", {256, 64});
  const Status status = Validate({&good, &good, &bad, &good}, {0, 1, 2, 3});
  CHECK_EQ(status.rank(), 2);
  CHECK(status.code() == Code::kMismatch);
  CHECK(Contains(status.message(),
                 "allreduce 'layer3.weight': shapes differ: ranks 0,1,3: [256, 128]; "
                 "rank 2: [256, 64]. Every rank must pass the same shape"));
}

TEST(the_text_of_a_mismatch_does_not_depend_on_who_came_first) {
  std::vector<int> order = {0, 1, 2};
  std::set<std::string> texts;
  do {
    Coordinator coordinator(Options(3));
    for (int rank : order) coordinator.Receive(rank, Fresh({Allreduce("x", {rank})}), 0);
    texts.insert(coordinator.TakeAgreement()->decisions[0].details().status.message());
  } while (std::next_permutation(order.begin(), order.end()));
  CHECK_EQ(texts.size(), size_t{1});
  CHECK(Contains(*texts.begin(), "rank 0: [0]; rank 1: [1]; rank 2: [2]"));
}

TEST(every_property_that_must_agree_is_checked) {
  const Request base = Allreduce("x");
  std::vector<std::pair<Request, std::string>> others;
  const auto add = [&](auto change, const std::string& what) {
    Request other = base;
    change(other);
    others.push_back({other, what});
  };
  add([](Request& r) { r.kind = Collective::kBroadcast; }, "operations differ");
  add([](Request& r) { r.tensors[0].dtype = DataType::kInt64; }, "data types differ");
  add([](Request& r) { r.tensors[0].shape = {2, 2}; }, "shapes differ");
  add([](Request& r) { r.op = ReduceOp::kMax; },
      "reduce operations differ: rank 0: Sum; rank 1: Max");
  add([](Request& r) { r.prescale = 0.5; }, "scale factors differ");
  add([](Request& r) { r.weight = 1; }, "weights differ: rank 0: none; rank 1: given");
  add([](Request& r) { r.tensors.push_back(r.tensors[0]); }, "numbers of tensors");
  for (const auto& [other, what] : others) {
    const Status status = Validate({&base, &other}, {0, 1});
    CHECK(status.code() == Code::kMismatch);
    if (!Contains(status.message(), what)) CHECK_EQ(status.message(), what);
  }
  Request root0 = base, root1 = base;
  root0.kind = root1.kind = Collective::kBroadcast;
  root1.root = 1;
  CHECK(Contains(Validate({&root0, &root1}, {0, 1}).message(), "root ranks differ"));
  Request wide = Allgather("g", 2), deep = Allgather("g", 2);
  wide.tensors[0].shape = {2, 4};
  CHECK(Contains(Validate({&deep, &wide}, {0, 1}).message(), "rank 0: [*, 3]; rank 1: [*, 4]"));
  const Request more = Allgather("g", 9);
  CHECK(Validate({&deep, &more}, {0, 1}).ok());
}

TEST(what_all_have_reported_goes_at_once) {
  Coordinator coordinator(Options(2));
  coordinator.Receive(0, Fresh({Allreduce("a"), Allreduce("b")}), 0);
  CHECK_EQ(coordinator.NextDeadline(), kSecond / 2);  // to check that rank 1 is alive
  coordinator.Receive(1, Fresh({Allreduce("a")}), 10);
  CHECK_EQ(coordinator.NextDeadline(), TimeNs{0});
  CHECK_EQ(coordinator.TakeAgreement()->decisions.size(), size_t{1});
}

// One message is enough, because all ranks cut the agreement at the threshold in the same way.
TEST(one_agreement_has_all_that_is_ready_in_the_order_of_calls) {
  Coordinator coordinator(Options(2));
  const std::vector<std::string> order = {"a", "b", "c", "barrier"};
  for (const std::string& name : order) {
    Request request = Allreduce(name, {150});
    if (name == "barrier") request.kind = Collective::kBarrier, request.tensors.clear();
    for (int rank : {0, 1}) coordinator.Receive(rank, Fresh({request}), 0);
  }
  const auto agreement = coordinator.TakeAgreement();
  CHECK_EQ(agreement->decisions.size(), order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    CHECK_EQ(agreement->decisions[i].details().name, order[i]);
  }
  CHECK(!coordinator.TakeAgreement().has_value());
}

TEST(leaving_fails_nothing_that_was_ready_before) {
  Coordinator coordinator(Options(2));
  for (int rank : {0, 1}) coordinator.Receive(rank, Fresh({Allreduce("a")}), 0);
  Report leaving;
  leaving.leaving = true;
  leaving.reason = "KeyError: 'x'";
  coordinator.Receive(1, leaving, 0);
  const auto agreement = coordinator.TakeAgreement();
  CHECK_EQ(agreement->decisions.size(), size_t{2});
  CHECK(agreement->decisions[0].kind == Decision::Kind::kRun);
  CHECK(agreement->decisions[1].kind == Decision::Kind::kLeave);
  CHECK_EQ(agreement->decisions[1].details().status.message(),
           std::string("rank 1 has shut down (KeyError: 'x'). All ranks must make the same calls: "
                       "check whether rank 1 had fewer batches."));
  coordinator.Receive(0, Fresh({Allreduce("b")}), 1);
  CHECK(!coordinator.TakeAgreement().has_value());

  Coordinator other(Options(2));
  leaving.reason = "shutdown() was called while handling ValueError: bad sample 17";
  other.Receive(1, leaving, 0);
  const Status why = other.TakeAgreement()->decisions[0].details().status;
  CHECK(why.code() == Code::kPeerLost);
  CHECK_EQ(why.rank(), 1);
  CHECK_EQ(why.message(), "rank 1 has shut down (" + leaving.reason + ")");
}

TEST(a_warning_tells_what_missing_ranks_say) {
  std::map<int, std::string> expected;
  for (int rank = 0; rank < 6; ++rank) expected[rank] = "allreduce 'x'";
  const std::string text = StallInspector::StatusText(
      expected, {{0, "pid 1"}, {2, "pid 3"}}, [](int rank) { return rank == 0 ? "a" : "b"; });
  CHECK(Contains(text, "\nrank 0 on host a has yet to submit allreduce 'x': pid 1\n"));
  CHECK(Contains(text, "\nrank 1 on host b has yet to submit allreduce 'x' and does not answer"));
  CHECK(Contains(text, ": pid 3\n"));
  CHECK(Contains(text, "\n2 more ranks are missing"));
}

TEST(stalls_are_warned_about_at_doubling_intervals_and_then_abort) {
  Coordinator::Options options = Options(3);
  options.stall.warning_ns = 8 * kSecond;
  options.stall.shutdown_ns = 60 * kSecond;
  Coordinator coordinator(options);
  coordinator.Receive(0, Fresh({Allreduce("x"), Allreduce("y")}), 0);
  coordinator.Receive(2, Fresh({Allreduce("x")}), 0);
  std::vector<TimeNs> warned;
  std::string text;
  bool aborted = false;
  for (TimeNs now = 0; now <= 70 * kSecond && !aborted; now += kSecond) {
    const StallInspector::Finding finding = coordinator.InspectStalls(now);
    const std::string warning = finding.warning;
    if (!warning.empty()) {
      CHECK(finding.expected ==
            (std::map<int, std::string>{{1, "allreduce 'x'"}, {2, "allreduce 'y'"}}));
      warned.push_back(now / kSecond);
      text = warning;
    }
    const auto agreement = coordinator.TakeAgreement();
    if (!agreement) continue;
    CHECK(agreement->decisions[0].kind == Decision::Kind::kAbort);
    CHECK(agreement->decisions[0].details().status.code() == Code::kStalled);
    CHECK(Contains(agreement->decisions[0].details().status.message(), "allreduce 'x'"));
    aborted = true;
    CHECK(now >= 60 * kSecond && now <= 62 * kSecond);
  }
  CHECK(aborted);
  CHECK(warned == (std::vector<TimeNs>{8, 16, 32}));
  CHECK(Contains(text, "allreduce 'x': submitted by ranks 0,2, missing rank 1"));
  CHECK(Contains(text, "allreduce 'y': submitted by rank 0, missing ranks 1,2"));
}

TEST(a_stall_also_names_the_requests_that_have_waited_for_less_time) {
  Coordinator::Options options = Options(2);
  options.stall.shutdown_ns = 4 * kSecond;
  Coordinator coordinator(options);
  coordinator.Receive(1, Fresh({Allreduce("loss_b")}), 0);
  coordinator.Receive(0, Fresh({Allreduce("loss_a")}), kSecond / 10);
  const Status status = coordinator.InspectStalls(4 * kSecond + kSecond / 20).abort;
  CHECK(status.code() == Code::kStalled);
  CHECK(
      Contains(status.message(),
               "stalled for more than 4 s: allreduce 'loss_b': submitted by rank 1, missing rank "
               "0; also waiting: allreduce 'loss_a': submitted by rank 0, missing rank 1. Every"));
}

TEST(a_name_that_waits_in_every_step_does_not_add_up_to_a_stall) {
  Coordinator::Options options = Options(2);
  options.stall.warning_ns = 4 * kSecond;
  Coordinator coordinator(options);
  // At every inspection, either "x" or "y" waits for a rank, but never for a second.
  for (TimeNs now = 0; now <= 30 * kSecond; now += kSecond) {
    coordinator.Receive(0, Fresh({Allreduce("x")}), now);
    if (now > 0) coordinator.Receive(1, Fresh({Allreduce("y")}), now + kSecond / 4);
    CHECK_EQ(coordinator.InspectStalls(now + kSecond / 4).warning, std::string());
    coordinator.TakeAgreement();
    coordinator.Receive(0, Fresh({Allreduce("y")}), now + kSecond / 2);
    coordinator.Receive(1, Fresh({Allreduce("x")}), now + kSecond * 3 / 4);
    CHECK_EQ(coordinator.InspectStalls(now + kSecond * 3 / 4).warning, std::string());
    coordinator.TakeAgreement();
  }
}

// Inspects once a second; `says` decides which ranks report that they are blocked. Returns the
// error of the deadlock, if there is one.
std::optional<Status> DeadlockWithin(int seconds, Coordinator& coordinator,
                                     const std::function<bool(int rank, int second)>& says) {
  for (int second = 0; second <= seconds; ++second) {
    const TimeNs now = second * kSecond;
    for (int rank = 0; rank < 4; ++rank) {
      Report report;
      report.blocked = true;
      if (says(rank, second)) coordinator.Receive(rank, report, now);
    }
    coordinator.InspectStalls(now);
    const auto agreement = coordinator.TakeAgreement();
    if (!agreement) continue;
    CHECK(agreement->decisions[0].kind == Decision::Kind::kAbort);
    CHECK(second >= 10);
    return agreement->decisions[0].details().status;
  }
  return std::nullopt;
}

TEST(ranks_that_wait_for_one_another_are_a_deadlock_once_all_have_been_blocked_for_its_time) {
  Coordinator::Options options = Options(4);
  options.stall.deadlock_ns = 10 * kSecond;
  const auto begin = [&](const std::function<bool(int, int)>& says) {
    Coordinator coordinator(options);
    for (const int rank : {0, 2, 3}) coordinator.Receive(rank, Fresh({Allreduce("gradient")}), 0);
    coordinator.Receive(1, Fresh({Allreduce("metric")}), 0);
    return DeadlockWithin(30, coordinator, says);
  };
  const std::optional<Status> status = begin([](int, int) { return true; });
  CHECK(status.has_value());
  CHECK(status->code() == Code::kStalled);
  CHECK(Contains(status->message(),
                 "allreduce 'gradient': submitted by ranks 0,2,3, missing rank 1"));
  CHECK(
      Contains(status->message(), "allreduce 'metric': submitted by rank 1, missing ranks 0,2,3"));
  // A rank that computes may submit anything, and so may one that is not blocked all the time.
  CHECK(!begin([](int rank, int) { return rank != 3; }).has_value());
  CHECK(!begin([](int rank, int second) { return rank != 3 || second < 10; }).has_value());
  CHECK(!begin([](int rank, int second) { return rank != 3 || second % 8 < 4; }).has_value());
}

TEST(what_a_deadlock_will_soon_say_is_not_warned_about) {
  const auto warned = [](TimeNs warning_ns, bool all_blocked) {
    Coordinator::Options options = Options(2);
    options.stall.warning_ns = warning_ns;
    options.stall.deadlock_ns = 10 * kSecond;
    Coordinator coordinator(options);
    coordinator.Receive(0, Fresh({Allreduce("gradient")}), 0);
    coordinator.Receive(1, Fresh({Allreduce("metric")}), 0);
    std::vector<TimeNs> at;
    for (TimeNs now = 0; now < 20 * kSecond; now += kSecond) {
      Report report;
      for (int rank : {0, 1}) {
        report.blocked = rank == 0 || all_blocked;
        coordinator.Receive(rank, report, now);
      }
      const StallInspector::Finding finding = coordinator.InspectStalls(now);
      if (!finding.warning.empty()) at.push_back(now / kSecond);
      if (!finding.abort.ok()) break;
    }
    return at;
  };
  CHECK(warned(8 * kSecond, true).empty());
  CHECK(warned(2 * kSecond, true) == (std::vector<TimeNs>{2, 4}));
  CHECK(warned(8 * kSecond, false) == (std::vector<TimeNs>{8, 16}));
}

TEST(a_deadlock_is_one_of_ranks_that_no_other_can_end) {
  Coordinator::Options options = Options(4);
  options.stall.deadlock_ns = 10 * kSecond;
  // Ranks 0 and 1 wait for one another; rank 1 also waits for rank 2, which computes.
  const auto in_set = [](const std::string& name, int32_t set) {
    Request request = Allreduce(name);
    request.process_set = set;
    return request;
  };
  const auto begin = [&](Coordinator& coordinator) {
    for (const std::vector<int32_t>& ranks : {std::vector<int32_t>{0, 1}, {1, 2}}) {
      Request add;
      add.kind = Collective::kAddProcessSet;
      add.name = "add";
      add.ranks = ranks;
      for (int rank = 0; rank < 4; ++rank) coordinator.Receive(rank, Fresh({add}), 0);
      coordinator.TakeAgreement();
    }
    coordinator.Receive(0, Fresh({in_set("a", 1)}), 0);
    coordinator.Receive(1, Fresh({in_set("b", 1)}), 0);
  };
  const auto both_say = [](int rank, int) { return rank < 2; };
  Coordinator alone(options), with_another(options);
  begin(alone);
  CHECK(DeadlockWithin(30, alone, both_say).has_value());  // whatever ranks 2 and 3 do
  begin(with_another);
  with_another.Receive(1, Fresh({in_set("c", 2)}), 0);
  CHECK(!DeadlockWithin(30, with_another, both_say).has_value());
}

TEST(a_rank_that_has_joined_ends_no_deadlock) {
  Coordinator::Options options = Options(3);
  options.stall.deadlock_ns = 10 * kSecond;
  Coordinator coordinator(options);
  Request join;
  join.kind = Collective::kJoin;
  join.name = "join";
  coordinator.Receive(2, Fresh({Allreduce("x"), join}), 0);
  coordinator.Receive(0, Fresh({Allreduce("x")}), 0);
  coordinator.Receive(1, Fresh({Allreduce("y")}), 0);
  CHECK(DeadlockWithin(30, coordinator, [](int rank, int) { return rank < 2; }).has_value());
}

// A blocked rank computes once it has its result, but says so only in its next report.
TEST(nobody_is_blocked_any_more_when_what_may_have_blocked_them_is_decided) {
  Coordinator::Options options = Options(3);
  options.stall.deadlock_ns = 10 * kSecond;
  Request add, join, y = Allreduce("y");
  add.kind = Collective::kAddProcessSet;
  add.name = "add";
  add.ranks = {1, 2};
  join.kind = Collective::kJoin;
  join.name = "join";
  y.process_set = 1;
  Report blocked, cached_x, cached_y;
  blocked.blocked = true;
  cached_x.cached = {1};
  cached_y.cached = {2};
  struct Case {
    Report x, y;   // x: of ranks 1 and 2; y: of rank 1
    Report late;   // of rank 0
    bool by_runs;  // no inspection splits the runs of pending requests
  };
  for (const Case& each :
       {Case{Fresh({Allreduce("x")}), Fresh({y}), Fresh({Allreduce("x")}), false},
        Case{Fresh({Allreduce("x")}), Fresh({y}), Fresh({join}), false},
        Case{cached_x, cached_y, cached_x, false}, Case{cached_x, cached_y, cached_x, true}}) {
    Coordinator coordinator(options);
    for (const int rank : {0, 1, 2}) coordinator.Receive(rank, Fresh({add}), 0);
    for (const int rank : {0, 1, 2}) coordinator.Receive(rank, Fresh({Allreduce("x")}), 0);
    for (const int rank : {1, 2}) coordinator.Receive(rank, Fresh({y}), 0);
    CHECK_EQ(coordinator.TakeAgreement()->decisions.size(), size_t{3});
    coordinator.Receive(1, each.y, kSecond);
    for (const int rank : {1, 2}) coordinator.Receive(rank, each.x, kSecond);
    TimeNs now = kSecond;
    for (; now <= 15 * kSecond; now += kSecond) {
      for (const int rank : {1, 2}) coordinator.Receive(rank, blocked, now);
      if (!each.by_runs) CHECK(coordinator.InspectStalls(now).abort.ok());
    }
    coordinator.Receive(0, each.late, now);
    CHECK_EQ(coordinator.TakeAgreement()->decisions.size(), size_t{1});
    CHECK(coordinator.InspectStalls(now + kSecond).abort.ok());
    for (int more = 0; more < 12; ++more) {  // the next deadlock takes its time again
      now += kSecond;
      for (const int rank : {1, 2}) coordinator.Receive(rank, blocked, now);
      CHECK_EQ(coordinator.InspectStalls(now).abort.ok(), more < 10);
      if (more >= 10) break;
    }
  }
}

TEST(ranks_are_listed_shortly) {
  CHECK_EQ(RanksText({2}), std::string("rank 2"));
  CHECK_EQ(RanksText({0, 1}), std::string("ranks 0,1"));
  CHECK_EQ(RanksText({0, 1, 2, 5}), std::string("ranks 0-2,5"));
}

// Under any interleaving of reports and any cache size, every request is decided exactly once, and
// members that apply the agreements have the same ids.
TEST(random_schedules_decide_everything_exactly_once) {
  std::mt19937 random(hororing_test::Seed());
  for (int round = 0; round < 200; ++round) {
    const int size = 1 + static_cast<int>(random() % 4);
    Coordinator::Options options = Options(size);
    options.cache_capacity = static_cast<int>(random() % 8);
    Coordinator coordinator(options);
    struct Member {
      std::map<uint64_t, std::string> known;  // names by id
      std::vector<std::string> todo;
      std::set<std::string> in_flight;
      uint64_t applied = 0;
      std::vector<Agreement> inbox;
    };
    std::vector<Member> members(static_cast<size_t>(size));
    const int names = 1 + static_cast<int>(random() % 5);
    for (Member& member : members) {
      for (int step = 0; step < 4; ++step) {
        for (int n = 0; n < names; ++n) member.todo.push_back("t" + std::to_string(n));
      }
    }
    int decided = 0;
    TimeNs now = 0;
    for (int moves = 0; moves < 20000; ++moves) {
      ++now;
      Member& member = members[random() % members.size()];
      const int rank = static_cast<int>(&member - members.data());
      if (random() % 2 == 0) {  // report some requests
        Report report;
        report.applied = member.applied;
        for (size_t i = 0; i < member.todo.size(); ++i) {
          const std::string name = member.todo[i];
          if (member.in_flight.count(name) != 0 || random() % 2 == 0) continue;
          const Request request = Allreduce(name);
          const auto known = std::find_if(member.known.begin(), member.known.end(),
                                          [&](const auto& each) { return each.second == name; });
          if (known != member.known.end()) {
            report.cached.push_back(known->first);
          } else {
            report.fresh.push_back(request);
          }
          member.in_flight.insert(name);
          member.todo.erase(member.todo.begin() + static_cast<std::ptrdiff_t>(i--));
          if (random() % 4 == 0) break;
        }
        Report decoded;
        CHECK(Decode(Encode(report), &decoded));
        coordinator.Receive(rank, decoded, now);
      } else if (!member.inbox.empty()) {  // apply one agreement
        const Agreement agreement = member.inbox.front();
        member.inbox.erase(member.inbox.begin());
        CHECK_EQ(agreement.sequence, member.applied + 1);
        for (const Decision& decision : Apart(agreement.decisions)) {
          CHECK(decision.kind == Decision::Kind::kRun);
          std::string name = decision.details().name;
          if (name.empty()) {
            CHECK_EQ(member.known.count(decision.cache_id), size_t{1});
            name = member.known[decision.cache_id];
          } else if (decision.cache_id != 0) {
            for (auto known = member.known.begin(); known != member.known.end();) {
              known = known->second == name ? member.known.erase(known) : std::next(known);
            }
            member.known[decision.cache_id] = name;
          }
          CHECK_EQ(member.in_flight.erase(name), size_t{1});
        }
        for (uint64_t id : agreement.evicted) member.known.erase(id);
        CHECK(static_cast<int>(member.known.size()) <= options.cache_capacity);
        member.applied = agreement.sequence;
      }
      if (const auto agreement = coordinator.TakeAgreement()) {
        Agreement decoded;
        CHECK(Decode(Encode(*agreement), &decoded));
        decided += static_cast<int>(Apart(decoded.decisions).size());
        for (Member& each : members) each.inbox.push_back(decoded);
      }
      const bool done = std::all_of(members.begin(), members.end(), [](const Member& each) {
        return each.todo.empty() && each.in_flight.empty();
      });
      if (done) break;
    }
    CHECK_EQ(decided, 4 * names);
    CHECK(coordinator.AllWaiting().empty());
  }
}

// Any number of consecutive ids, with anything between them.
TEST(ids_that_follow_one_another_travel_as_one) {
  std::mt19937 random(hororing_test::Seed());
  for (int round = 0; round < 200; ++round) {
    Report report;
    Agreement agreement;
    uint64_t id = random() % 1000;
    const size_t runs = random() % 8;
    for (size_t run = 0; run < runs; ++run) {
      // Some runs are longer than the limit.
      const size_t length = random() % 50 == 0 ? 140000 : 1 + random() % 40;
      const int32_t process_set = static_cast<int32_t>(random() % 2);
      for (size_t i = 0; i < length; ++i, ++id) {
        report.cached.push_back(id);
        agreement.evicted.push_back(id);
        agreement.decisions.emplace_back();
        agreement.decisions.back().cache_id = id;
        agreement.decisions.back().process_set = process_set;
      }
      if (random() % 2 == 0) {
        agreement.decisions.emplace_back();
        agreement.decisions.back().set_details().name = "fresh";
        agreement.decisions.back().cache_id = id;
      }
      id = random() % 3 == 0 ? id : random();
    }
    Report told;
    Agreement agreed;
    CHECK(Decode(Encode(report), &told));
    CHECK(Decode(Encode(agreement), &agreed));
    CHECK(told.cached == report.cached);
    CHECK(agreed.evicted == agreement.evicted);
    const std::vector<Decision> decisions = Apart(agreed.decisions);
    CHECK_EQ(decisions.size(), agreement.decisions.size());
    for (size_t i = 0; i < decisions.size(); ++i) {
      CHECK_EQ(decisions[i].cache_id, agreement.decisions[i].cache_id);
      CHECK_EQ(decisions[i].process_set, agreement.decisions[i].process_set);
      CHECK_EQ(decisions[i].details().name, agreement.decisions[i].details().name);
    }
  }
  Report step;
  for (uint64_t id = 1000; id < 2000; ++id) step.cached.push_back(id);
  CHECK(Encode(step).size() < 16);
}

TEST(runs_that_no_message_may_have_are_refused) {
  Report report;
  report.cached = {7};
  const std::string whole = Encode(report);
  const size_t place = whole.find('\7') - 1;  // the length of the run
  CHECK_EQ(whole[place], '\1');
  Report ignored;
  std::string longer = whole;
  longer.replace(place, 1, "\x80\x80\x04");  // 2^16
  CHECK(Decode(longer, &ignored));
  CHECK_EQ(ignored.cached.size(), size_t{1} << 16);
  longer = whole;
  longer.replace(place, 1, "\x81\x80\x04");
  CHECK(!Decode(longer, &ignored));
  longer = whole;
  for (int runs = 0; runs < 64; ++runs) longer.insert(place, "\x80\x80\x04\7");
  CHECK(!Decode(longer, &ignored));  // one too many
  CHECK(ignored.cached.size() <= kMostIds);
  longer.erase(place, 4);
  CHECK(Decode(longer, &ignored));
}

TEST(truncated_and_random_messages_are_refused_not_trusted) {
  std::mt19937 random(hororing_test::Seed());
  Report report = Fresh({Allreduce("x", {3, 4}), Allgather("g", 2)});
  report.cached = {1, 300, 70000};
  report.leaving = true;
  report.reason = "why";
  const std::string whole = Encode(report);
  Report decoded;
  CHECK(Decode(whole, &decoded));
  CHECK(decoded.fresh == report.fresh);
  CHECK(decoded.cached == report.cached);
  CHECK_EQ(decoded.reason, report.reason);
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    Report ignored;
    CHECK(!Decode(whole.substr(0, bytes), &ignored));
  }
  for (int i = 0; i < 20000; ++i) {
    std::string noise(random() % 64, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    Report ignored_report;
    Agreement ignored_agreement;
    std::vector<TraceEvent> events;
    bool last = false;
    (void)Decode(noise, &ignored_report);
    (void)Decode(noise, &ignored_agreement);
    (void)DecodeTrace(noise, &events, &last);
  }
}
