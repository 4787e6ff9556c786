// An engine that is abandoned in a call of NCCL tells its peers, whose own deadline is far away.
#include <atomic>
#include <thread>

#include "cuda_engine_world.h"

using namespace hororing_test;

TEST(peers_hear_at_once_of_a_rank_that_was_given_up_in_a_call_of_nccl) {
  constexpr int kStuck = 1;
  constexpr TimeNs kSoon = 2 * kSecond;
  // Never destroyed: streams of the abandoned engine still use it.
  static auto* const data = new std::vector<std::vector<float>>(2, std::vector<float>(10));
  std::atomic<int> ready{0};
  std::atomic<TimeNs> given_up_ns{0};
  const auto script = [&](Player& player) {
    OnDevice gpu{player};
    std::vector<float>& mine = data->at(static_cast<size_t>(player.rank));
    CHECK_OK(gpu.Allreduce("before", mine, 1.0f));
    ++ready;
    while (ready < 2) std::this_thread::yield();
    int64_t handle = 0;
    if (player.rank == kStuck) {
      fake_gpu_hang_in("ncclGroupEnd", kStuck);
      CHECK_OK(gpu.Start("x", mine, 1.0f, &handle));
      CHECK(player.Wait(handle, 200 * kMillisecond).code() == Code::kTransport);
      given_up_ns = NowNs();
      CHECK(!player.engine->Shutdown("", kTestTimeout));
      static_cast<void>(player.engine.release());  // as the C interface does
      return;
    }
    // "x" ends in the stream of this rank, and fails with the engine.
    std::vector<float> other(10);
    Status status = gpu.Start("x", mine, 1.0f, &handle);
    if (status.ok()) status = player.Wait(handle);
    if (status.ok()) status = player.Allreduce("y", other);
    CHECK(status.code() == Code::kTransport);
    CHECK_EQ(status.rank(), kStuck);
    const std::string wanted = "rank 1 failed: ncclGroupEnd of NCCL has not returned";
    if (!Contains(status.message(), wanted)) Fail(__FILE__, __LINE__, status.message());
    CHECK(given_up_ns == 0 || NowNs() - given_up_ns < kSoon);
    fake_gpu_hang_in(nullptr, -1);
    fake_gpu_synchronize(gpu.stream);
    CHECK(player.engine->Shutdown("", kTestTimeout));
    player.engine = nullptr;
  };
  Play(2, CudaConfig(), script, [](int rank, EngineConfig& config) {
    if (rank == kStuck) config.timeout_ns = kSecond;
  });
  fake_gpu_reset();
  NothingForbidden();
}
