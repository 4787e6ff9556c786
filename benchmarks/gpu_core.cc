// Checks a GPU without Python and without a framework: the driver accepts the embedded kernel,
// which copies correctly; memory is allocated in the order of streams; batches of one rank are
// right through NCCL, if it is found, and through host memory. Prints a line for each check; the
// exit code is 1 if one fails.
//
//   bench_gpu_core [libcuda.so.1 [libnccl.so.2]]
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/host_backend.h"
#include "gpu/cuda_backend.h"
#include "trace/trace.h"
#include "transport/factory.h"

using namespace hororing;

namespace {

constexpr TimeNs kLimit = 60 * kSecond;
bool all_ok = true;

void Tell(const std::string& what, const std::string& wrong) {
  std::printf("%-24s %s\n", what.c_str(), wrong.empty() ? "ok" : wrong.c_str());
  all_ok = all_ok && wrong.empty();
}

std::string Text(const Status& status) { return status.ok() ? "" : status.message(); }

Status Finish(const Device& device) {
  std::shared_ptr<DeviceEvent> event;
  HORORING_RETURN_IF_ERROR(device.Record(device.stream(), &event));
  for (bool reached = false; !reached;) HORORING_RETURN_IF_ERROR(event->Poll(&reached));
  return Status::Ok();
}

// Numbers on the device, `offset` elements behind an aligned address.
template <typename Number>
class OnDevice {
 public:
  OnDevice(const Device& device, std::vector<Number> values, size_t offset = 0)
      : device_(device), values_(std::move(values)), offset_(offset) {
    status_ = device.Allocate((values_.size() + offset) * sizeof(Number) + 1, &memory_);
    if (status_.ok()) status_ = device.CopyToDevice(data(), values_.data(), bytes());
    if (status_.ok()) status_ = Finish(device);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  Number* data() const { return static_cast<Number*>(memory_->data()) + offset_; }
  size_t bytes() const { return values_.size() * sizeof(Number); }
  const Status& status() const { return status_; }
  // Compares the memory with `wanted` once the private stream has got this far; "" if it is equal.
  std::string Judge(const std::vector<Number>& wanted) {
    if (!status_.ok()) return status_.message();
    std::vector<Number> found(values_.size());
    Status status = device_.CopyToHost(found.data(), data(), bytes());
    if (status.ok()) status = Finish(device_);
    if (!status.ok()) return status.message();
    for (size_t i = 0; i < found.size(); ++i) {
      if (std::memcmp(&found[i], &wanted[i], sizeof(Number)) != 0) {
        return "element " + std::to_string(i) + " of " + std::to_string(found.size()) + " is wrong";
      }
    }
    return "";
  }

 private:
  const Device& device_;
  std::vector<Number> values_;
  const size_t offset_;
  std::shared_ptr<DeviceMemory> memory_;
  Status status_;
};

template <typename Number>
std::vector<Number> Series(size_t count, const std::function<Number(float)>& make) {
  std::vector<Number> values;
  for (size_t i = 0; i < count; ++i) values.push_back(make(0.25f * static_cast<float>(i % 201)));
  return values;
}

void Copies(const Device& device) {
  const size_t bytes = 100003;
  for (const size_t offset : {0, 1, 4}) {  // by 16 bytes, by one and by four at a time
    const auto values = Series<uint8_t>(
        bytes, [](float value) { return static_cast<uint8_t>(static_cast<int>(4 * value)); });
    OnDevice<uint8_t> from(device, values, offset), to(device, std::vector<uint8_t>(bytes), offset);
    std::vector<DeviceCopy> copies;
    for (size_t at = 0, part = 16; at < bytes; at += part, part = std::min(part * 2, bytes - at)) {
      copies.push_back({to.data() + at, from.data() + at, std::min(part, bytes - at)});
    }
    const Status copied = device.CopyOnDevice(copies);
    Tell("copies, offset " + std::to_string(offset), copied.ok() ? to.Judge(values) : Text(copied));
  }
}

void StreamMemory(const Device& device) {
  const auto values = Series<float>(5000, [](float v) { return v; });
  OnDevice<float> from(device, values), to(device, std::vector<float>(values.size()));
  std::shared_ptr<DeviceMemory> memory;
  Status status = device.Allocate(from.bytes(), &memory);
  if (status.ok()) status = device.CopyOnDevice({{memory->data(), from.data(), from.bytes()}});
  if (status.ok()) status = memory->MoveTo(to.data(), to.bytes(), device.stream());
  Tell("memory of a stream", status.ok() ? to.Judge(values) : Text(status));
}

// Batches of one rank: the output is the input times the factor.
void Batches(const std::shared_ptr<Devices>& devices, const std::shared_ptr<Device>& device,
             GpuMode mode, const std::string& name) {
  auto transports = MakeInprocWorld(1, 20 * kMicrosecond);
  HostBackend host(*transports[0]);
  CudaBackend::Options options;
  options.devices = devices;
  options.mode = mode;
  options.fusion_bytes = 1 << 20;
  CudaBackend cuda(*transports[0], options, {&host});
  TraceSink trace;
  const size_t count = 70001;
  const auto values = Series<float>(count, [](float v) { return v; });
  struct Case {
    const char* what;
    Collective kind;
    ReduceOp op;
    double factor;
  };
  for (const Case& each : {Case{"sum", Collective::kAllreduce, ReduceOp::kSum, 1},
                           {"average, a quarter", Collective::kAllreduce, ReduceOp::kAverage, 0.25},
                           {"least, a half", Collective::kAllreduce, ReduceOp::kMin, 0.5},
                           {"broadcast", Collective::kBroadcast, ReduceOp::kSum, 1},
                           {"allgather", Collective::kAllgather, ReduceOp::kSum, 1},
                           {"reduce-scatter", Collective::kReducescatter, ReduceOp::kSum, 1}}) {
    OnDevice<float> first(*device, values), second(*device, values);
    OnDevice<float> to_first(*device, std::vector<float>(count)),
        to_second(*device, std::vector<float>(count));
    Batch batch;
    batch.kind = each.kind;
    batch.on_device = true;
    std::shared_ptr<DeviceEvent> ready;
    Status status = device->Record(device->stream(), &ready);
    for (auto [input, output] : {std::pair(&first, &to_first), std::pair(&second, &to_second)}) {
      BatchEntry entry;
      entry.name = each.what;
      entry.input = input->data();
      entry.output = output->data();
      entry.elements = count;
      entry.reduce = {DataType::kFloat32, each.op, each.factor, 1.0};
      entry.receive_bytes = {count * sizeof(float)};
      entry.parts = {count};
      entry.ready = ready;
      batch.entries.push_back(entry);
    }
    std::vector<float> wanted;
    for (const float value : values) wanted.push_back(value * static_cast<float>(each.factor));
    if (status.ok()) status = cuda.Run(batch, After(NowNs(), kLimit), trace);
    std::string wrong = Text(status);
    for (OnDevice<float>* output : {&to_first, &to_second}) {
      if (wrong.empty()) wrong = output->Judge(wanted);
    }
    Tell(name + ": " + each.what, wrong);
    if (!status.ok()) return;
  }
  Tell(name + ": end", Text(cuda.Leave(After(NowNs(), kLimit))));
}

}  // namespace

int main(int argc, char** argv) {
  Devices::Options options;
  if (argc > 1) options.cuda_library = argv[1];
  if (argc > 2) options.nccl_libraries = argv[2];
  const auto devices = std::make_shared<Devices>(options);
  std::shared_ptr<Device> device;
  const Status opened = devices->Any(&device);
  if (!opened.ok()) {
    Tell("driver", opened.message());
    return 1;
  }
  std::printf("%s, CUDA %d\n", device->name().c_str(), device->api().version);
  Tell("kernel", device->packs_by_kernel() ? "" : "the driver does not take it");
  Copies(*device);
  StreamMemory(*device);
  std::shared_ptr<const NcclApi> nccl;
  const Status loaded = devices->Nccl(&nccl);
  std::printf("%s\n",
              loaded.ok() ? ("NCCL " + nccl->version_text()).c_str() : loaded.message().c_str());
  if (loaded.ok()) Batches(devices, device, GpuMode::kNccl, "NCCL");
  Batches(devices, device, GpuMode::kStaged, "host");
  return all_ok ? 0 : 1;
}
