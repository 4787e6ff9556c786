// Worlds of engines whose ranks have a fake GPU each (tests/fake_gpu).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda_world.h"
#include "engine_world.h"

namespace hororing_test {

// Submits tensors on a device. A stream of the framework computes and reads them.
struct OnDevice {
  Player& player;
  void* stream = fake_gpu_stream();

  std::unique_ptr<TensorEntry> Entry(const std::string& name, std::vector<float>& data, ReduceOp op,
                                     int32_t process_set = kWorldSet) {
    auto entry = Player::Entry(name, data, op, process_set);
    entry->views[0].device = player.rank;
    entry->request.tensors[0].on_device = true;
    return entry;
  }
  Status Ready(TensorEntry* entry) {
    StreamEvents events;
    const std::vector<CuStream> streams = {reinterpret_cast<CuStream>(stream)};
    return player.engine->MarkReady(player.rank, streams, &events, entry);
  }
  Status Submit(std::unique_ptr<TensorEntry> entry, int64_t* handle) {
    const Status ready = Ready(entry.get());
    return ready.ok() ? player.Submit(std::move(entry), false, handle) : ready;
  }
  // Submits a tensor that the stream fills with `value`, later.
  Status Start(const std::string& name, std::vector<float>& data, float value, int64_t* handle,
               ReduceOp op = ReduceOp::kSum, int32_t process_set = kWorldSet) {
    RunIn(stream, [&data, value] { data.assign(data.size(), value); });
    return Submit(Entry(name, data, op, process_set), handle);
  }
  // Waits for the handle, and makes the stream wait for the results.
  Status Finish(int64_t handle) {
    Status status;
    if (player.engine->Wait(handle, kTestTimeout, &status) != HandleState::kDone) {
      return Status(Code::kInternal, "the test timed out");
    }
    const std::shared_ptr<const DeviceEvent> done_event = player.handles->DoneEvent(handle);
    if (done_event != nullptr) CHECK_OK(done_event->StreamWait(reinterpret_cast<CuStream>(stream)));
    return status;
  }
  Status Allreduce(const std::string& name, std::vector<float>& data, float value,
                   ReduceOp op = ReduceOp::kSum, int32_t process_set = kWorldSet) {
    int64_t handle = 0;
    const Status submitted = Start(name, data, value, &handle, op, process_set);
    if (!submitted.ok()) return submitted;
    const Status status = Finish(handle);
    player.handles->Release(handle);
    fake_gpu_synchronize(stream);
    return status;
  }
};

// Queues the collectives "first", "between" and "last" of `data` in the streams of three ranks.
// They belong to two communicators, one of all ranks and one of ranks 0 and 1. The first one hangs.
inline void StickBehindOneAnother(Player& player, OnDevice& gpu, InStep& step,
                                  std::vector<std::vector<float>>& data) {
  int64_t id = 0;
  CHECK_OK(player.AddSet({0, 1}, &id));
  std::vector<int32_t> sets = {kWorldSet, static_cast<int32_t>(id), kWorldSet};
  if (player.rank == 2) sets = {kWorldSet, kWorldSet};
  data.assign(3, std::vector<float>(10));
  CHECK_OK(gpu.Allreduce("x", data[0], 1.0f));  // creates the communicators
  if (player.rank != 2) CHECK_OK(gpu.Allreduce("y", data[1], 1.0f, ReduceOp::kSum, sets[1]));
  step.Wait();
  fake_gpu_set("hang_after", 0);
  for (size_t i = 0; i < sets.size(); ++i) {
    const std::string name = i == 0 ? "first" : sets[i] == kWorldSet ? "last" : "between";
    int64_t handle = 0;
    CHECK_OK(gpu.Start(name, data[i], 1.0f, &handle, ReduceOp::kSum, sets[i]));
    CHECK_OK(gpu.Finish(handle));
  }
  step.Wait();
}

inline EngineConfig CudaConfig() {
  fake_gpu_reset();
  EngineConfig config;
  config.devices.cuda_library = config.devices.nccl_libraries = FAKE_GPU;
  return config;
}

inline void PlayCuda(int size, const EngineConfig& config,
                     const std::function<void(Player&, OnDevice&)>& script) {
  Play(size, config, [&](Player& player) {
    OnDevice on_device{player};
    script(player, on_device);
  });
}

}  // namespace hororing_test
