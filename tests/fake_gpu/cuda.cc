// The functions of libcuda that csrc/device uses, and what fake_gpu.h promises.
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "fake_gpu.h"
#include "state.h"

namespace fake_gpu {

Settings settings;
Counts counts;

namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201, kInvalidImage = 200, kNotReady = 600;

std::mutex violations_mutex;
std::vector<std::string>& Violations() {
  static auto* all = new std::vector<std::string>();
  return *all;
}

// A thread that carries out work in order.
class Stream {
 public:
  Stream() : thread_([this] { Work(); }) {}
  ~Stream() {
    Drain();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      end_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void Put(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  void Drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty(); });
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return end_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> work = queue_.front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(settings.delay_us.load()));
      work();
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // what is at work stays until it is done
  bool end_ = false;
  std::thread thread_;
};

// An event is how many times it was recorded, and how many of those have come to pass.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t recorded = 0, reached = 0;
};

// Live objects by their handles.
template <typename Object>
class Registry {
 public:
  void* Add(std::shared_ptr<Object> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    void* handle = object.get();
    live_[handle] = std::move(object);
    return handle;
  }
  std::shared_ptr<Object> Find(void* handle, const char* what) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(handle);
    if (found != live_.end()) return found->second;
    Violation(std::string(what) + " that does not exist, or no more");
    return nullptr;
  }
  std::shared_ptr<Object> Remove(void* handle, const char* what) {
    std::shared_ptr<Object> object = Find(handle, what);
    std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(handle);
    return object;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Object>> live_;
};

// Never destroyed: streams of a process that ends are at work until then.
Registry<Stream>& Streams() {
  static auto* streams = new Registry<Stream>();
  return *streams;
}
Registry<Event>& Events() {
  static auto* events = new Registry<Event>();
  return *events;
}
Registry<char>& Memories() {
  static auto* memories = new Registry<char>();
  return *memories;
}
Stream& DefaultStream() {
  static Stream* stream = new Stream();
  return *stream;
}

thread_local std::vector<void*> contexts;

std::mutex pinned_mutex;
std::map<char*, size_t>& Pinned() {  // beginnings and bytes
  static auto* pinned = new std::map<char*, size_t>();
  return *pinned;
}

bool IsPinned(const void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  char* at = static_cast<char*>(const_cast<void*>(memory));
  auto after = Pinned().upper_bound(at);
  if (after == Pinned().begin()) return false;
  --after;
  return at < after->first + after->second;
}

std::shared_ptr<char> NewMemory(size_t bytes) {
  ++counts.memory;
  return std::shared_ptr<char>(static_cast<char*>(std::malloc(bytes > 0 ? bytes : 1)),
                               [](char* memory) {
                                 --counts.memory;
                                 std::free(memory);
                               });
}

int Copy(void* to, const void* from, size_t bytes, void* stream) {
  if (!HasContext()) return kInvalidContext;
  ++counts.copies;
  Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return 0;
}

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

void Violation(const std::string& what) {
  std::lock_guard<std::mutex> lock(violations_mutex);
  Violations().push_back(what);
}

void Enqueue(void* stream, std::function<void()> work) {
  if (stream == nullptr) return DefaultStream().Put(std::move(work));
  const std::shared_ptr<Stream> found = Streams().Find(stream, "a stream");
  if (found != nullptr) found->Put(std::move(work));
}

bool HasContext() {
  if (contexts.empty()) Violation("a call without a context");
  return !contexts.empty();
}

}  // namespace fake_gpu

using namespace fake_gpu;

#define FAKE __attribute__((visibility("default")))

