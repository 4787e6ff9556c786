// Rung 2: batches whose tensors kernels scale and cast on their way into the fusion buffer and
// back, over the fake GPU, which carries out the kernels on the host. Not: that a driver takes
// their PTX.
#include <algorithm>
#include <cmath>

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

namespace {

// A reduce-scatter of several tensors: the part of rank 0 has `most` elements, the others' one
// less.
void CheckScatters(int size, size_t fusion_bytes, const ReduceSpec& spec,
                   const std::vector<size_t>& most) {
  const auto part = [](size_t of, int r) { return of - (of > 0 && r > 0 ? 1 : 0); };
  std::mt19937 random(hororing_test::Seed());
  std::vector<std::vector<Bytes>> values(most.size());  // by tensor and rank
  for (size_t t = 0; t < most.size(); ++t) {
    size_t elements = 0;
    for (int r = 0; r < size; ++r) elements += part(most[t], r);
    for (int r = 0; r < size; ++r) {
      values[t].emplace_back(elements * 2);
      Fill(spec.dtype, values[t].back().data(), elements, random);
    }
  }
  CudaOptions options{DeviceWay::kNccl};
  options.fusion_bytes = fusion_bytes;
  RunCuda(size, options, [&](CudaRank& rank) {
    const auto own = static_cast<size_t>(rank.r);
    std::vector<Bytes> inputs, outputs, seen;
    Batch batch;
    batch.kind = Collective::kReducescatter;
    batch.reduce = spec;
    for (size_t t = 0; t < most.size(); ++t) {
      inputs.emplace_back(values[t][own].size(), 0x7f);
      outputs.emplace_back(part(most[t], rank.r) * 2, 0x7f);
      BatchEntry entry;
      for (int r = 0; r < size; ++r) entry.parts.push_back(part(most[t], r));
      entry.input = inputs.back().data();
      entry.output = outputs.back().data();
      entry.elements = inputs.back().size() / 2;
      batch.entries.push_back(std::move(entry));
    }
    const auto compute = [&] {
      for (size_t t = 0; t < most.size(); ++t) {
        std::copy(values[t][own].begin(), values[t][own].end(), inputs[t].begin());
      }
    };
    CHECK_OK(RunBatch(rank, batch, compute, [&] { seen = outputs; }));
    for (size_t t = 0; t < most.size(); ++t) {
      size_t at = 0;
      for (int r = 0; r < rank.r; ++r) at += part(most[t], r);
      for (size_t i = 0; i < part(most[t], rank.r); ++i) {
        double exact = 0, terms = 0;
        for (const Bytes& of_rank : values[t]) {
          const double term = spec.prescale * ElementAt(spec.dtype, of_rank.data(), at + i);
          exact += term;
          terms += std::abs(term);
        }
        const double after = spec.op == ReduceOp::kAverage ? spec.postscale / size : spec.postscale;
        // Summed in float32, and rounded once to 11 or 8 bits.
        const double once = spec.dtype == DataType::kFloat16 ? 0x1p-11 : 0x1p-8;
        const double error = (std::abs(exact) * once + terms * 0x1p-21) * after + 0x1p-24;
        CHECK(std::abs(ElementAt(spec.dtype, seen[t].data(), i) - exact * after) <= error);
      }
    }
  });
}

}  // namespace

TEST(reduce_scatters_are_scaled_by_kernels_too) {
  fake_gpu_reset();
  fake_gpu_set("delay_us", 20);
  for (const DataType dtype : {DataType::kFloat16, DataType::kBfloat16}) {
    for (int size : {1, 2, 3}) {
      for (const size_t fusion_bytes : {size_t{4} << 10, size_t{1} << 20}) {
        const int64_t collectives = fake_gpu_count("collectives");
        CheckScatters(size, fusion_bytes, {dtype, ReduceOp::kSum, 1.0 / 3, 1.0}, {5, 0, 1, 777});
        CheckScatters(size, fusion_bytes, {dtype, ReduceOp::kAverage, 1.0, 0.7}, {4001});
        CHECK(fake_gpu_count("collectives") > collectives);
      }
    }
  }
  NothingLeft();
}

TEST(more_ranks_than_the_fusion_buffer_has_rows_scatter_by_way_of_the_host) {
  fake_gpu_reset();
  const int64_t collectives = fake_gpu_count("collectives");
  CheckScatters(3, 128, {DataType::kFloat16, ReduceOp::kSum, 1.0 / 3, 1.0}, {50});
  CHECK_EQ(fake_gpu_count("collectives"), collectives);
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
