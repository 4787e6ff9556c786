// For the tests of whole worlds: N engines in one process, each with its own loop thread, over the
// in-process transport. The test threads act as training scripts.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "transport/factory.h"

namespace hororing_test {

using namespace hororing;

inline constexpr TimeNs kTestTimeout = 60 * kSecond;  // sanitizers are slow; a hang is a failure

struct Player {
  std::unique_ptr<Engine> engine;
  std::shared_ptr<HandleTable> handles = std::make_shared<HandleTable>();
  int rank = 0;
  int size = 1;
  Status started;

  // One float tensor, in place.
  static std::unique_ptr<TensorEntry> Entry(const std::string& name, std::vector<float>& data,
                                            ReduceOp op, int32_t process_set = kWorldSet) {
    auto entry = std::make_unique<TensorEntry>();
    entry->request.name = name;
    entry->request.process_set = process_set;
    entry->request.op = op;
    TensorView view;
    view.input = view.output = data.data();
    view.shape = {static_cast<int64_t>(data.size())};
    entry->request.tensors = {{view.dtype, view.shape}};
    entry->views = {view};
    return entry;
  }
  Status Submit(std::unique_ptr<TensorEntry> entry, bool blocking, int64_t* handle) {
    uint64_t id = 0;
    return engine->Submit(&entry, blocking, handle, &id);
  }
  Status Submit(const std::string& name, std::vector<float>& data, ReduceOp op, int64_t* handle,
                bool blocking = false, int32_t process_set = kWorldSet) {
    return Submit(Entry(name, data, op, process_set), blocking, handle);
  }
  Status Gather(const std::string& name, std::vector<float>& data, int64_t* handle) {
    auto entry = std::make_unique<TensorEntry>();
    entry->request.name = name;
    entry->request.kind = Collective::kAllgather;
    TensorView view;
    view.input = data.data();
    view.shape = {static_cast<int64_t>(data.size())};
    entry->request.tensors = {{view.dtype, view.shape}};
    entry->views = {view};
    return Submit(std::move(entry), /*blocking=*/false, handle);
  }
  // Returns from the engine every `slice`, as Python does to check for signals.
  Status Wait(int64_t handle, TimeNs slice = kTestTimeout) {
    Status status;
    const TimeNs deadline = After(NowNs(), kTestTimeout);
    while (engine->Wait(handle, slice, &status) != HandleState::kDone) {
      if (NowNs() >= deadline) return Status(Code::kInternal, "the test timed out");
    }
    handles->Release(handle);
    return status;
  }
  // Waits for a request, and takes its first result, if it has any.
  Status Take(int64_t handle, ResultBuffer* result) {
    Status status;
    if (engine->Wait(handle, kTestTimeout, &status) != HandleState::kDone) {
      return Status(Code::kInternal, "the test timed out");
    }
    static_cast<void>(handles->Take(handle, 0, result));
    handles->Release(handle);
    return status;
  }
  Status Allreduce(const std::string& name, std::vector<float>& data, ReduceOp op = ReduceOp::kSum,
                   int32_t process_set = kWorldSet) {
    int64_t handle = 0;
    const Status submitted = Submit(name, data, op, &handle, /*blocking=*/true, process_set);
    return submitted.ok() ? Wait(handle) : submitted;
  }
  // Makes a request without tensors; `number` receives its result.
  Status Control(Collective kind, int64_t* number, std::vector<int32_t> ranks = {},
                 int32_t root = 0) {
    auto entry = std::make_unique<TensorEntry>();
    entry->request.name = Name(kind);
    entry->request.kind = kind;
    entry->request.ranks = std::move(ranks);
    entry->request.root = root;
    if (entry->request.of_members_alone()) entry->request.name += " of members";
    int64_t handle = 0;
    const Status submitted = Submit(std::move(entry), /*blocking=*/true, &handle);
    if (!submitted.ok()) return submitted;
    ResultBuffer result;
    const Status status = Take(handle, &result);
    if (result.data() != nullptr) *number = *static_cast<const int64_t*>(result.data());
    return status;
  }
  Status AddSet(std::vector<int32_t> ranks, int64_t* id) {
    return Control(Collective::kAddProcessSet, id, std::move(ranks));
  }
  Status RemoveSet(int64_t id, int64_t* removed) {
    return Control(Collective::kRemoveProcessSet, removed, {}, static_cast<int32_t>(id));
  }
  Status Join(int64_t* last) { return Control(Collective::kJoin, last); }
};

// Blocks until the loop runs on every rank, or has failed; then the player has no engine.
inline Status Start(const EngineConfig& config, Engine::WorldMaker make_world, Player* player) {
  std::unique_ptr<Engine> engine = Engine::Begin(config, std::move(make_world), player->handles);
  while (!engine->AwaitStart(kSecond, &player->started)) continue;
  if (player->started.ok()) {
    player->engine = std::move(engine);
  } else if (!engine->Abort("init had failed", 2 * kSecond)) {
    static_cast<void>(engine.release());
  }
  return player->started;
}

// Runs `script` on every rank of a world of `size`, each in a thread with its own engine.
inline void Play(int size, const EngineConfig& base, const std::function<void(Player&)>& script,
                 const std::function<void(int, EngineConfig&)>& adjust = {}) {
  auto transports = MakeInprocWorld(size, 20 * kMicrosecond);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      EngineConfig config = base;
      config.timeout_ns = kTestTimeout;
      if (adjust) adjust(rank, config);
      Player player;
      player.rank = rank;
      player.size = size;
      const auto make_world = [&](World* world) {
        world->transport = std::move(transports[static_cast<size_t>(rank)]);
        world->topology =
            MakeTopology(rank, std::vector<std::string>(static_cast<size_t>(size), "host"));
        return Status::Ok();
      };
      const Status started = Start(config, make_world, &player);
      if (!started.ok()) return Fail(__FILE__, __LINE__, started.message());
      script(player);
      if (player.engine != nullptr) CHECK(player.engine->Shutdown("", kTestTimeout));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A barrier that keeps ranks in step, like training scripts.
class InStep {
 public:
  explicit InStep(int ranks) : ranks_(ranks) {}
  void Wait() {
    const int step = come_++ / ranks_ + 1;
    while (come_ < step * ranks_) std::this_thread::yield();
  }

 private:
  const int ranks_;
  std::atomic<int> come_{0};
};

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace hororing_test
