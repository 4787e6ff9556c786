// Calls of NVIDIA's driver and of NCCL that never return: those who wait get their error without
// the thread that is in one (csrc/base/call_watch.h), whatever call it is.
#include <thread>

#include "cuda_engine_world.h"

using namespace hororing_test;

namespace {

constexpr int kStuck = 1;  // the rank, and its device

void AwaitHanging() {
  const TimeNs limit = After(NowNs(), kTestTimeout);
  while (fake_gpu_hanging() == 0 && NowNs() < limit) std::this_thread::yield();
}

// Plays two ranks with a deadline of a second; unless `first`, they have a communicator. Rank 1
// then runs `script` and hangs in `function`, while rank 0 waits for it until the deadline.
void PlayStuck(const char* function, bool first,
               const std::function<void(Player&, OnDevice&)>& script) {
  InStep step(2);
  Play(
      2, CudaConfig(),
      [&](Player& player) {
        OnDevice gpu{player};
        std::vector<float> data(10), other(10);
        if (!first) CHECK_OK(gpu.Allreduce("before", data, 1.0f));
        step.Wait();
        if (player.rank == kStuck) {
          fake_gpu_hang_in(function, kStuck);
          script(player, gpu);
          CHECK(player.engine->abandoned());
          CHECK(!player.engine->Shutdown("", kTestTimeout));
          // As the C interface does. The thread then returns, and stops before it uses anything.
          static_cast<void>(player.engine.release());
          fake_gpu_hang_in(nullptr, -1);
          return;
        }
        int64_t handle = 0;
        Status status = gpu.Start("x", data, 1.0f, &handle);
        if (status.ok()) status = player.Wait(handle);
        if (status.ok()) status = player.Allreduce("y", other);
        CHECK(status.code() == Code::kTransport || status.code() == Code::kPeerLost);
        fake_gpu_synchronize(gpu.stream);
        CHECK(player.engine->Shutdown("", kTestTimeout));
        player.engine = nullptr;
      },
      [](int, EngineConfig& config) { config.timeout_ns = kSecond; });
  fake_gpu_reset();
  NothingForbidden();
}

}  // namespace

TEST(who_waits_for_a_call_of_nccl_or_the_driver_that_does_not_return_gets_an_error) {
  struct Case {
    const char* function;
    const char* library;
    bool first;  // the call is one that creates the communicator
  };
  for (const Case& each : {Case{"ncclGroupEnd", "NCCL", false},
                           {"ncclAllReduce", "NCCL", false},
                           {"cuStreamWaitEvent", "NVIDIA's driver", false},
                           {"ncclCommInitRankConfig", "NCCL", true}}) {
    PlayStuck(each.function, each.first, [&](Player& player, OnDevice& gpu) {
      std::vector<float> data(10), other(10, 1.0f);
      int64_t handle = 0, unnegotiated = 0;
      CHECK_OK(gpu.Start("x", data, 1.0f, &handle));
      AwaitHanging();
      CHECK_OK(player.Submit("y", other, ReduceOp::kSum, &unnegotiated));
      const Status failed = player.Wait(handle, 200 * kMillisecond);
      CHECK(failed.code() == Code::kTransport);
      for (const std::string& part :
           {std::string("allreduce 'x' (REDUCE)"),
            std::string(each.function) + " of " + each.library + " has not returned",
            std::string("in a batch of allreduce 'x'")}) {
        if (!Contains(failed.message(), part)) Fail(__FILE__, __LINE__, failed.message());
      }
      CHECK(Contains(player.Wait(unnegotiated).message(), "allreduce 'y' (NEGOTIATE)"));
      fake_gpu_synchronize(gpu.stream);
    });
  }
}

// NCCL before 2.22 aborts communicators one by one, each when its kernels have ended. Here the
// kernels of the first communicator are in the stream behind a kernel of the second.
TEST(an_abort_that_never_ends_keeps_no_error_from_anybody_and_shutdown_returns) {
  const EngineConfig base = CudaConfig();
  fake_gpu_set("nccl_version", 22005);
  // Never destroyed: streams of abandoned engines still use it.
  using Tensors = std::vector<std::vector<float>>;
  static auto* const kept = new std::vector<Tensors>(3);
  InStep step(3);
  Play(
      3, base,
      [&](Player& player) {
        OnDevice gpu{player};
        const bool both = player.rank != 2;
        StickBehindOneAnother(player, gpu, step, kept->at(static_cast<size_t>(player.rank)));
        std::vector<float> other(10);
        Status status;
        while ((status = player.Allreduce("z", other)).ok()) {
        }
        CHECK(status.code() == Code::kTransport || status.code() == Code::kPeerLost);
        CHECK(Contains(status.message(), "GPU batch 'first' timed out"));
        const TimeNs begin = NowNs();
        CHECK_EQ(player.engine->Shutdown("", kTestTimeout), !both);
        CHECK(NowNs() - begin < 20 * kSecond);
        CHECK_EQ(player.engine->abandoned(), both);
        CHECK(Contains(player.Allreduce("z", other).message(), "'first'"));
        both ? static_cast<void>(player.engine.release()) : player.engine.reset();
      },
      [](int, EngineConfig& config) { config.timeout_ns = kSecond; });
  fake_gpu_reset();
  NothingForbidden();
}

// A first use of a device that does not return, on a thread of the script's: not what the engine is
// in, nor what it waits for when it ends.
TEST(an_abort_does_not_wait_for_a_device_that_a_caller_never_gets) {
  std::thread stuck;
  Play(2, CudaConfig(), [&](Player& player) {
    if (player.rank != kStuck) {
      std::vector<float> data(10);
      CHECK(player.Allreduce("x", data).code() == Code::kPeerLost);
      return;
    }
    fake_gpu_hang_in("cuDevicePrimaryCtxRetain", -1);
    Engine* const engine = player.engine.get();
    stuck = std::thread([engine] {
      StreamEvents events;
      TensorEntry entry;
      static_cast<void>(engine->MarkReady(kStuck, {nullptr}, &events, &entry));
    });
    AwaitHanging();
    CHECK(engine->Abort("no more", 10 * kSecond));
    fake_gpu_hang_in(nullptr, -1);
    stuck.join();
  });
  fake_gpu_reset();
  NothingForbidden();
}

// A rank that needs that device to take part gives up, as if the engine's loop hung in the call.
TEST(a_rank_that_has_joined_does_not_wait_for_ever_for_a_device_that_a_caller_never_gets) {
  std::thread stuck;
  PlayStuck("cuStreamCreateWithPriority", /*first=*/true, [&](Player& player, OnDevice&) {
    Engine* const engine = player.engine.get();  // which is leaked
    stuck = std::thread([engine] {
      StreamEvents events;
      TensorEntry entry;
      static_cast<void>(engine->MarkReady(kStuck, {nullptr}, &events, &entry));
    });
    AwaitHanging();
    int64_t last = 0;
    const Status failed = player.Join(&last);
    CHECK(failed.code() == Code::kTransport);
    if (!Contains(failed.message(), "of NVIDIA's driver has not returned")) {
      Fail(__FILE__, __LINE__, failed.message());
    }
  });
  stuck.join();
}
