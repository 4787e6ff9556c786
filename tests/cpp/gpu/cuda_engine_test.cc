// Rung 2: whole worlds of engines with tensors on the fake GPU.
#include <deque>
#include <numeric>

#include "check.h"
#include "cuda_engine_world.h"
#include "hosts_engine_world.h"

using namespace hororing_test;

TEST(a_step_of_many_tensors_on_devices_is_right_and_never_waits_for_the_host) {
  for (const GpuMode mode : {GpuMode::kAuto, GpuMode::kStaged}) {
    for (int size : {1, 2, 3}) {
      EngineConfig config = CudaConfig();
      config.gpu = mode;
      PlayCuda(size, config, [](Player& player, OnDevice& gpu) {
        constexpr size_t kTensors = 20;
        std::vector<std::vector<float>> data, seen(kTensors);
        for (size_t t = 0; t < kTensors; ++t) data.emplace_back(t * 31 % 257, 0.0f);
        for (int step = 0; step < 3; ++step) {
          std::vector<int64_t> handles(kTensors);
          for (size_t t = 0; t < kTensors; ++t) {
            CHECK_OK(gpu.Start("t" + std::to_string(t), data[t],
                               static_cast<float>(step + player.rank + 1), &handles[t]));
          }
          for (size_t t = 0; t < kTensors; ++t) {
            CHECK_OK(gpu.Finish(handles[t]));
            RunIn(gpu.stream, [&, t] { seen[t] = data[t]; });
            player.handles->Release(handles[t]);
          }
          fake_gpu_synchronize(gpu.stream);
          const int sum = player.size * step + player.size * (player.size + 1) / 2;
          for (const auto& tensor : seen) {
            for (float value : tensor) CHECK_EQ(value, static_cast<float>(sum));
          }
        }
      });
      NothingLeft();
    }
  }
}

// Submit does not wake the loop if the caller can run it in Wait. If a device comes into use in
// between, the caller cannot, and here neither a periodic check nor a peer wakes the loop.
TEST(a_caller_that_can_no_longer_drive_the_loop_wakes_it) {
  EngineConfig config = CudaConfig();
  config.checks_ns = kForever;
  std::vector<float> data(10, 1.0f);  // outlives the engine
  PlayCuda(1, config, [&data](Player& player, OnDevice& gpu) {
    CHECK_OK(player.Allreduce("first", data));
    int64_t handle = 0;
    CHECK_OK(player.Submit("second", data, ReduceOp::kSum, &handle, /*blocking=*/true));
    TensorEntry elsewhere;
    CHECK_OK(gpu.Ready(&elsewhere));
    CHECK_OK(player.Wait(handle));
  });
  NothingLeft();
}

TEST(many_handles_are_waited_for_with_their_events) {
  PlayCuda(2, CudaConfig(), [](Player& player, OnDevice& gpu) {
    std::vector<std::vector<float>> data(5, std::vector<float>(100));
    std::vector<int64_t> handles(5);
    for (size_t t = 0; t < 5; ++t) {
      CHECK_OK(gpu.Start("t" + std::to_string(t), data[t], 1.0f, &handles[t]));
    }
    bool all_ok = false;
    std::vector<std::shared_ptr<const DeviceEvent>> done_events;
    CHECK(player.engine->WaitMany(handles.data(), 5, kTestTimeout, &all_ok, &done_events) ==
          HandleState::kDone);
    CHECK(all_ok);
    CHECK(!done_events.empty());
    for (const auto& event : done_events) {
      CHECK_OK(event->StreamWait(reinterpret_cast<CuStream>(gpu.stream)));
    }
    fake_gpu_synchronize(gpu.stream);
    for (const auto& tensor : data) CHECK_EQ(tensor[99], 2.0f);
  });
  NothingLeft();
}

TEST(gathered_results_lie_on_the_device_and_move_to_memory_of_the_framework) {
  PlayCuda(3, CudaConfig(), [](Player& player, OnDevice& gpu) {
    for (bool taken : {true, false}) {
      std::vector<float> rows(static_cast<size_t>(player.rank + 1));
      const float mine = static_cast<float>(player.rank);
      RunIn(gpu.stream, [&rows, mine] { rows.assign(rows.size(), mine); });
      auto entry = gpu.Entry("g", rows, ReduceOp::kSum);
      entry->request.kind = Collective::kAllgather;
      int64_t handle = 0;
      CHECK_OK(gpu.Submit(std::move(entry), &handle));
      CHECK_OK(gpu.Finish(handle));
      int64_t number = 0;
      CHECK_OK(player.handles->Rows(handle, 0, &number));
      CHECK_EQ(number, int64_t{6});
      std::vector<float> all(6, -1.0f);
      if (taken) {
        ResultBuffer result;
        CHECK_OK(player.handles->Take(handle, 0, &result));
        CHECK_OK(result.on_device()->MoveTo(all.data(), result.bytes(),
                                            reinterpret_cast<CuStream>(gpu.stream)));
      }
      player.handles->Release(handle);
      fake_gpu_synchronize(gpu.stream);
      if (taken) CHECK((all == std::vector<float>{0, 1, 1, 2, 2, 2}));
    }
  });
  NothingLeft();
}

