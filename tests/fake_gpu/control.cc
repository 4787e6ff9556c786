// The parts that both halves of the fake share, and its interface for tests.
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_gpu.h"
#include "streams.h"

namespace fake_gpu {

Settings settings;
Counts counts;

namespace {

std::mutex violations_mutex;
std::vector<std::string>& Violations() {
  static auto* all = new std::vector<std::string>();
  return *all;
}

// Where threads are to stay. Never destroyed: some may be in there at the end of the process.
struct Trap {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> set{false};
  std::string function;  // GUARDED_BY(mutex)
  int device = -1;       // GUARDED_BY(mutex)
  int64_t number = 0;    // of fake_gpu_hang_in; GUARDED_BY(mutex)
  std::atomic<int> inside{0};
};
Trap& TheTrap() {
  static auto* trap = new Trap();
  return *trap;
}

Stream& DefaultStream() {
  static Stream* stream = new Stream();
  return *stream;
}

}  // namespace

Registry<Stream>& Streams() {
  static auto* streams = new Registry<Stream>();
  return *streams;
}
void Violation(const std::string& what) {
  std::lock_guard<std::mutex> lock(violations_mutex);
  Violations().push_back(what);
}

void Visit(const char* function) {
  while (counts.aborts < settings.full_queue && std::string(function).find("cu") == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  Trap& trap = TheTrap();
  if (!trap.set) return;
  std::unique_lock<std::mutex> lock(trap.mutex);
  if (trap.function != function) return;
  if (trap.device >= 0 && trap.device != CurrentDevice()) return;
  ++trap.inside;
  trap.changed.wait(lock, [&, number = trap.number] { return trap.number != number; });
  --trap.inside;
}

void Enqueue(void* stream, std::function<void()> work) {
  if (stream == nullptr) return DefaultStream().Put(std::move(work));
  const std::shared_ptr<Stream> found = Streams().Find(stream, "a stream");
  if (found != nullptr) found->Put(std::move(work));
}

}  // namespace fake_gpu

using namespace fake_gpu;

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int fake_gpu_set(const char* name, int64_t value) {
  const std::map<std::string, std::atomic<int64_t>*> known = {
      {"delay_us", &settings.delay_us},
      {"devices", &settings.devices},
      {"cuda_version", &settings.cuda_version},
      {"no_module", &settings.no_module},
      {"no_pools", &settings.no_pools},
      {"most_memory", &settings.most_memory},
      {"capturing", &settings.capturing},
      {"nccl_version", &settings.nccl_version},
      {"init_fails", &settings.init_fails},
      {"init_hangs", &settings.init_hangs},
      {"hang_after", &settings.hang_after},
      {"hang_ranks", &settings.hang_ranks},
      {"async_error_after", &settings.async_error_after},
      {"full_queue", &settings.full_queue},
      {"no_memory_on", &settings.no_memory_on}};
  const auto found = known.find(name);
  if (found == known.end()) return -1;
  *found->second = value;
  return 0;
}

FAKE void fake_gpu_reset(void) {
  settings.delay_us = 100;
  settings.devices = 8;
  settings.most_memory = kUnlimited;
  settings.cuda_version = 13000;
  settings.nccl_version = 23203;
  settings.hang_ranks = settings.no_module = settings.no_pools = settings.capturing =
      settings.init_fails = settings.init_hangs = settings.full_queue = 0;
  settings.hang_after = settings.async_error_after = -1;
  settings.no_memory_on = -1;
}

FAKE void fake_gpu_hang_in(const char* function, int device) {
  Trap& trap = TheTrap();
  std::lock_guard<std::mutex> lock(trap.mutex);
  trap.function = function != nullptr ? function : "";
  trap.device = device;
  ++trap.number;
  trap.set = function != nullptr;
  trap.changed.notify_all();
}
FAKE int fake_gpu_hanging(void) { return TheTrap().inside; }

FAKE int fake_gpu_violations(const char** first) {
  static std::string text;
  std::lock_guard<std::mutex> lock(violations_mutex);
  const size_t count = Violations().size();
  text = count > 0 ? Violations()[0] : "";
  *first = text.c_str();
  Violations().clear();
  return static_cast<int>(count);
}

FAKE int64_t fake_gpu_count(const char* what) {
  const std::map<std::string, std::atomic<int64_t>*> known = {
      {"events", &counts.events},
      {"streams", &counts.streams},
      {"memory", &counts.memory},
      {"pinned", &counts.pinned},
      {"communicators", &counts.communicators},
      {"contexts", &counts.contexts},
      {"operations", &counts.operations},
      {"collectives", &counts.collectives},
      {"aborts", &counts.aborts},
      {"kernels", &counts.kernels},
      {"copies", &counts.copies},
      {"recorded", &counts.recorded}};
  const auto found = known.find(what);
  return found == known.end() ? -1 : found->second->load();
}

FAKE void* fake_gpu_stream(void) { return Streams().Add(std::make_shared<Stream>()); }

FAKE void fake_gpu_run(void* stream, void (*work)(void*), void* argument) {
  Enqueue(stream, [=] { work(argument); });
}

FAKE void fake_gpu_synchronize(void* stream) {
  if (stream == nullptr) return DefaultStream().Drain();
  const std::shared_ptr<Stream> found = Streams().Find(stream, "a stream");
  if (found != nullptr) found->Drain();
}
