// A world of ranks with fake GPUs (tests/fake_gpu). Device memory is memory of the process, but
// code that does not wait for a stream sees old data.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend_world.h"
#include "fake_gpu.h"
#include "gpu/cuda_backend.h"

namespace hororing {

// Runs `work` in a stream of the framework.
inline void RunIn(void* stream, std::function<void()> work) {
  fake_gpu_run(
      stream,
      [](void* argument) {
        const std::unique_ptr<std::function<void()>> owned(
            static_cast<std::function<void()>*>(argument));
        (*owned)();
      },
      new std::function<void()>(std::move(work)));
}

inline void NothingForbidden() {
  const char* first = "";
  const int violations = fake_gpu_violations(&first);
  if (violations > 0) hororing_test::Fail(__FILE__, __LINE__, first);
}

inline void NothingLeft() {
  NothingForbidden();
  for (const char* what : {"events", "streams", "memory", "pinned", "communicators", "contexts"}) {
    if (fake_gpu_count(what) != 0) {
      hororing_test::Fail(__FILE__, __LINE__,
                          std::to_string(fake_gpu_count(what)) + " " + what + " are left");
    }
  }
}

struct CudaRank {
  std::unique_ptr<Transport> transport;
  std::shared_ptr<Devices> devices;
  std::unique_ptr<HostBackend> host;
  std::unique_ptr<CudaBackend> cuda;
  std::shared_ptr<Device> device;
  void* stream = nullptr;  // of the framework
  TraceSink trace;
  int r = 0;
};

struct CudaOptions {
  GpuMode mode = GpuMode::kAuto;
  bool one_device = false;  // all ranks share it
  bool reproducible = false;
  size_t fusion_bytes = 1 << 20;
  std::string nccl = FAKE_GPU;
  bool leave = true;  // call Leave at the end
};

// Runs body(rank) on one thread per rank.
inline void RunCuda(int size, const CudaOptions& options,
                    const std::function<void(CudaRank&)>& body) {
  auto transports = MakeInprocWorld(size, 20 * kMicrosecond);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      CudaRank rank;
      rank.r = r;
      rank.transport = std::move(transports[static_cast<size_t>(r)]);
      Devices::Options devices;
      devices.cuda_library = FAKE_GPU;
      devices.nccl_libraries = options.nccl;
      devices.likely = options.one_device ? 0 : r;
      rank.devices = std::make_shared<Devices>(devices);
      CHECK_OK(rank.devices->Any(&rank.device));
      rank.stream = fake_gpu_stream();
      rank.host = std::make_unique<HostBackend>(*rank.transport);
      CudaBackend::Options cuda{rank.devices, options.mode, options.reproducible,
                                options.fusion_bytes};
      rank.cuda = std::make_unique<CudaBackend>(*rank.transport, cuda,
                                                std::vector<Backend*>{rank.host.get()});
      body(rank);
      if (options.leave) CHECK_OK(rank.cuda->Leave(After(NowNs(), kLimit)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Runs `batch` as a framework would: the stream computes the inputs (`compute`) and reads the
// results (`look`), and the host waits only for its end.
inline Status RunBatch(CudaRank& rank, Batch batch, std::function<void()> compute,
                       std::function<void()> look) {
  RunIn(rank.stream, std::move(compute));
  std::shared_ptr<DeviceEvent> ready;
  CHECK_OK(rank.device->Record(reinterpret_cast<CuStream>(rank.stream), &ready));
  batch.on_device = true;
  for (BatchEntry& entry : batch.entries) entry.ready = ready;
  const Status status = rank.cuda->Run(batch, After(NowNs(), kLimit), rank.trace);
  if (!status.ok()) return status;
  CHECK_OK(rank.cuda->done()->StreamWait(reinterpret_cast<CuStream>(rank.stream)));
  RunIn(rank.stream, std::move(look));
  fake_gpu_synchronize(rank.stream);
  return Status::Ok();
}

// Runs a case whose inputs the framework's stream writes late.
inline void RunSums(CudaRank& rank, Case& c) {
  const size_t r = static_cast<size_t>(rank.r);
  Batch batch = c.BatchOf(rank.r);
  std::vector<Bytes> seen(c.tensors.size());
  const auto compute = [&] {
    for (Case::Tensor& tensor : c.tensors) {
      std::copy(tensor.original[r].begin(), tensor.original[r].end(), tensor.inputs[r].data());
    }
  };
  const auto look = [&] {
    for (size_t t = 0; t < seen.size(); ++t) {
      const auto* output = static_cast<const unsigned char*>(batch.entries[t].output);
      seen[t].assign(output, output + c.tensors[t].original[r].size());
    }
  };
  for (Case::Tensor& tensor : c.tensors) {
    std::fill_n(tensor.inputs[r].data(), tensor.original[r].size(), 0x33);
  }
  CHECK_OK(RunBatch(rank, batch, compute, look));
  for (size_t t = 0; t < seen.size(); ++t) {
    const auto* output = static_cast<const unsigned char*>(batch.entries[t].output);
    CHECK(std::equal(seen[t].begin(), seen[t].end(), output));
  }
}

inline void RunAllSums(int size, const CudaOptions& options, const std::vector<ReduceSpec>& specs,
                       const std::vector<std::vector<size_t>>& shapes) {
  std::mt19937 random(hororing_test::Seed());
  std::vector<std::unique_ptr<Case>> cases;
  for (const ReduceSpec& spec : specs) {
    for (const auto& sizes : shapes) {
      cases.push_back(std::make_unique<Case>(spec, sizes, size, random));
    }
  }
  RunCuda(size, options, [&](CudaRank& rank) {
    for (auto& c : cases) RunSums(rank, *c);
  });
  for (auto& c : cases) {
    const std::string wrong = c->Judge(/*exact=*/false);
    if (!wrong.empty()) {
      std::vector<size_t> sizes;
      for (const auto& tensor : c->tensors) sizes.push_back(tensor.elements);
      hororing_test::Fail(__FILE__, __LINE__,
                          Describe(c->tensors[0].spec, sizes, size) + ": " + wrong);
    }
  }
}

inline Batch OneFloat(float* value) {
  Batch batch;
  batch.entries.resize(1);
  batch.entries[0].name = "x";
  batch.entries[0].input = batch.entries[0].output = value;
  batch.entries[0].elements = 1;
  batch.on_device = true;
  return batch;
}

}  // namespace hororing
