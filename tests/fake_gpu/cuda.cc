// The functions of libcuda that csrc/gpu uses.
#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "fake_gpu.h"
#include "streams.h"

namespace fake_gpu {

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kInvalidImage = 200,
              kNotReady = 600, kNotSupported = 801, kCaptureUnsupported = 900,
              kCaptureIsolation = 905;

// Counts how often an event was recorded, and the last recording that its stream has reached.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t recorded = 0, reached = 0;
};

Registry<Event>& Events() {
  static auto* events = new Registry<Event>();
  return *events;
}
Registry<char>& Memories() {
  static auto* memories = new Registry<char>();
  return *memories;
}
thread_local std::vector<void*> contexts;
thread_local int capture_mode = 0;  // global: other calls break a capture

int BreaksCapture() {
  if (settings.capturing == 0 || capture_mode == 2) return 0;
  Violation("a call that breaks a capture");
  return kCaptureUnsupported;
}

std::mutex pinned_mutex;
std::map<char*, size_t>& Pinned() {  // addresses and sizes in bytes
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

constexpr uint64_t kCopyMany = 1;

// An entry of the table of kernels.cu.
struct Entry {
  const char* from;
  char* to;
  uint64_t bytes, first_block;
};

// Copies block by block, like the kernel in kernels.cu.
void CopyMany(const std::vector<Entry>& entries, uint64_t blocks) {
  constexpr uint64_t kBlockBytes = 32 << 10;
  for (uint64_t block = 0; block < blocks; ++block) {
    size_t mine = 0;
    while (mine + 1 < entries.size() && entries[mine + 1].first_block <= block) ++mine;
    const Entry& entry = entries[mine];
    const uint64_t begin = (block - entry.first_block) * kBlockBytes;
    std::memcpy(entry.to + begin, entry.from + begin, std::min(kBlockBytes, entry.bytes - begin));
  }
}

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

bool HasContext() {
  if (contexts.empty()) Violation("a call without a context");
  return !contexts.empty();
}

int CurrentDevice() {
  return contexts.empty() ? -1 : static_cast<int>(reinterpret_cast<uintptr_t>(contexts.back())) - 1;
}

}  // namespace fake_gpu

using namespace fake_gpu;

#define FAKE __attribute__((visibility("default")))

