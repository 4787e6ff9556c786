// Rung 2: batches whose tensors kernels scale and cast on their way into the fusion buffer and
// back, over the fake GPU, which carries out the kernels on the host. Not: that a driver takes
// their PTX.
#include "check.h"
#include "collective/collectives.h"
#include "cuda_world.h"

using namespace hororing;

TEST(factors_that_nccl_would_round_or_has_not_are_applied_by_kernels) {
  for (const bool without : {false, true}) {
    fake_gpu_reset();
    fake_gpu_set("no_module", without);
    std::vector<ReduceSpec> specs;
    for (const DataType dtype : {DataType::kFloat16, DataType::kBfloat16}) {
      // 16 bits hold neither 1/3 nor, at the other end, what makes it good again.
      specs.push_back({dtype, ReduceOp::kSum, 1.0 / 3, 1.0});
      specs.push_back({dtype, ReduceOp::kAverage, 1.0, 0.7});
      specs.push_back({dtype, ReduceOp::kAverage, 1e-12, 7e11});
    }
    for (const DataType dtype : {DataType::kFloat16, DataType::kFloat32, DataType::kFloat64}) {
      specs.push_back({dtype, ReduceOp::kMin, -0.5, 3.0});
      specs.push_back({dtype, ReduceOp::kProduct, 0.5, 3.0});
    }
    const int64_t kernels = fake_gpu_count("kernels");
    const int64_t collectives = fake_gpu_count("collectives");
    CudaOptions options{DeviceWay::kNccl};
    options.fusion_bytes = 8 << 10;  // several pieces, which end within tensors
    const std::vector<std::vector<size_t>> shapes = {{1}, {5, 0, 1777, 333}, {9001}};
    for (int size : {1, 3}) RunAllSums(size, options, specs, shapes);
    CHECK_EQ(fake_gpu_count("collectives") == collectives, without);
    CHECK_EQ(fake_gpu_count("kernels") == kernels, without);
  }
  NothingLeft();
}

TEST(a_kernel_scales_more_tensors_than_a_launch_takes_and_more_elements_than_a_block) {
  fake_gpu_reset();
  const std::vector<ReduceSpec> specs = {{DataType::kBfloat16, ReduceOp::kSum, 0.3, 1.0}};
  RunAllSums(2, {DeviceWay::kNccl}, specs, {std::vector<size_t>(150, 7), {20001, 3}});
  NothingLeft();
}

TEST(ranks_scale_by_kernels_only_where_all_have_them) {
  fake_gpu_reset();
  RunCuda(2, {DeviceWay::kNccl}, [](CudaRank& rank) {
    CHECK_OK(Barrier(*rank.transport, After(NowNs(), kLimit)));
    // Rank 1 looks for its kernels in vain: another driver, say.
    if (rank.r == 1) {
      fake_gpu_set("no_module", 1);
      rank.device = nullptr;
      Devices::Options devices;
      devices.cuda_library = devices.nccl_libraries = FAKE_GPU;
      devices.likely = 1;
      rank.devices = std::make_shared<Devices>(devices);
      CHECK_OK(rank.devices->Any(&rank.device));
      CHECK(!rank.device->scales_by_kernel());
      CudaBackend::Options cuda{rank.devices, DeviceWay::kNccl, false, 1 << 20};
      rank.cuda = std::make_unique<CudaBackend>(*rank.transport, cuda,
                                                std::vector<Backend*>{rank.host.get()});
    }
    const int64_t before = fake_gpu_count("collectives");
    float value = 2;
    Batch batch = OneFloat(&value);
    batch.reduce = {DataType::kFloat32, ReduceOp::kMax, 0.5, 3.0};
    CHECK_OK(RunBatch(rank, batch, [&] { value = 4; }, [&] { CHECK_EQ(value, 6.0f); }));
    CHECK_EQ(fake_gpu_count("collectives"), before);
  });
  fake_gpu_reset();
  NothingLeft();
}