extern "C" {

FAKE int fake_gpu_set(const char* name, int64_t value) {
  const std::map<std::string, std::atomic<int64_t>*> known = {
      {"delay_us", &settings.delay_us},         {"devices", &settings.devices},
      {"cuda_version", &settings.cuda_version}, {"no_module", &settings.no_module},
      {"capturing", &settings.capturing},       {"nccl_version", &settings.nccl_version},
      {"init_fails", &settings.init_fails},     {"init_hangs", &settings.init_hangs},
      {"hang_after", &settings.hang_after},     {"async_error_after", &settings.async_error_after}};
  const auto found = known.find(name);
  if (found == known.end()) return -1;
  *found->second = value;
  return 0;
}

FAKE void fake_gpu_reset(void) {
  settings.delay_us = 100;
  settings.devices = 8;
  settings.cuda_version = 13000;
  settings.nccl_version = 23203;
  settings.no_module = settings.capturing = settings.init_fails = settings.init_hangs = 0;
  settings.hang_after = settings.async_error_after = -1;
}

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
      {"registered", &counts.registered},
      {"collectives", &counts.collectives},
      {"aborts", &counts.aborts},
      {"kernels", &counts.kernels},
      {"copies", &counts.copies}};
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

// -- libcuda --------------------------------------------------------------------------------------

FAKE int cuInit(unsigned) { return 0; }
FAKE int cuDriverGetVersion(int* version) {
  *version = static_cast<int>(settings.cuda_version);
  return 0;
}
FAKE int cuGetErrorName(int, const char** text) {
  *text = "FAKE_ERROR";
  return 0;
}
FAKE int cuGetErrorString(int, const char** text) {
  *text = "the fake says no";
  return 0;
}
FAKE int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
FAKE int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(settings.devices);
  return 0;
}
FAKE int cuDeviceGetName(char* name, int bytes, int) {
  std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
  return 0;
}
FAKE int cuDeviceGetUuid(char* uuid, int device) {
  std::memset(uuid, 0, 16);
  uuid[0] = static_cast<char>(device);
  return 0;
}
FAKE int cuDevicePrimaryCtxRetain(void** context, int device) {
  ++counts.contexts;
  *context = Pointer(static_cast<uint64_t>(device) + 1);
  return 0;
}
FAKE int cuDevicePrimaryCtxRelease_v2(int) {
  --counts.contexts;
  return 0;
}
FAKE int cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(context);
  return 0;
}
FAKE int cuCtxPopCurrent_v2(void** context) {
  if (!HasContext()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
FAKE int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return HasContext() ? 0 : kInvalidContext;
}

FAKE int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  if (!HasContext()) return kInvalidContext;
  if (flags != 1 || priority != -5) Violation("the stream blocks, or is not urgent");
  ++counts.streams;
  *stream = Streams().Add(std::make_shared<Stream>());
  return 0;
}
FAKE int cuStreamDestroy_v2(void* stream) {
  --counts.streams;
  return Streams().Remove(stream, "a stream") != nullptr ? 0 : kInvalidValue;
}
FAKE int cuStreamIsCapturing(void*, int* status) {
  *status = settings.capturing != 0 ? 1 : 0;
  return HasContext() ? 0 : kInvalidContext;
}

FAKE int cuEventCreate(void** event, unsigned) {
  if (!HasContext()) return kInvalidContext;
  ++counts.events;
  *event = Events().Add(std::make_shared<Event>());
  return 0;
}
FAKE int cuEventDestroy_v2(void* event) {
  --counts.events;
  return Events().Remove(event, "an event") != nullptr ? 0 : kInvalidValue;
}
FAKE int cuEventRecord(void* handle, void* stream) {
  const std::shared_ptr<Event> event = Events().Find(handle, "an event");
  if (event == nullptr) return kInvalidValue;
  std::lock_guard<std::mutex> lock(event->mutex);
  const int64_t number = ++event->recorded;
  Enqueue(stream, [=] {
    std::lock_guard<std::mutex> reached(event->mutex);
    event->reached = number;
    event->changed.notify_all();
  });
  return 0;
}
FAKE int cuEventQuery(void* handle) {
  const std::shared_ptr<Event> event = Events().Find(handle, "an event");
  if (event == nullptr) return kInvalidValue;
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->reached == event->recorded ? 0 : kNotReady;
}
FAKE int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  const std::shared_ptr<Event> event = Events().Find(handle, "an event");
  if (event == nullptr) return kInvalidValue;
  std::unique_lock<std::mutex> lock(event->mutex);
  const int64_t number = event->recorded;
  lock.unlock();
  Enqueue(stream, [=] {
    std::unique_lock<std::mutex> waiting(event->mutex);
    event->changed.wait(waiting, [&] { return event->reached >= number; });
  });
  return 0;
}