extern "C" {

FAKE int cuInit(unsigned) {
  Visit(__func__);
  return 0;
}
FAKE int cuDriverGetVersion(int* version) {
  Visit(__func__);
  *version = static_cast<int>(settings.cuda_version);
  return 0;
}
FAKE int cuGetErrorName(int, const char** text) {
  Visit(__func__);
  *text = "FAKE_ERROR";
  return 0;
}
FAKE int cuGetErrorString(int, const char** text) {
  Visit(__func__);
  *text = "the fake says no";
  return 0;
}
FAKE int cuDeviceGet(int* device, int ordinal) {
  Visit(__func__);
  *device = ordinal;
  return 0;
}
FAKE int cuDeviceGetCount(int* count) {
  Visit(__func__);
  *count = static_cast<int>(settings.devices);
  return 0;
}
FAKE int cuDeviceGetName(char* name, int bytes, int) {
  Visit(__func__);
  std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
  return 0;
}
FAKE int cuDeviceGetAttribute(int* value, int attribute, int) {
  Visit(__func__);
  if (attribute != 115) Violation("an attribute other than memory pools");
  *value = settings.no_pools == 0 ? 1 : 0;
  return 0;
}
FAKE int cuDeviceGetUuid(char* uuid, int device) {
  Visit(__func__);
  std::memset(uuid, 0, 16);
  uuid[0] = static_cast<char>(device);
  return 0;
}
FAKE int cuDevicePrimaryCtxRetain(void** context, int device) {
  Visit(__func__);
  ++counts.contexts;
  *context = Pointer(static_cast<uint64_t>(device) + 1);
  return 0;
}
FAKE int cuDevicePrimaryCtxRelease_v2(int) {
  Visit(__func__);
  --counts.contexts;
  return 0;
}
FAKE int cuCtxPushCurrent_v2(void* context) {
  Visit(__func__);
  contexts.push_back(context);
  return 0;
}
FAKE int cuCtxPopCurrent_v2(void** context) {
  Visit(__func__);
  if (!HasContext()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
FAKE int cuThreadExchangeStreamCaptureMode(int* mode) {
  Visit(__func__);
  std::swap(*mode, capture_mode);
  return HasContext() ? 0 : kInvalidContext;
}
FAKE int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Visit(__func__);
  *least = 0;
  *greatest = -5;
  return HasContext() ? 0 : kInvalidContext;
}

FAKE int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  Visit(__func__);
  if (!HasContext()) return kInvalidContext;
  if (flags != 1 || priority != -5) Violation("the stream blocks, or is not urgent");
  ++counts.streams;
  *stream = Streams().Add(std::make_shared<Stream>());
  return 0;
}
FAKE int cuStreamDestroy_v2(void* stream) {
  Visit(__func__);
  --counts.streams;
  return Streams().Remove(stream, "a stream") != nullptr ? 0 : kInvalidValue;
}
FAKE int cuStreamIsCapturing(void*, int* status) {
  Visit(__func__);
  *status = settings.capturing != 0 ? 1 : 0;
  return HasContext() ? 0 : kInvalidContext;
}

FAKE int cuEventCreate(void** event, unsigned) {
  Visit(__func__);
  if (!HasContext()) return kInvalidContext;
  ++counts.events;
  *event = Events().Add(std::make_shared<Event>());
  return 0;
}
FAKE int cuEventDestroy_v2(void* event) {
  Visit(__func__);
  --counts.events;
  return Events().Remove(event, "an event") != nullptr ? 0 : kInvalidValue;
}
FAKE int cuEventRecord(void* handle, void* stream) {
  Visit(__func__);
  const std::shared_ptr<Event> event = Events().Find(handle, "an event");
  if (event == nullptr) return kInvalidValue;
  ++counts.recorded;
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
  Visit(__func__);
  const std::shared_ptr<Event> event = Events().Find(handle, "an event");
  if (event == nullptr) return kInvalidValue;
  if (BreaksCapture() != 0) return kCaptureUnsupported;
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->reached == event->recorded ? 0 : kNotReady;
}
FAKE int cuStreamSynchronize(void* stream) {
  Visit(__func__);
  if (BreaksCapture() != 0) return kCaptureUnsupported;
  fake_gpu_synchronize(stream);
  return 0;
}
FAKE int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  Visit(__func__);
  const std::shared_ptr<Event> event = Events().Find(handle, "an event");
  if (event == nullptr) return kInvalidValue;
  if (settings.capturing != 0) return kCaptureIsolation;
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
  Visit(__func__);
  if (!HasContext()) return kInvalidContext;
  if (settings.no_pools != 0) {
    Violation("an allocation from a pool that does not exist");
    return kNotSupported;
  }
  if (settings.no_memory_on == CurrentDevice()) return kOutOfMemory;
  if (counts.memory >= settings.most_memory) return kOutOfMemory;
  // As if another tensor had used the memory before.
  std::shared_ptr<char> made = NewMemory(bytes);
  *memory = reinterpret_cast<uint64_t>(Memories().Add(made));
  Enqueue(stream, [made, bytes] { std::memset(made.get(), 0x7f, bytes); });
  return 0;
}
FAKE int cuMemFreeAsync(uint64_t memory, void* stream) {
  Visit(__func__);
  std::shared_ptr<char> freed = Memories().Remove(Pointer(memory), "memory");
  Enqueue(stream, [freed] {});
  return freed != nullptr ? 0 : kInvalidValue;
}
FAKE int cuMemAlloc_v2(uint64_t* memory, size_t bytes) {
  Visit(__func__);
  if (!HasContext()) return kInvalidContext;
  if (settings.no_memory_on == CurrentDevice()) return kOutOfMemory;
  if (counts.memory >= settings.most_memory) return kOutOfMemory;
  *memory = reinterpret_cast<uint64_t>(Memories().Add(NewMemory(bytes)));
  return 0;
}
FAKE int cuMemFree_v2(uint64_t memory) {
  Visit(__func__);
  return Memories().Remove(Pointer(memory), "memory") != nullptr ? 0 : kInvalidValue;
}
FAKE int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  Visit(__func__);
  ++counts.pinned;
  *memory = std::malloc(bytes);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  Pinned()[static_cast<char*>(*memory)] = bytes;
  return HasContext() ? 0 : kInvalidContext;
}
FAKE int cuMemFreeHost(void* memory) {
  Visit(__func__);
  --counts.pinned;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  Pinned().erase(static_cast<char*>(memory));
  std::free(memory);
  return 0;
}
FAKE int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  Visit(__func__);
  if (IsPinned(from)) return Copy(Pointer(to), from, bytes, stream);
  // Pageable memory has been read when the call returns.
  if (!HasContext()) return kInvalidContext;
  const char* data = static_cast<const char*>(from);
  std::vector<char> taken(data, data + bytes);
  Enqueue(stream,
          [to, taken = std::move(taken)] { std::memcpy(Pointer(to), taken.data(), taken.size()); });
  return 0;
}
FAKE int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  Visit(__func__);
  return Copy(to, Pointer(from), bytes, stream);
}
FAKE int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  Visit(__func__);
  return Copy(Pointer(to), Pointer(from), bytes, stream);
}

FAKE int cuModuleLoadData(void** module, const void* image) {
  Visit(__func__);
  if (!HasContext()) return kInvalidContext;
  if (settings.no_module != 0) return kInvalidImage;
  if (std::strstr(static_cast<const char*>(image), ".target") == nullptr) return kInvalidImage;
  *module = Pointer(1);
  return 0;
}
FAKE int cuModuleUnload(void*) {
  Visit(__func__);
  return 0;
}
FAKE int cuModuleGetFunction(void** function, void*, const char* name) {
  Visit(__func__);
  *function = Pointer(kCopyMany);
  return std::strcmp(name, "hororing_copy_many") == 0 ? 0 : kInvalidValue;
}
FAKE int cuLaunchKernel(void* kernel, unsigned blocks, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, void* stream, void** parameters, void**) {
  Visit(__func__);
  if (!HasContext()) return kInvalidContext;
  if (kernel != Pointer(kCopyMany)) return kInvalidValue;
  const char* table = static_cast<const char*>(parameters[0]);
  uint64_t count = 0;
  std::memcpy(&count, table, sizeof count);
  std::vector<Entry> entries(count);
  std::memcpy(entries.data(), table + sizeof count, count * sizeof(Entry));
  ++counts.kernels;
  Enqueue(stream, [entries, blocks] { CopyMany(entries, blocks); });
  return 0;
}

}  // extern "C"
