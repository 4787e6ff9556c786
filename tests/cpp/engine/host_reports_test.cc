// Reports that are combined per host: how long they wait for one another, what they cost, and that
// nothing else changes. Rung 1 tests HostReports, rung 2 engines on emulated hosts: threads with a
// segment per host and the in-process transport between hosts.
#include "negotiation/host_reports.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "forwarding_transport.h"
#include "hosts_engine_world.h"
#include "negotiation/codec.h"

using namespace hororing_test;

namespace {

// Also of a rank's silence: on a busy machine, a thread may wait for long until it runs.
constexpr TimeNs kStallLimit = 1500 * kMillisecond;

using Reports = std::vector<std::pair<std::vector<int>, Report>>;

Report Cached(std::vector<uint64_t> ids, uint64_t applied = 0) {
  Report report;
  report.cached = std::move(ids);
  report.applied = applied;
  return report;
}

Report FreshNamed(const std::string& name) {
  Report report;
  report.fresh.resize(1);
  report.fresh[0].name = name;
  return report;
}

// The reports that are due now; may be empty.
Reports Taken(HostReports& reports, TimeNs now) {
  Reports taken;
  const auto message = reports.Take(now);
  if (message) CHECK(DecodeCombined(*message, &taken));
  return taken;
}

Request Join() {
  Request request;
  request.kind = Collective::kJoin;
  request.name = "join";
  return request;
}

Agreement Agreed(uint64_t id, uint64_t count, const std::string& name = "") {
  Agreement agreement;
  agreement.decisions.resize(1);
  agreement.decisions[0].cache_id = id;
  agreement.decisions[0].count = count;
  if (!name.empty()) agreement.decisions[0].set_details().name = name;
  return agreement;
}

}  // namespace

TEST(what_all_ranks_of_a_host_report_alike_travels_once_and_at_once) {
  HostReports reports({4, 5, 6}, kMillisecond);
  reports.Receive(4, Cached({1, 2}), true, 0);
  CHECK(Taken(reports, 0).empty());
  reports.Receive(6, Cached({1, 2}), true, 0);
  CHECK(Taken(reports, 0).empty());
  CHECK_EQ(reports.NextDeadline(), kMillisecond);
  reports.Receive(5, Cached({1, 2}), true, 10);
  const Reports taken = Taken(reports, 10);
  CHECK_EQ(taken.size(), size_t{1});
  CHECK(taken[0].first == (std::vector<int>{4, 5, 6}));
  CHECK(taken[0].second.cached == (std::vector<uint64_t>{1, 2}));
  CHECK_EQ(reports.NextDeadline(), kForever);
}

TEST(a_late_rank_delays_the_others_by_the_hold_time_and_itself_not_at_all) {
  HostReports reports({0, 1}, kMillisecond);
  reports.Receive(0, Cached({7}), true, 100);
  CHECK(Taken(reports, kMillisecond).empty());
  CHECK_EQ(Taken(reports, kMillisecond + 100).size(), size_t{1});
  reports.Receive(1, Cached({7}), true, kSecond);
  const Reports late = Taken(reports, kSecond);
  CHECK_EQ(late.size(), size_t{1});
  CHECK(late[0].first == std::vector<int>{1});
}

TEST(some_request_that_all_ranks_have_reported_takes_along_what_is_held) {
  HostReports reports({0, 1, 2}, kMillisecond);
  reports.Receive(0, Cached({1, 2, 3}), true, 0);
  reports.Receive(1, Cached({3, 1}), true, 0);
  CHECK(Taken(reports, 0).empty());
  CHECK(!Taken(reports, kMillisecond).empty());
  reports.Receive(0, Cached({4}), true, kSecond);
  reports.Receive(2, Cached({2}), true, kSecond);
  CHECK(Taken(reports, kSecond).empty());
  reports.Receive(2, Cached({3}), true, kSecond);
  const Reports taken = Taken(reports, kSecond);
  CHECK_EQ(taken.size(), size_t{2});
  std::map<int, std::vector<uint64_t>> by_rank;
  for (const auto& [ranks, report] : taken) by_rank[ranks[0]] = report.cached;
  CHECK(by_rank[0] == std::vector<uint64_t>{4});
  CHECK(by_rank[2] == (std::vector<uint64_t>{2, 3}));
}

TEST(requests_of_another_process_set_wait_for_nobody) {
  HostReports reports({0, 1, 2}, kMillisecond);
  reports.Receive(0, Cached({1}), true, 0);
  CHECK(Taken(reports, 0).empty());
  reports.Receive(1, Cached({2}), false, 0);
  CHECK_EQ(Taken(reports, 0).size(), size_t{2});
  reports.Receive(2, Cached({3}), true, 0);
  CHECK(Taken(reports, 0).empty());
}