TEST(gathered_results_without_memory_pools_are_given_back_also_where_there_is_no_more) {
  for (const int size : {2, 1}) {
    const EngineConfig config = CudaConfig();
    fake_gpu_set("no_pools", 1);
    if (size == 1) fake_gpu_set("most_memory", 1);  // so that the next result waits for the last
    PlayCuda(size, config, [](Player& player, OnDevice& gpu) {
      std::deque<std::vector<float>> inputs, outputs;  // streams may still use them
      for (int step = 0; step < 30; ++step) {
        std::vector<float>& rows = inputs.emplace_back(static_cast<size_t>(5000 + 97 * step));
        const float mine = static_cast<float>(player.rank + step);
        RunIn(gpu.stream, [&rows, mine] { rows.assign(rows.size(), mine); });
        auto entry = gpu.Entry("g" + std::to_string(step), rows, ReduceOp::kSum);
        entry->request.kind = Collective::kAllgather;
        int64_t handle = 0;
        CHECK_OK(gpu.Submit(std::move(entry), &handle));
        CHECK_OK(gpu.Finish(handle));
        std::vector<float>& all =
            outputs.emplace_back(static_cast<size_t>(player.size) * rows.size(), -1.0f);
        if (step % 3 != 0) {  // otherwise the result is freed unread
          ResultBuffer result;
          CHECK_OK(player.handles->Take(handle, 0, &result));
          CHECK_OK(result.on_device()->MoveTo(all.data(), result.bytes(),
                                              reinterpret_cast<CuStream>(gpu.stream)));
        }
        player.handles->Release(handle);
        if (step % 5 == 0) continue;  // the next one starts while this one is in flight
        fake_gpu_synchronize(gpu.stream);
        if (step % 3 == 0) continue;
        CHECK_EQ(all[0], static_cast<float>(step));
        CHECK_EQ(all.back(), static_cast<float>(step + player.size - 1));
      }
      fake_gpu_synchronize(gpu.stream);
    });
    fake_gpu_reset();
    NothingLeft();
  }
}

TEST(a_tensor_on_the_cpu_of_one_rank_and_the_gpu_of_another_is_a_mismatch) {
  PlayCuda(2, CudaConfig(), [](Player& player, OnDevice& gpu) {
    std::vector<float> data(4);
    const Status status =
        player.rank == 0 ? player.Allreduce("x", data) : gpu.Allreduce("x", data, 1.0f);
    CHECK(status.code() == Code::kMismatch);
    CHECK(Contains(status.message(), "CPU/GPU device selections differ"));
    CHECK(Contains(status.message(), "rank 0: on the CPU; rank 1: on a CUDA device"));
    CHECK_OK(gpu.Allreduce("x", data, 1.0f));
    CHECK_EQ(data[3], 2.0f);
    data.assign(4, 3.0f);
    CHECK_OK(player.Allreduce("y", data));  // and both kinds under different names
    CHECK_EQ(data[3], 6.0f);
  });
  NothingLeft();
}

TEST(a_second_device_and_a_captured_stream_are_refused_and_the_job_goes_on) {
  InStep step(2);
  PlayCuda(2, CudaConfig(), [&](Player& player, OnDevice& gpu) {
    std::vector<float> data(4);
    CHECK_OK(gpu.Allreduce("x", data, 1.0f));
    auto entry = gpu.Entry("y", data, ReduceOp::kSum);
    StreamEvents events;
    Status status = player.engine->MarkReady(5, {nullptr}, &events, entry.get());
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(Contains(status.message(), "'y': the tensor is on CUDA device 5"));
    CHECK(Contains(status.message(), "one process per GPU"));
    int64_t last = 0;
    fake_gpu_synchronize(gpu.stream);
    step.Wait();  // no stream of the process is in use
    if (player.rank == 0) {
      fake_gpu_set("capturing", 1);
      status = gpu.Ready(entry.get());
      CHECK(status.code() == Code::kInvalidArgument);
      CHECK(Contains(status.message(), "CUDA graph"));
      fake_gpu_set("capturing", 0);
    }
    step.Wait();
    CHECK_OK(player.Join(&last));
  });
  NothingLeft();
}

