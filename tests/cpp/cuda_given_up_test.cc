// Calls of NVIDIA's driver and of NCCL that never return: those who wait get their error without
// the thread that is in one (csrc/base/call_watch.h), whatever call it is.
#include <atomic>

#include "cuda_engine_world.h"

using namespace hororing_test;

namespace {

constexpr int kStuck = 1;  // the rank, and its device

void AwaitHanging() {
  const TimeNs limit = After(NowNs(), kPatience);
  while (fake_gpu_hanging() == 0 && NowNs() < limit) std::this_thread::yield();
}

// Two ranks whose communicator is made, but for `first`, with a deadline of a second. Rank 1 stays
// in `function` from then on; `script` is what it does; rank 0 waits for it in vain.
void PlayStuck(const char* function, bool first,
               const std::function<void(Player&, OnDevice&)>& script) {
  std::atomic<int> ready{0};
  Play(
      2, CudaConfig(),
      [&](Player& player) {
        OnDevice gpu{player};
        std::vector<float> data(10), other(10);
        if (!first) CHECK_OK(gpu.Allreduce("before", data, 1.0f));
        ++ready;
        while (ready < 2) std::this_thread::yield();
        if (player.rank == kStuck) {
          fake_gpu_hang_in(function, kStuck);
          script(player, gpu);
          CHECK(player.engine->given_up());
          CHECK(!player.engine->Shutdown("", kPatience));
          // As the C interface does. The thread is let go, and stops before it touches anything.
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
        CHECK(player.engine->Shutdown("", kPatience));
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
    bool first;  // of the making of a communicator
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

// NCCL before 2.22 aborts communicators one by one, each when its kernels have ended, and here
// those of the first lie in the stream behind one of the other.
TEST(an_abort_that_never_ends_keeps_no_error_from_anybody_and_shutdown_returns) {
  const EngineConfig base = CudaConfig();
  fake_gpu_set("nccl_version", 22005);
  // Never destroyed: streams of engines that were given up are at work on it.
  using Tensors = std::vector<std::vector<float>>;
  static auto* const kept = new std::vector<Tensors>(3, Tensors(3, std::vector<float>(10)));
  std::atomic<int> ready{0};
  Play(
      3, base,
      [&](Player& player) {
        OnDevice gpu{player};
        const auto meet = [&](int times) {
          ++ready;
          while (ready < 3 * times) std::this_thread::yield();
        };
        int64_t id = 0;
        CHECK_OK(player.AddSet({0, 1}, &id));
        std::vector<int32_t> sets = {kWorldSet, static_cast<int32_t>(id), kWorldSet};
        const bool both = player.rank != 2;
        if (!both) sets = {kWorldSet, kWorldSet};
        auto& data = kept->at(static_cast<size_t>(player.rank));
        for (size_t i = 0; i < 2; ++i) {  // communicators are made
          if (i == 1 && !both) continue;
          CHECK_OK(gpu.Allreduce("x", data[i], 1.0f, ReduceOp::kSum, sets[i]));
        }
        meet(1);
        fake_gpu_set("hang_after", 0);
        for (size_t i = 0; i < sets.size(); ++i) {
          int64_t handle = 0;
          const std::string name = i == 0 ? "first" : sets[i] == kWorldSet ? "last" : "between";
          CHECK_OK(gpu.Start(name, data[i], 1.0f, &handle, ReduceOp::kSum, sets[i]));
          CHECK_OK(gpu.Finish(handle));
        }
        meet(2);
        std::vector<float> other(10);
        Status status;
        while ((status = player.Allreduce("z", other)).ok()) {
        }
        CHECK(status.code() == Code::kTransport || status.code() == Code::kPeerLost);
        CHECK(Contains(status.message(), "the device did not come to an end with 'first'"));
        const TimeNs begin = NowNs();
        CHECK_EQ(player.engine->Shutdown("", kPatience), !both);
        CHECK(NowNs() - begin < 20 * kSecond);
        CHECK_EQ(player.engine->given_up(), both);
        CHECK(Contains(player.Allreduce("z", other).message(), "'first'"));
        both ? static_cast<void>(player.engine.release()) : player.engine.reset();
      },
      [](int, EngineConfig& config) { config.timeout_ns = kSecond; });
  fake_gpu_reset();
  NothingForbidden();
}