TEST(while_a_rank_has_joined_nobody_waits_for_it) {
  HostReports reports({0, 1}, kMillisecond);
  Report joins;
  joins.fresh = {Join()};
  reports.Receive(0, Cached({1, 2}), true, 0);
  CHECK(Taken(reports, 0).empty());
  reports.Receive(1, joins, true, 0);
  CHECK(!Taken(reports, 0).empty());
  reports.Decided(Agreed(1, 2));
  for (int step = 0; step < 3; ++step) {
    reports.Receive(0, Cached({1, 2}), true, 0);
    CHECK(!Taken(reports, 0).empty());
    reports.Decided(Agreed(1, 2));
  }
  reports.Receive(0, joins, true, 0);
  CHECK(!Taken(reports, 0).empty());
  reports.Decided(Agreed(0, 1, "join"));
  // From now on both ranks are expected to report again, and only for later steps.
  for (const int first : {0, 1}) {
    reports.Receive(first, Cached({1, 2}), true, 0);
    CHECK(Taken(reports, 0).empty());
    reports.Receive(1 - first, Cached({1, 2}), true, 0);
    CHECK_EQ(Taken(reports, 0).size(), size_t{1});
    reports.Decided(Agreed(1, 2));
  }
}

// One rank has applied the eviction of the id, the other has not.
TEST(what_was_decided_does_not_count_for_the_next_time) {
  HostReports reports({0, 1}, kMillisecond);
  reports.Receive(0, Cached({7}), true, 0);
  reports.Receive(1, FreshNamed("x"), true, 0);
  CHECK(!Taken(reports, 0).empty());  // both have reported
  reports.Decided(Agreed(8, 1, "x"));
  reports.Receive(0, FreshNamed("x"), true, 0);
  CHECK(Taken(reports, 0).empty());
  reports.Receive(1, FreshNamed("x"), true, 0);
  CHECK_EQ(Taken(reports, 0).size(), size_t{1});
}

TEST(once_all_ranks_have_reported_nothing_more_is_expected_of_them) {
  HostReports reports({0, 1}, kMillisecond);
  reports.Receive(0, Cached({1, 2}), true, 0);
  CHECK(Taken(reports, 0).empty());
  reports.Receive(1, Cached({1}), true, 0);
  CHECK(!Taken(reports, 0).empty());
}

TEST(reports_of_a_rank_are_joined_by_the_older_ones_knowledge) {
  HostReports reports({0, 1}, kMillisecond);
  reports.Receive(0, Cached({5}, 7), true, 0);
  reports.Receive(0, Cached({6}, 8), true, 0);  // which may have evicted 5
  const Reports taken = Taken(reports, kMillisecond);
  CHECK_EQ(taken[0].second.applied, uint64_t{7});
  CHECK(taken[0].second.cached == (std::vector<uint64_t>{5, 6}));
}

TEST(a_rank_that_leaves_is_announced_at_once) {
  HostReports reports({0, 1}, kForever);
  reports.Receive(1, FreshNamed("x"), true, 0);
  CHECK(Taken(reports, kSecond).empty());
  Report leaving;
  leaving.leaving = true;
  leaving.reason = "enough";
  reports.Receive(0, leaving, true, 5);
  const Reports taken = Taken(reports, 5);
  CHECK_EQ(taken.size(), size_t{2});
  std::map<int, Report> by_rank;
  for (const auto& [ranks, report] : taken) by_rank[ranks[0]] = report;
  CHECK(by_rank[0].leaving);
  CHECK_EQ(by_rank[0].reason, std::string("enough"));
  CHECK_EQ(by_rank[1].fresh[0].name, std::string("x"));
}

TEST(malformed_combined_reports_are_refused) {
  const std::string whole = EncodeCombined({{Encode(Cached({1, 2, 3})), {2, 3}}});
  Reports reports;
  CHECK(DecodeCombined(whole, &reports));
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    CHECK(!DecodeCombined(whole.substr(0, bytes), &reports));
  }
  CHECK(!DecodeCombined(EncodeCombined({{"nonsense", {2, 3}}}), &reports));
}

// In a round, all ranks make one blocking allreduce. Rank 0 exchanges one message each way per
// neighbour and per other host, the first rank of another host one per neighbour and one with rank
// 0, and all others one. At the end every rank leaves, which may take one more message.
TEST(a_round_takes_one_message_each_way_per_neighbour_and_host) {
  constexpr int kRounds = 200;
  const Hosts hosts = {0, 0, 0, 1, 1, 1, 2, 2, 2};
  EngineConfig config;
  config.cycle_time_ns = kSecond;  // so that reports wait for a rank that has lost its core
  PlayOn(hosts, config, [&](Player& player) {
    std::vector<float> data(10, 1.0f);
    CHECK_OK(player.Allreduce("x", data));
    const int64_t sent = player.engine->stats().control_messages_sent;
    const int64_t received = player.engine->stats().control_messages_received;
    for (int round = 0; round < kRounds; ++round) {
      // The other ranks of a host are later than its first.
      const TimeNs until = NowNs() + (player.rank % 3) * 100 * kMicrosecond;
      while (NowNs() < until) std::this_thread::yield();
      CHECK_OK(player.Allreduce("x", data));
    }
    const int64_t each = player.rank == 0 ? 2 + 2 : player.rank % 3 == 0 ? 2 + 1 : 1;
    const int64_t slack = 2 * each;  // a peer may be a round ahead, or shutting down
    CHECK(std::abs(player.engine->stats().control_messages_sent - sent - each * kRounds) <= slack);
    CHECK(std::abs(player.engine->stats().control_messages_received - received - each * kRounds) <=
          slack);
  });
}

