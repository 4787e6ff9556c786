// Calls of NVIDIA's driver and of NCCL that never return. Waiting callers get an error without the
// help of the thread in such a call (csrc/base/call_watch.h), whatever call it is.
#include <atomic>
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
      CHECK(Contains(player.Wait(unnegotiated).message(), "allreduce 'y'"));
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

// The queue of a GPU is full of work that waits for a collective, which waits for a dead peer. Then
// no thread gets into the driver: a caller stays in a launch, and so checks nothing, and the loop
// in a query. A thread of the engine's own aborts the collective, and the process can go on.
TEST(a_full_queue_behind_a_collective_that_never_ends_is_freed_without_any_caller) {
  constexpr int kRanks = 2;
  static auto* const data = new std::vector<std::vector<float>>(kRanks, std::vector<float>(10));
  const EngineConfig base = CudaConfig();
  const int64_t communicators = fake_gpu_count("communicators");
  std::atomic<int> abandoned{0};
  InStep step(kRanks);
  const auto script = [&](Player& player) {
    OnDevice gpu{player};
    std::vector<float>& mine = data->at(static_cast<size_t>(player.rank));
    CHECK_OK(gpu.Allreduce("before", mine, 1.0f));
    step.Wait();
    if (player.rank == 0) fake_gpu_set("hang_after", 0);
    step.Wait();
    int64_t handle = 0;
    CHECK_OK(gpu.Start("x", mine, 1.0f, &handle));
    CHECK_OK(gpu.Finish(handle));  // it is in the stream, and stays there
    step.Wait();
    if (player.rank == 0) fake_gpu_set("full_queue", fake_gpu_count("aborts") + 1);
    step.Wait();
    const TimeNs begin = NowNs();
    fake_gpu_synchronize(gpu.stream);  // as a caller in a launch, who does not look at the engine
    CHECK(NowNs() - begin < 10 * kSecond);
    std::vector<float> other(1);
    const Status status = player.Allreduce("z", other);
    CHECK(status.code() == Code::kTransport);
    CHECK(Contains(status.message(), "of NVIDIA's driver has not returned for"));
    CHECK(Contains(status.message(), "hororing aborts its GPU work"));
    const bool ended = player.engine->Shutdown("", kTestTimeout);  // this rank has heard of another
    CHECK_EQ(ended, !player.engine->abandoned());
    if (ended) return player.engine.reset();
    ++abandoned;
    CHECK(player.engine->AwaitFreed(kTestTimeout));
    static_cast<void>(player.engine.release());  // as the C interface does
  };
  Play(kRanks, base, script, [](int, EngineConfig& config) { config.timeout_ns = kSecond; });
  fake_gpu_reset();
  NothingForbidden();
  CHECK(abandoned > 0);
  CHECK_EQ(fake_gpu_count("communicators"), communicators);
}

// A thread of the script hangs in its first use of a device. The engine is not in this call, and
// does not wait for it when it ends.
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