TEST(a_rank_that_has_joined_takes_part_with_memory_of_its_device) {
  PlayCuda(2, CudaConfig(), [](Player& player, OnDevice& gpu) {
    std::vector<float> data(1000);
    int64_t last = 0;
    if (player.rank == 0) {
      CHECK_OK(gpu.Allreduce("x", data, 5.0f));
      CHECK_EQ(data[999], 5.0f);
      CHECK_OK(gpu.Allreduce("y", data, 3.0f, ReduceOp::kAverage));
      CHECK_EQ(data[999], 1.5f);
    }
    CHECK_OK(player.Join(&last));
    CHECK_EQ(last, int64_t{0});
  });
  NothingLeft();
}

TEST(process_sets_have_communicators_of_their_own_which_end_with_them) {
  PlayCuda(3, CudaConfig(), [](Player& player, OnDevice& gpu) {
    std::vector<float> data(10);
    CHECK_OK(gpu.Allreduce("x", data, 1.0f));
    int64_t id = 0, removed = 0;
    CHECK_OK(player.AddSet({0, 2}, &id));
    if (player.rank != 1) {
      CHECK_OK(gpu.Allreduce("x", data, 1.0f, ReduceOp::kSum, static_cast<int32_t>(id)));
      CHECK_EQ(data[9], 2.0f);
    }
    CHECK_OK(player.RemoveSet(id, &removed));
    CHECK_OK(gpu.Allreduce("x", data, 1.0f));
    CHECK_EQ(data[9], 3.0f);
  });
  NothingLeft();
}

TEST(a_process_set_that_is_stuck_on_the_device_fails_its_removal_and_nothing_else) {
  InStep step(3);
  Play(
      3, CudaConfig(),
      [&](Player& player) {
        OnDevice gpu{player};
        std::vector<float> data(10), lost(10);
        CHECK_OK(gpu.Allreduce("x", data, 1.0f));
        int64_t id = 0, removed = 0, handle = 0;
        CHECK_OK(player.AddSet({0, 1}, &id));
        const bool member = player.rank != 2;
        const int32_t set = static_cast<int32_t>(id);
        if (member) CHECK_OK(gpu.Allreduce("made", lost, 1.0f, ReduceOp::kSum, set));
        step.Wait();
        fake_gpu_set("hang_ranks", 2);
        fake_gpu_set("hang_after", 0);
        if (member) {
          CHECK_OK(gpu.Start("lost", lost, 1.0f, &handle, ReduceOp::kSum, set));
          CHECK_OK(gpu.Finish(handle));  // it hangs in the stream
          player.handles->Release(handle);
        }
        const Status status = player.RemoveSet(id, &removed);
        CHECK_EQ(status.ok(), !member);
        if (member) CHECK(status.code() == Code::kTransport);
        for (const char* part :
             {"remove_process_set", "could not shut down process set 1", "'lost'"}) {
          if (member) CHECK(Contains(status.message(), part));
        }
        CHECK_OK(gpu.Allreduce("x", data, 1.0f));
        CHECK_EQ(data[9], 3.0f);
        CHECK(player.engine->state() != Engine::State::kFailed);  // another may shut down already
      },
      [](int, EngineConfig& config) { config.timeout_ns = 6 * kSecond; });
  fake_gpu_reset();
  NothingLeft();
}

TEST(sets_within_a_host_over_hosts_and_of_one_rank_per_host_go_by_nccl) {
  EngineConfig config = CudaConfig();
  config.gpu = GpuMode::kNccl;
  PlayOn({0, 0, 1, 1}, config, [](Player& player) {
    OnDevice gpu{player};
    std::vector<float> data(3001);
    CHECK_OK(gpu.Allreduce("x", data, static_cast<float>(player.rank)));
    CHECK_EQ(data[3000], 6.0f);
    for (const std::vector<int32_t>& ranks :
         std::vector<std::vector<int32_t>>{{0, 1}, {0, 2}, {1, 2, 3}}) {
      int64_t id = 0, removed = 0;
      CHECK_OK(player.AddSet(ranks, &id));
      if (std::count(ranks.begin(), ranks.end(), player.rank) > 0) {
        CHECK_OK(gpu.Allreduce("x", data, static_cast<float>(player.rank), ReduceOp::kSum,
                               static_cast<int32_t>(id)));
        CHECK_EQ(data[3000], static_cast<float>(std::accumulate(ranks.begin(), ranks.end(), 0)));
      }
      CHECK_OK(player.RemoveSet(id, &removed));
    }
  });
  NothingLeft();
}