// Names longer than the pipes are sent in pieces while ranks are in collectives.
TEST(agreements_longer_than_a_pipe_arrive) {
  PlayOn(
      {0, 0, 1, 1}, {},
      [](Player& player) {
        for (int step = 0; step < 3; ++step) {
          std::vector<std::vector<float>> data(40, std::vector<float>(2000, 1.0f));
          std::vector<int64_t> handles(data.size());
          for (size_t i = 0; i < data.size(); ++i) {
            const std::string name = std::string(500, 'n') + std::to_string(step * 100 + int(i));
            CHECK_OK(player.Submit(name, data[i], ReduceOp::kSum, &handles[i]));
          }
          for (size_t i = 0; i < data.size(); ++i) {
            CHECK_OK(player.Wait(handles[i]));
            CHECK_EQ(data[i].back(), 4.0f);
          }
        }
      },
      256);
}

TEST(a_mismatch_on_other_hosts_names_every_rank) {
  PlayOn({0, 0, 1, 1}, {}, [](Player& player) {
    std::vector<float> data(player.rank == 3 ? 5 : 4, 1.0f);
    const Status status = player.Allreduce("x", data);
    CHECK(status.code() == Code::kMismatch);
    CHECK(Contains(status.message(), "ranks 0-2: [4]"));
    CHECK(Contains(status.message(), "rank 3: [5]"));
  });
}

TEST(a_stall_on_another_host_names_who_is_missing) {
  EngineConfig config;
  config.stall.shutdown_ns = kStallLimit;
  PlayOn({0, 0, 1, 1}, config, [](Player& player) {
    std::vector<float> data(4, 1.0f);
    if (player.rank == 2) {
      // The first rank of its host still forwards its neighbours' reports.
      std::vector<float> other(4, 1.0f);
      CHECK(!player.Allreduce("other", other).ok());
      return;
    }
    const Status status = player.Allreduce("x", data);
    CHECK(status.code() == Code::kStalled);
    CHECK(Contains(status.message(), "'x': submitted by ranks 0,1,3, missing rank 2"));
  });
}

// The first rank of another host passes on rank 0's agreement late: here, only after its neighbour
// has checked for failures after the end of rank 0.
struct HeldBack {
  std::atomic<bool> ended{false};  // whether rank 0 has
  std::atomic<int> looks{0};       // checks of rank 3 since then
};

class HoldingTransport final : public ForwardingTransport {
 public:
  HoldingTransport(std::unique_ptr<Transport> inner, HeldBack& held)
      : ForwardingTransport(std::move(inner)), held_(held) {}
  bool Poll(int* peer, std::string* message) override {
    return (rank() != 2 || held_.looks >= 2) && ForwardingTransport::Poll(peer, message);
  }
  Status CheckPeers() override {
    const bool ended = held_.ended;
    const Status status = ForwardingTransport::CheckPeers();
    if (rank() == 3 && ended) ++held_.looks;
    return status;
  }

 private:
  HeldBack& held_;
};

TEST(an_end_that_is_agreed_on_is_told_in_the_same_words_everywhere) {
  EngineConfig config;
  config.stall.shutdown_ns = kStallLimit;
  HeldBack held;
  std::vector<Status> told(4);
  const auto play = [&](Player& player) {
    std::vector<float> data(4, 1.0f);
    told[static_cast<size_t>(player.rank)] =
        player.Allreduce(player.rank == 1 ? "another tensor of a long name" : "x", data);
    if (player.rank == 0) held.ended = true;
  };
  PlayOn({0, 0, 1, 1}, config, play, 0, [&](int rank, World& world) {
    if (rank < 2) return;
    world.transport = std::make_unique<HoldingTransport>(std::move(world.transport), held);
  });
  const auto reason = [&](size_t rank) {
    const std::string& text = told[rank].message();
    return text.substr(std::min(text.size(), text.find("stalled for more than")));
  };
  CHECK(Contains(reason(0), "missing"));
  for (size_t rank = 0; rank < 4; ++rank) {
    CHECK(told[rank].code() == Code::kStalled);
    CHECK_EQ(told[rank].rank(), told[0].rank());
    CHECK_EQ(reason(rank), reason(0));
  }
}

TEST(a_failure_on_another_host_reaches_all) {
  PlayOn({0, 0, 1, 1}, {}, [](Player& player) {
    std::vector<float> data(4, 1.0f);
    const Status started = player.Allreduce("all have started", data);
    if (player.rank == 3) {
      CHECK_OK(started);
      CHECK(player.engine->Abort("its script broke", kTestTimeout));
      return;
    }
    // Rank 3 may fail while another rank still waits for the first sum.
    const Status status = started.ok() ? player.Allreduce("x", data) : started;
    CHECK(status.code() == Code::kPeerLost);
    CHECK(Contains(status.message(), "rank 3"));
    CHECK(Contains(status.message(), "its script broke"));
  });
}
