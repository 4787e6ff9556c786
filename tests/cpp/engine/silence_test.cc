// Ranks that are stopped or cut off: ranks that wait for them in the negotiation get an error at
// the time limit. Ranks that are only slow do not count as stopped.
#include <atomic>
#include <chrono>
#include <thread>

#include "forwarding_transport.h"
#include "hosts_engine_world.h"

using namespace hororing_test;

namespace {

// The transport of a rank that can be stopped as a whole, as by SIGSTOP.
class StoppableTransport final : public ForwardingTransport {
 public:
  StoppableTransport(std::unique_ptr<Transport> inner, std::atomic<bool>& stopped)
      : ForwardingTransport(std::move(inner)), stopped_(stopped) {}
  bool Poll(int* peer, std::string* message) override {
    Stop();
    return ForwardingTransport::Poll(peer, message);
  }
  Status CheckPeers() override {
    Stop();
    return ForwardingTransport::CheckPeers();
  }

 private:
  void Stop() {
    while (stopped_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::atomic<bool>& stopped_;
};

// Stops rank `stops` after the first step; the others try another step and check the error.
void PlayStopped(const Hosts& hosts, int stops, const EngineConfig& config,
                 const std::function<void(const Status&)>& check) {
  std::atomic<bool> stopped{false};
  std::atomic<size_t> ready{0}, done{0};
  const auto adjust = [&](int rank, World& world) {
    if (rank != stops) return;
    world.transport = std::make_unique<StoppableTransport>(std::move(world.transport), stopped);
  };
  const auto script = [&](Player& player) {
    std::vector<float> data(1000, 1.0f);
    CHECK_OK(player.Allreduce("x", data));
    ++ready;
    while (ready < hosts.size()) std::this_thread::yield();
    if (player.rank == stops) {
      stopped = true;
      while (done + 1 < hosts.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      stopped = false;
      check(player.Allreduce("x", data));  // gets the same error
      return;
    }
    while (!stopped) std::this_thread::yield();
    check(player.Allreduce("x", data));
    ++done;
  };
  PlayOn(hosts, config, script, 0, adjust);
}

}  // namespace

TEST(all_others_end_when_a_rank_is_stopped_whichever_it_is) {
  EngineConfig config;
  config.timeout_ns = 2 * kSecond;
  struct Case {
    Hosts hosts;
    int stops;
  };
  // The coordinator; the first and the last of another host.
  for (const Case& each : {Case{{0, 0, 0}, 0}, Case{{0, 1, 1}, 1}, Case{{0, 1, 1}, 2}}) {
    PlayStopped(each.hosts, each.stops, config, [&](const Status& status) {
      CHECK(status.code() == Code::kTransport);
      CHECK_EQ(status.rank(), each.stops);
      const std::string host = "host" + std::to_string(each.hosts[static_cast<size_t>(each.stops)]);
      const std::string text = "rank " + std::to_string(each.stops) + " on host " + host +
                               (each.stops == 0 ? ", which coordinates," : "") +
                               " has given no sign of life for 2 s";
      if (!Contains(status.message(), text)) Fail(__FILE__, __LINE__, status.message());
    });
  }
}

TEST(a_stopped_coordinator_is_a_stall_where_that_limit_is_set) {
  EngineConfig config;
  config.stall.shutdown_ns = 2 * kSecond;
  PlayStopped({0, 1, 1}, 0, config, [](const Status& status) {
    CHECK(status.code() == Code::kStalled);
    CHECK_EQ(status.rank(), 0);
    CHECK(Contains(status.message(), "HORORING_STALL_SHUTDOWN_S sets the limit"));
  });
}

// A batch system suspends the ranks one after the other, and resumes them in any order.
TEST(a_rank_that_was_stopped_itself_does_not_count_the_silence_of_others_in_that_time) {
  EngineConfig config;
  config.timeout_ns = 2 * kSecond;
  const auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  std::atomic<bool> stopped[2] = {{false}, {false}};
  std::atomic<int> ready{0};
  const auto adjust = [&](int rank, World& world) {
    world.transport =
        std::make_unique<StoppableTransport>(std::move(world.transport), stopped[rank]);
  };
  const auto script = [&](Player& player) {
    std::vector<float> data(1000, 1.0f);
    CHECK_OK(player.Allreduce("x", data));
    ++ready;
    while (ready < 2) std::this_thread::yield();
    if (player.rank == 1) {
      stopped[1] = true;
      sleep(300);
      stopped[0] = true;
      sleep(3000);
      stopped[0] = false;
      sleep(100);
      stopped[1] = false;
    }
    CHECK_OK(player.Allreduce("x", data));
  };
  PlayOn({0, 0}, config, script, 0, adjust);
}

// Also through the first rank of another host.
TEST(callers_that_wait_for_one_another_get_an_error_and_no_others) {
  EngineConfig config;
  config.stall.deadlock_ns = 200 * kMillisecond;
  PlayOn({0, 1, 1}, config, [](Player& player) {
    std::vector<float> data(1000, 1.0f);
    // The others wait for longer than that time, but the last rank is not blocked.
    if (player.rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    CHECK_OK(player.Allreduce("x", data));
    const Status status = player.Allreduce(player.rank == 1 ? "metric" : "gradient", data);
    CHECK(status.code() == Code::kStalled);
    CHECK(Contains(status.message(), "allreduce 'metric': submitted by rank 1, missing ranks 0,2"));
    const TimeNs begin = NowNs();
    CHECK(player.engine->Shutdown("", kTestTimeout));
    CHECK(NowNs() - begin < 3 * kSecond);
  });
}

TEST(a_rank_that_computes_for_long_is_waited_for) {
  EngineConfig config;
  config.timeout_ns = 1500 * kMillisecond;
  PlayOn({0, 0, 1, 1}, config, [](Player& player) {
    std::vector<float> data(1000, 1.0f);
    for (const int slow : {0, 3}) {
      if (player.rank == slow) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
      CHECK_OK(player.Allreduce("x", data));
    }
  });
}
