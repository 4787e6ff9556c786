// A rank that aborts, or shuts down, while others block it in a batch.
#include <atomic>
#include <chrono>
#include <thread>

#include "forwarding_transport.h"
#include "hosts_engine_world.h"

using namespace hororing_test;

namespace {

// Blocks its rank when it begins to send.
class HeldTransport final : public ForwardingTransport {
 public:
  HeldTransport(std::unique_ptr<Transport> inner, std::atomic<bool>& held,
                std::atomic<bool>& inside)
      : ForwardingTransport(std::move(inner)), held_(held), inside_(inside) {}
  Request Send(int peer, const void* data, size_t bytes) override {
    while (held_) {
      inside_ = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return ForwardingTransport::Send(peer, data, bytes);
  }

 private:
  std::atomic<bool>&held_, &inside_;
};

constexpr int kHolds = 1;  // the rank

// Two hosts with one rank each, or with two ranks each.
const Hosts kHosts[] = {{0, 1}, {0, 1, 0, 1}};

// All ranks have begun a batch, and rank 1 blocks it, when rank 0 calls `ends`. `others` gets the
// errors of the other ranks.
void PlayHeld(const Hosts& hosts, const std::function<void(Player&, int64_t)>& ends,
              const std::function<void(const Status&)>& others) {
  std::atomic<bool> held{false}, inside{false};
  const auto adjust = [&](int rank, World& world) {
    if (rank != kHolds) return;
    world.transport = std::make_unique<HeldTransport>(std::move(world.transport), held, inside);
  };
  const auto script = [&](Player& player) {
    std::vector<float> data(1 << 20, 1.0f);
    CHECK_OK(player.Allreduce("x", data));
    if (player.rank == kHolds) held = true;
    while (!held) std::this_thread::yield();
    int64_t handle = 0;
    CHECK_OK(player.Submit("x", data, ReduceOp::kSum, &handle));
    if (player.rank != 0) return others(player.Wait(handle));
    while (!inside) std::this_thread::yield();
    ends(player, handle);
    held = false;
  };
  PlayOn(hosts, {}, script, 0, adjust);
}

}  // namespace

TEST(who_breaks_off_leaves_a_batch_that_others_hold_up) {
  for (const Hosts& hosts : kHosts) {
    PlayHeld(
        hosts,
        [](Player& player, int64_t handle) {
          CHECK(player.engine->Abort("ValueError: bad data", kTestTimeout / 6));
          const Status status = player.Wait(handle);
          CHECK(status.code() == Code::kPeerLost);
          CHECK_EQ(status.rank(), 0);
          CHECK(Contains(status.message(), "ValueError: bad data"));
        },
        [](const Status& status) {
          CHECK(status.code() == Code::kPeerLost);
          CHECK_EQ(status.rank(), 0);
          CHECK(Contains(status.message(), "rank 0 failed: ValueError: bad data"));
        });
  }
}

// So that none of its threads is left.
TEST(an_engine_that_does_not_shut_down_in_time_can_be_ended) {
  PlayHeld(
      kHosts[0],
      [](Player& player, int64_t) {
        CHECK(!player.engine->Shutdown("", kSecond / 10));
        CHECK(player.engine->Abort("it took too long", kTestTimeout / 6));
        player.engine.reset();
      },
      [](const Status& status) { CHECK(status.code() == Code::kPeerLost); });
}
