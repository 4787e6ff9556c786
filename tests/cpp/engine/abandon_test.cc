// A call of the transport that never returns: waiting callers get their error without the thread in
// that call. If the call returns after all, that thread touches nothing any more.
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/call_watch.h"
#include "base/process.h"
#include "engine_world.h"
#include "forwarding_transport.h"

using namespace hororing_test;

namespace {

constexpr int kStuck = 1;  // the rank

// Holds a thread until the gate opens.
class Gate {
 public:
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    inside_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void AwaitSomebody() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return inside_; });
  }
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false, inside_ = false;  // GUARDED_BY(mutex_)
};

// The state of the thread in the call; it outlives the test.
struct Stuck {
  Gate gate;
  CallWatch* calls = nullptr;
  std::atomic<bool> went_on{false};
};

// A transport whose first send of data returns only when the gate opens, as it may in MPI.
class StuckTransport final : public ForwardingTransport {
 public:
  StuckTransport(std::unique_ptr<Transport> inner, Stuck& stuck)
      : ForwardingTransport(std::move(inner)), stuck_(stuck) {}

  const char* name() const override { return "stuck"; }
  Request Send(int peer, const void* data, size_t bytes) override {
    if (begun_) {
      const CallWatch::Call call(stuck_.calls, {"Block"});
      stuck_.gate.Pass();
    }
    stuck_.went_on = stuck_.went_on || begun_;
    return ForwardingTransport::Send(peer, data, bytes);
  }
  void Post(int peer, std::string message) override {
    begun_ = true;
    ForwardingTransport::Post(peer, std::move(message));
  }
  void Watch(CallWatch* calls) override { stuck_.calls = calls; }

 private:
  Stuck& stuck_;
  bool begun_ = false;  // the first negotiation has begun: the next send gets stuck
};

// Rank 1 is stuck in the exchange of "x"; rank 0 waits for it. Both have the limit `timeout_ns`.
void PlayStuck(TimeNs timeout_ns, std::vector<ProcessIdentity> neighbours,
               const std::function<void(Player&, Stuck&)>& on_stuck) {
  auto* const stuck = new Stuck;  // never freed: the thread stays in the call
  auto transports = MakeInprocWorld(2, 20 * kMicrosecond);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      EngineConfig config;
      config.backend = "host";
      config.timeout_ns = timeout_ns;
      Player player;
      player.rank = rank;
      player.size = 2;
      const auto make_world = [&](World* world) {
        world->transport = std::move(transports[static_cast<size_t>(rank)]);
        world->topology = MakeTopology(rank, {"host", "host"});
        if (rank != kStuck) return Status::Ok();
        world->local_processes = neighbours;
        world->transport = std::make_unique<StuckTransport>(std::move(world->transport), *stuck);
        return Status::Ok();
      };
      CHECK_OK(Start(config, make_world, &player));
      if (rank == kStuck) {
        on_stuck(player, *stuck);
        // As the C interface does.
        CHECK(!player.engine->Shutdown("", kTestTimeout));
        static_cast<void>(player.engine.release());
        return;
      }
      std::vector<float> data(1000, 1.0f);
      const Status failed = player.Allreduce("x", data);
      CHECK(failed.code() == Code::kTransport || failed.code() == Code::kPeerLost);
      CHECK(player.engine->Shutdown("", kTestTimeout));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(who_waits_for_a_call_that_does_not_return_gets_an_error) {
  PlayStuck(2 * kSecond, {}, [](Player& player, Stuck& stuck) {
    std::vector<float> data(1000, 1.0f), other(10, 1.0f);
    int64_t handle = 0, unnegotiated = 0;
    CHECK(player.Submit("x", data, ReduceOp::kSum, &handle).ok());
    stuck.gate.AwaitSomebody();
    CHECK(player.Submit("y", other, ReduceOp::kSum, &unnegotiated).ok());
    const Status failed = player.Wait(handle, 200 * kMillisecond);
    CHECK(failed.code() == Code::kTransport);
    for (const char* part : {"allreduce 'x' (REDUCE)", "Block of the transport 'stuck'",
                             "in a batch of allreduce 'x'"}) {
      CHECK(Contains(failed.message(), part));
    }
    CHECK(Contains(player.Wait(unnegotiated).message(), "allreduce 'y'"));
    CHECK(player.engine->state() == Engine::State::kFailed);
    CHECK(player.engine->abandoned());
    CHECK(Contains(player.Allreduce("z", other).message(), "Block of the transport 'stuck'"));
    // The data belongs to the caller again: the loop must not touch it when it comes back.
    data.assign(data.size(), 7.0f);
    stuck.gate.Open();
    stuck.calls->AwaitParked();
    CHECK(!stuck.went_on);
    for (const float each : data) CHECK_EQ(each, 7.0f);
  });
}

TEST(a_neighbours_death_is_told_although_the_loop_is_stuck) {
  // A former process had this pid.
  const std::vector<ProcessIdentity> gone = {{getpid(), 1}, {}};
  PlayStuck(10 * kSecond, gone, [](Player& player, Stuck& stuck) {
    std::vector<float> data(1000, 1.0f);
    const TimeNs begin = NowNs();
    const Status failed = player.Allreduce("x", data);
    CHECK(NowNs() - begin < 9 * kSecond);
    CHECK(failed.code() == Code::kPeerLost);
    CHECK_EQ(failed.rank(), 0);
    CHECK(Contains(failed.message(), "rank 0 (pid " + std::to_string(getpid()) + ") died, and"));
    stuck.gate.Open();
    stuck.calls->AwaitParked();
  });
}

TEST(calls_are_as_old_as_looks_have_seen) {
  CallWatch calls;
  CHECK_EQ(calls.Elapsed(0), 0);
  CHECK(calls.Abandon().call == nullptr);
  for (int i = 0; i < 2; ++i) {
    const CallWatch::Call call(&calls, {"A"});
    CHECK_EQ(calls.Elapsed(10), 0);
    CHECK_EQ(calls.Elapsed(30), 20);
    // A long time between two checks means that the process was stopped.
    CHECK_EQ(calls.Elapsed(100 * kSecond), 20 + kSecond);
  }
  CHECK(calls.Abandon().call == nullptr);  // it has returned
  CHECK_EQ(calls.Elapsed(200 * kSecond), 0);
  CHECK(!calls.abandoned());
}
