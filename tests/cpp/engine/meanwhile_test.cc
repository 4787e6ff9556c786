// What arrives while a batch is on the wire, over TCP: the next agreement, or a failure.
#include <atomic>
#include <chrono>
#include <thread>

#include "engine_world.h"
#include "forwarding_transport.h"
#include "transport/tcp/tcp_transport.h"

using namespace hororing_test;

namespace {

struct Wire {
  std::atomic<bool> held{false};    // nothing moves
  std::atomic<bool> inside{false};  // a batch waits for it
  std::atomic<bool> spoil{false};   // send one malformed message
  std::atomic<int64_t> heard{-1};   // by rank 0, before what it waits for is sent
};

class HeldWire final : public ForwardingTransport {
 public:
  HeldWire(std::unique_ptr<Transport> inner, Wire& wire)
      : ForwardingTransport(std::move(inner)), wire_(wire) {}
  void SetWaitLimits(WaitLimits wait_limits) override {
    meanwhile_ = wait_limits.meanwhile;
    ForwardingTransport::SetWaitLimits(std::move(wait_limits));
  }
  bool Done(Request request) override { return !Held() && ForwardingTransport::Done(request); }
  Status Wait(Request request, TimeNs deadline) override {
    while (Held()) continue;
    return ForwardingTransport::Wait(request, deadline);
  }

 private:
  bool Held() {
    if (!wire_.held) return false;
    wire_.inside = true;
    if (wire_.spoil.exchange(false)) Post(0, "?");
    meanwhile_();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
  }

  Wire& wire_;
  std::function<void()> meanwhile_ = [] {};
};

// Two ranks on two hosts. Both are in the batch of "x", which rank 1 holds up, when `script` runs.
// 32 MiB are more than the sockets hold, so that rank 0 waits, too.
void PlayHeld(const std::function<void(Player&, Wire&, int64_t x)>& script) {
  Wire wire;
  std::vector<Socket> listeners(2);
  std::vector<std::string> addresses(2);
  for (size_t i : {0, 1}) CHECK_OK(Listen("127.0.0.1", &listeners[i], &addresses[i]));
  const auto play = [&](int rank) {
    Player player;
    player.rank = rank;
    player.size = 2;
    EngineConfig config;
    config.timeout_ns = kTestTimeout;
    const auto make_world = [&](World* world) {
      TcpOptions options;
      options.key = std::string(32, 'k');
      std::unique_ptr<Transport> tcp;
      const Status made = TcpTransport::Make(
          rank, addresses, std::move(listeners[static_cast<size_t>(rank)]), options, &tcp);
      world->transport = std::move(tcp);
      if (rank == 1) {
        world->transport = std::make_unique<HeldWire>(std::move(world->transport), wire);
      }
      world->topology = MakeTopology(rank, {"host0", "host1"});
      return made;
    };
    CHECK_OK(Start(config, make_world, &player));
    std::vector<float> x(16 << 20, 1.0f), go(1, 1.0f);
    CHECK_OK(player.Allreduce("go", go));
    if (rank == 1) wire.held = true;
    while (!wire.held) std::this_thread::yield();
    int64_t handle = 0;
    CHECK_OK(player.Submit("x", x, ReduceOp::kSum, &handle));
    while (!wire.inside) std::this_thread::yield();
    script(player, wire, handle);
    if (rank == 0) CHECK(x == std::vector<float>(16 << 20, 2.0f));
    CHECK(player.engine->Shutdown("", kTestTimeout));
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
}

// Rank 1 waits until rank 0 has counted the messages before the next one.
void Begin(Player& player, Wire& wire) {
  if (player.rank == 0) wire.heard = player.engine->stats().control_messages_received.load();
  while (wire.heard < 0) std::this_thread::yield();
}

// Whether a control message arrives while "x" is on the wire.
bool Hears(Player& player, int64_t x, int64_t before) {
  const TimeNs deadline = After(NowNs(), 10 * kSecond);
  while (player.engine->stats().control_messages_received.load() == before) {
    if (NowNs() >= deadline) return false;
    std::this_thread::yield();
  }
  return player.handles->Poll(x) == HandleState::kPending;
}

}  // namespace

TEST(the_next_batch_is_agreed_while_one_is_on_the_wire) {
  PlayHeld([](Player& player, Wire& wire, int64_t x) {
    std::vector<float> y(1 << 20, 1.0f), z(player.rank == 0 ? 2 : 3, 1.0f);
    const int64_t heard = player.engine->stats().control_messages_received.load();
    int64_t handles[2];
    CHECK_OK(player.Submit("z", z, ReduceOp::kSum, &handles[0]));
    CHECK_OK(player.Submit("y", y, ReduceOp::kSum, &handles[1]));
    if (player.rank == 1) {
      CHECK(Hears(player, x, heard));
      wire.held = false;
    }
    CHECK_OK(player.Wait(x));
    CHECK(player.Wait(handles[0]).code() == Code::kMismatch);
    CHECK_OK(player.Wait(handles[1]));
    CHECK(y == std::vector<float>(1 << 20, 2.0f));
    CHECK_OK(player.Allreduce("y", y));
  });
}

TEST(a_rank_that_leaves_while_a_batch_is_on_the_wire_lets_it_end) {
  PlayHeld([](Player& player, Wire& wire, int64_t x) {
    Begin(player, wire);
    if (player.rank == 1) {
      CHECK(player.engine->Shutdown("", kTestTimeout));
      CHECK_OK(player.Wait(x));
      return;
    }
    CHECK(Hears(player, x, wire.heard));
    wire.held = false;
    CHECK_OK(player.Wait(x));
    std::vector<float> y(1, 1.0f);
    CHECK(player.Allreduce("y", y).code() == Code::kShutDown);
  });
}

TEST(a_failure_while_a_batch_is_on_the_wire_ends_the_job_after_it) {
  PlayHeld([](Player& player, Wire& wire, int64_t x) {
    std::vector<float> y(1, 1.0f);
    Begin(player, wire);
    if (player.rank == 1) {
      wire.spoil = true;
      static_cast<void>(player.Wait(x));
    } else {
      CHECK(Hears(player, x, wire.heard));
      wire.held = false;
      CHECK_OK(player.Wait(x));
    }
    const Status status = player.Allreduce("y", y);
    CHECK(Contains(status.message(), "malformed control message from rank 1"));
  });
}
