// Packs 161 tensors, 35 MB in all, on a GPU: with the kernel, with one copy per tensor, and for
// comparison one copy of all of them.
//
//   bench_gpu_pack [libcuda.so.1 [--quick]]     --quick: small tensors, to check that it runs
//
// Prints GB/s of bytes read plus bytes written, and the share of the rate of one copy. The host
// measures the time of the device.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "gpu/devices.h"

using namespace hororing;

namespace {

constexpr int kRounds = 20;

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

void Finish(const Device& device) {
  std::shared_ptr<DeviceEvent> event;
  Check(device.Record(device.stream(), &event));
  for (bool reached = false; !reached;) Check(event->Poll(&reached));
}

// `moved`: bytes read plus bytes written. Later calls are compared with the first one.
void Report(const char* what, const Device& device, size_t moved,
            const std::function<Status()>& enqueue) {
  static double first = 0;
  std::vector<TimeNs> times;
  for (int round = 0; round <= kRounds; ++round) {
    Finish(device);
    const TimeNs begin = NowNs();
    Check(enqueue());
    Finish(device);
    if (round > 0) times.push_back(NowNs() - begin);
  }
  std::sort(times.begin(), times.end());
  const double seconds = static_cast<double>(times[times.size() / 2]) / kSecond;
  const double rate = 1e-9 * static_cast<double>(moved) / seconds;
  if (first == 0) first = rate;
  std::printf("%-14s %8.1f GB/s (median of %d), %5.1f %%\n", what, rate, kRounds,
              100 * rate / first);
}

}  // namespace

int main(int argc, char** argv) {
  Devices::Options options;
  if (argc > 1) options.cuda_library = argv[1];
  Devices devices(options);
  std::shared_ptr<Device> device;
  Check(devices.Any(&device));
  if (!device->packs_by_kernel()) std::printf("the kernel did not load: copies only\n");
  // As ResNet-50's: a few large ones, many small.
  const size_t least_large = argc > 2 && std::string(argv[2]) == "--quick" ? 64 : 64 << 10;
  std::vector<size_t> sizes;
  for (int i = 0; i < 108; ++i) sizes.push_back(size_t{256} << (i % 4));
  for (int i = 0; i < 53; ++i) sizes.push_back(least_large << (i % 6));
  size_t total = 0;
  for (size_t bytes : sizes) total += bytes;
  std::shared_ptr<DeviceMemory> source, target;
  Check(device->Allocate(total, &source));
  Check(device->Allocate(total, &target));
  void *const from = source->data(), *const to = target->data();
  std::vector<DeviceCopy> packed;
  size_t at = 0;
  for (size_t bytes : sizes) {
    packed.push_back({static_cast<char*>(to) + at, static_cast<char*>(from) + at, bytes});
    at += bytes;
  }
  std::printf("%s, %zu tensors, %.1f MB\n", device->name().c_str(), sizes.size(),
              1e-6 * static_cast<double>(total));
  Report("one copy", *device, 2 * total, [&] { return device->CopyOnDevice({{to, from, total}}); });
  Report("packed", *device, 2 * total, [&] { return device->CopyOnDevice(packed); });
  Report("one by one", *device, 2 * total, [&] {
    for (const DeviceCopy& copy : packed) Check(device->CopyOnDevice({copy}));
    return Status::Ok();
  });
  return 0;
}