FAKE int cuMemAllocAsync(uint64_t* memory, size_t bytes, void* stream) {
  if (!HasContext()) return kInvalidContext;
  // As if another tensor had been there.
  std::shared_ptr<char> made = NewMemory(bytes);
  *memory = reinterpret_cast<uint64_t>(Memories().Add(made));
  Enqueue(stream, [made, bytes] { std::memset(made.get(), 0x7f, bytes); });
  return 0;
}
FAKE int cuMemFreeAsync(uint64_t memory, void* stream) {
  std::shared_ptr<char> freed = Memories().Remove(Pointer(memory), "memory");
  Enqueue(stream, [freed] {});
  return freed != nullptr ? 0 : kInvalidValue;
}
FAKE int cuMemAlloc_v2(uint64_t* memory, size_t bytes) {
  if (!HasContext()) return kInvalidContext;
  *memory = reinterpret_cast<uint64_t>(Memories().Add(NewMemory(bytes)));
  return 0;
}
FAKE int cuMemFree_v2(uint64_t memory) {
  return Memories().Remove(Pointer(memory), "memory") != nullptr ? 0 : kInvalidValue;
}
FAKE int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  ++counts.pinned;
  *memory = std::malloc(bytes);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  Pinned()[static_cast<char*>(*memory)] = bytes;
  return HasContext() ? 0 : kInvalidContext;
}
FAKE int cuMemFreeHost(void* memory) {
  --counts.pinned;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  Pinned().erase(static_cast<char*>(memory));
  std::free(memory);
  return 0;
}
FAKE int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  if (IsPinned(from)) return Copy(Pointer(to), from, bytes, stream);
  // Memory that is not pinned has been read when the call returns.
  if (!HasContext()) return kInvalidContext;
  const char* data = static_cast<const char*>(from);
  std::vector<char> taken(data, data + bytes);
  Enqueue(stream,
          [to, taken = std::move(taken)] { std::memcpy(Pointer(to), taken.data(), taken.size()); });
  return 0;
}
FAKE int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  return Copy(to, Pointer(from), bytes, stream);
}
FAKE int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return Copy(Pointer(to), Pointer(from), bytes, stream);
}

FAKE int cuModuleLoadData(void** module, const void* image) {
  if (!HasContext()) return kInvalidContext;
  if (settings.no_module != 0) return kInvalidImage;
  if (std::strstr(static_cast<const char*>(image), ".target") == nullptr) return kInvalidImage;
  *module = Pointer(1);
  return 0;
}
FAKE int cuModuleUnload(void*) { return 0; }
FAKE int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = Pointer(1);
  return std::strcmp(name, "hororing_copy_many") == 0 ? 0 : kInvalidValue;
}
FAKE int cuLaunchKernel(void*, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, void* stream, void** parameters, void**) {
  struct Entry {
    const char* from;
    char* to;
    uint64_t bytes, first_block;
  };
  if (!HasContext()) return kInvalidContext;
  const char* table = static_cast<const char*>(parameters[0]);
  uint64_t count = 0;
  std::memcpy(&count, table, sizeof count);
  std::vector<Entry> entries(count);
  std::memcpy(entries.data(), table + sizeof count, count * sizeof(Entry));
  ++counts.kernels;
  // Block by block, as kernels.cu finds its work.
  Enqueue(stream, [entries, blocks] {
    for (uint64_t block = 0; block < blocks; ++block) {
      size_t mine = 0;
      while (mine + 1 < entries.size() && entries[mine + 1].first_block <= block) ++mine;
      const Entry& entry = entries[mine];
      const uint64_t begin = (block - entry.first_block) * (32 << 10);
      const uint64_t left = entry.bytes - begin;
      std::memcpy(entry.to + begin, entry.from + begin, left < (32 << 10) ? left : (32 << 10));
    }
  });
  return 0;
}

}  // extern "C"