TEST(a_rank_that_breaks_off_frees_the_others_whose_devices_wait_for_it) {
  EngineConfig config = CudaConfig();
  const int64_t aborts = fake_gpu_count("aborts");
  InStep step(2);
  PlayCuda(2, config, [&](Player& player, OnDevice& gpu) {
    std::vector<float> data(10), other(10);
    CHECK_OK(gpu.Allreduce("x", data, 1.0f));
    step.Wait();
    fake_gpu_set("hang_after", 0);
    int64_t handle = 0;
    CHECK_OK(gpu.Start("y", data, 1.0f, &handle));
    CHECK_OK(gpu.Finish(handle));  // it hangs in the stream
    step.Wait();
    if (player.rank == 1) {
      CHECK(player.engine->Abort("no more", kTestTimeout));
    } else {
      Status status;
      while ((status = player.Allreduce("z", other)).ok()) {
      }
      CHECK(status.code() == Code::kPeerLost);
      CHECK(player.engine->Shutdown("", kTestTimeout));
    }
    fake_gpu_synchronize(gpu.stream);  // waits for "y", which the abort has ended
  });
  CHECK_EQ(fake_gpu_count("aborts") - aborts, 2);
  fake_gpu_reset();
  NothingForbidden();
}

TEST(communicators_whose_collectives_are_stuck_behind_one_another_are_aborted_together) {
  InStep step(3);
  PlayCuda(3, CudaConfig(), [&](Player& player, OnDevice& gpu) {
    std::vector<std::vector<float>> data;
    StickBehindOneAnother(player, gpu, step, data);
    if (player.rank == 1) {
      CHECK(player.engine->Abort("no more", kTestTimeout));
    } else {
      std::vector<float> other(10);
      while (player.Allreduce("z", other).ok()) {
      }
      CHECK(player.engine->Shutdown("", kTestTimeout));
    }
    fake_gpu_synchronize(gpu.stream);
  });
  fake_gpu_reset();
  NothingForbidden();
}

TEST(a_result_that_is_waited_for_in_a_captured_stream_is_refused_with_a_way_out) {
  PlayCuda(1, CudaConfig(), [](Player& player, OnDevice& gpu) {
    std::vector<float> data(4);
    int64_t handle = 0;
    CHECK_OK(gpu.Start("x", data, 1.0f, &handle));
    Status status;
    CHECK(player.engine->Wait(handle, kTestTimeout, &status) == HandleState::kDone);
    fake_gpu_set("capturing", 1);
    status = player.handles->DoneEvent(handle)->StreamWait(reinterpret_cast<CuStream>(gpu.stream));
    fake_gpu_set("capturing", 0);
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(Contains(status.message(), "CUDA graph"));
    CHECK(Contains(status.message(), "outside of the capture"));
    CHECK_OK(gpu.Finish(handle));
    player.handles->Release(handle);
    fake_gpu_synchronize(gpu.stream);
  });
  NothingLeft();
}

TEST(a_collective_that_hangs_on_the_device_fails_the_engine_by_the_deadline) {
  EngineConfig config = CudaConfig();
  InStep step(2);
  auto with_deadline = [](int, EngineConfig& each) { each.timeout_ns = 1500 * kMillisecond; };
  Play(
      2, config,
      [&](Player& player) {
        OnDevice gpu{player};
        std::vector<float> data(10);
        CHECK_OK(gpu.Allreduce("x", data, 1.0f));
        step.Wait();
        fake_gpu_set("hang_after", 0);
        int64_t handle = 0;
        CHECK_OK(gpu.Start("y", data, 1.0f, &handle));
        CHECK_OK(gpu.Finish(handle));
        fake_gpu_synchronize(gpu.stream);
        while (player.engine->state() == Engine::State::kRunning) std::this_thread::yield();
        std::vector<float> other(1);
        const Status status = player.Allreduce("z", other);
        CHECK(status.code() == Code::kTransport || status.code() == Code::kPeerLost);
        CHECK(Contains(status.message(), "'y'"));
      },
      with_deadline);
  fake_gpu_reset();
  NothingForbidden();
}
