// The C interface: turns C structs into the core's values and back. Holds the one engine of
// the process; everything else is in the rooms below.
#include "capi/hororing.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/reduce.h"
#include "capi/process.h"
#include "capi/requests.h"
#include "engine/engine.h"
#include "transport/factory.h"

namespace hororing {
namespace {

#ifndef HORORING_VERSION
#error "HORORING_VERSION comes from the build"
#endif

// The process's engine. `engine` is replaced under the mutex and shared by calls in progress,
// so that a shutdown on another thread cannot pull it away from under them.
struct Process {
  std::mutex mutex;
  std::shared_ptr<Engine> engine;  // GUARDED_BY(mutex)
  std::shared_ptr<HandleTable> handles = std::make_shared<HandleTable>();
};

// Never destroyed: handles may be asked for until the very end of the process.
Process& TheProcess() {
  static Process* process = new Process();
  return *process;
}

// In a forked child the engine's thread does not exist and locks may be held by nobody:
// nothing of the parent's state is touched there.
std::atomic<bool> in_forked_child{false};

void WatchForks() {
  static std::once_flag once;
  std::call_once(once,
                 [] { pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); }); });
}

thread_local std::string last_error;
thread_local int last_error_rank = -1;

}  // namespace

int Remember(const Status& status) {
  if (status.ok()) return HR_OK;
  last_error = status.message();
  last_error_rank = status.rank();
  return static_cast<int>(status.code());
}

Status NotInitialized() {
  if (InForkedChild()) {
    return Status(Code::kNotInitialized,
                  "hororing has not been initialized in this process, which was forked from one "
                  "that is: communicate in the parent, or start workers with the 'spawn' method");
  }
  return Status(Code::kNotInitialized, "hororing has not been initialized; use hvd.init().");
}

bool InForkedChild() { return in_forked_child.load(std::memory_order_relaxed); }

std::shared_ptr<HandleTable> Handles() { return TheProcess().handles; }

int WaitMany(const int64_t* handles, int32_t count, double timeout_s,
             std::vector<std::shared_ptr<const DeviceEvent>>* landed) {
  if (InForkedChild()) return Remember(NotInitialized());
  const TimeNs timeout = timeout_s < 0 ? kForever : Scaled(timeout_s, kSecond);
  const std::shared_ptr<Engine> engine = CurrentEngine();
  const size_t number = static_cast<size_t>(count);
  bool all_ok = false;
  const HandleTable::Look look =
      engine != nullptr ? engine->WaitMany(handles, number, timeout, &all_ok, landed)
                        : Handles()->WaitMany(handles, number, timeout, &all_ok, landed);
  if (look == HandleTable::Look::kPending) return HR_PENDING;
  if (all_ok) return HR_OK;
  return Remember(Status(Code::kInvalidArgument, "some of these handles have failed"));
}

std::shared_ptr<Engine> CurrentEngine() {
  if (InForkedChild()) return nullptr;
  Process& process = TheProcess();
  std::lock_guard<std::mutex> lock(process.mutex);
  return process.engine;
}

namespace {

EngineConfig EngineConfigFrom(const hr_config& from) {
  EngineConfig config;
  config.fusion_bytes = from.fusion_bytes;
  config.hold_ns = Scaled(from.cycle_time_ms, kMillisecond);
  config.cache_capacity = from.cache_capacity;
  config.reproducible = from.reproducible != 0;
  config.plan = from.plan != 0;
  config.tuning.chunk_bytes = from.chunk_bytes;
  if (from.tune != 0) {
    config.tune.emplace();
    config.tune->tune_fusion = from.tune_fusion != 0;
    config.tune->tune_hold = from.tune_hold != 0;
    config.tune->tune_chunks = from.tune_chunks != 0;
    config.tune->tune_algorithms = from.tune_algorithms != 0;
    config.tune->warmup_samples = from.tune_warmup_samples;
    config.tune->steps_per_sample = from.tune_steps_per_sample;
    config.tune_log = Text(from.tune_log);
  }
  config.fingerprint = Text(from.fingerprint);
  config.backend = Text(from.backend);
  if (from.cuda_library != nullptr) config.devices.cuda_library = from.cuda_library;
  if (from.nccl_libraries != nullptr) config.devices.nccl_libraries = from.nccl_libraries;
  config.stall.warning_ns = SecondsToNs(from.stall_warning_s);
  config.stall.shutdown_ns = SecondsToNs(from.stall_shutdown_s);
  config.timeout_ns = SecondsToNs(from.timeout_s);
  config.cpu = from.cpu;
  config.watch_parent = from.watch_parent != 0;
  config.timeline = Text(from.timeline);
  config.timeline_cycles = from.timeline_mark_cycles != 0;
  return config;
}

WorldOptions WorldOptionsFrom(const hr_config& from) {
  WorldOptions options;
  options.launched = from.launched != 0;
  options.transport = Text(from.transport);
  options.mpi_library_path = Text(from.mpi_library);
  options.mpi.communicator = from.mpi_communicator;
  if (from.ranks != nullptr) options.mpi.ranks.assign(from.ranks, from.ranks + from.ranks_count);
  options.spin_ns = Scaled(from.spin_us, kMicrosecond);
  options.arena_bytes = static_cast<size_t>(std::max<int64_t>(from.arena_bytes, 0));
  options.timeout_ns = SecondsToNs(from.timeout_s);
  return options;
}

Status MarkReady(Engine& engine, const hr_request& from, TensorEntry* entry) {
  if (!entry->request.on_device()) return Status::Ok();
  return engine.MarkReady(entry->views[0].device, reinterpret_cast<CuStream>(from.stream), entry);
}

Status Submit(const hr_request& from, int64_t* handle) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NotInitialized();
  OneTensor tensor;
  if (IsOneTensor(from, &tensor) &&
      engine->SubmitAgain(&tensor, 1, from.wait_follows != 0, handle) == 1) {
    return Status::Ok();
  }
  auto entry = std::make_unique<TensorEntry>();
  HORORING_RETURN_IF_ERROR(MakeEntry(from, engine->sets(), engine->topology().rank, entry.get()));
  HORORING_RETURN_IF_ERROR(MarkReady(*engine, from, entry.get()));
  return engine->Submit(std::move(entry), from.wait_follows != 0, handle);
}

// Entries for the requests, each with its tensor at its address. The first that is refused ends
// them. What a stream holds now computes all those of them that name it: one event for them all.
Status MakeEntries(Engine& engine, const hr_request* const* requests, const uintptr_t* addresses,
                   size_t count, std::vector<std::unique_ptr<TensorEntry>>* entries) {
  entries->reserve(count);
  std::map<std::pair<int, uintptr_t>, std::shared_ptr<const DeviceEvent>> ready;
  for (size_t i = 0; i < count; ++i) {
    hr_tensor tensor = requests[i]->tensors[0];
    tensor.input = tensor.output = addresses[i];
    hr_request request = *requests[i];
    request.tensors = &tensor;
    auto entry = std::make_unique<TensorEntry>();
    HORORING_RETURN_IF_ERROR(
        MakeEntry(request, engine.sets(), engine.topology().rank, entry.get()));
    if (entry->request.on_device()) {
      std::shared_ptr<const DeviceEvent>& event = ready[{entry->views[0].device, request.stream}];
      if (event == nullptr) {
        HORORING_RETURN_IF_ERROR(MarkReady(engine, request, entry.get()));
        event = entry->ready;
      }
      entry->ready = event;
    }
    entries->push_back(std::move(entry));
  }
  return Status::Ok();
}

// Takes the engine out of the process and ends it. An engine whose loop does not end in time
// (a peer is frozen, say) is leaked with its thread: the process is about to end anyway, and
// anything else could hang or crash.
int EndEngine(const std::function<bool(Engine&)>& end) {
  if (in_forked_child.load()) return HR_OK;
  Process& process = TheProcess();
  std::shared_ptr<Engine> engine;
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    engine = std::exchange(process.engine, nullptr);
  }
  if (engine == nullptr) return HR_OK;
  if (end(*engine)) return HR_OK;
  new std::shared_ptr<Engine>(std::move(engine));
  return Remember(
      Status(Code::kStalled, "shutdown: the engine did not end in time; a peer may be frozen"));
}

}  // namespace
}  // namespace hororing

using namespace hororing;  // the functions below are the only ones outside the namespace

HR_EXPORT int hr_abi_version(void) { return HR_ABI_VERSION; }
HR_EXPORT const char* hr_version(void) { return HORORING_VERSION; }

HR_EXPORT int hr_init(const hr_config* config) {
  WatchForks();
  if (in_forked_child.load()) return Remember(NotInitialized());
  Process& process = TheProcess();
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    if (process.engine != nullptr) return HR_OK;
  }
  SetLogLevel(static_cast<LogLevel>(config->log_level));
  const std::string kernels = Text(config->kernels);
  if (kernels != "auto" && !SetKernels(kernels.c_str())) {
    return Remember(
        Status(Code::kInvalidArgument, "KERNELS=" + kernels +
                                           ": this processor, or this build, lacks them; "
                                           "use auto"));
  }
  const WorldOptions world = WorldOptionsFrom(*config);
  EngineConfig engine_config = EngineConfigFrom(*config);
  Status parsed = Parse(Text(config->algorithm), &engine_config.tuning);
  if (parsed.ok()) parsed = Parse(Text(config->gpu), &engine_config.gpu);
  if (!parsed.ok()) return Remember(parsed);
  std::unique_ptr<Engine> engine;
  const Status status = Engine::Start(
      engine_config, [world](World* made) { return MakeWorld(world, made); }, process.handles,
      &engine);
  if (!status.ok()) return Remember(status);
  std::lock_guard<std::mutex> lock(process.mutex);
  process.engine = std::move(engine);
  return HR_OK;
}

HR_EXPORT int hr_shutdown(const char* reason, double timeout_s) {
  return EndEngine(
      [&](Engine& engine) { return engine.Shutdown(Text(reason), SecondsToNs(timeout_s)); });
}

HR_EXPORT int hr_abort(const char* reason) {
  return EndEngine([&](Engine& engine) { return engine.Abort(Text(reason), 2 * kSecond); });
}

HR_EXPORT void hr_finalize(void) {
  if (!in_forked_child.load()) FinalizeMpi();
}

HR_EXPORT int hr_state_now(void) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return HR_STATE_NONE;
  switch (engine->state()) {
    case Engine::State::kStarting:
    case Engine::State::kRunning: return HR_STATE_RUNNING;
    case Engine::State::kStopped: return HR_STATE_STOPPED;
    case Engine::State::kFailed: break;
  }
  return HR_STATE_FAILED;
}

HR_EXPORT int hr_topology_now(hr_topology* topology) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Remember(NotInitialized());
  const Topology& from = engine->topology();
  *topology = hr_topology{from.rank,       from.size,       from.local_rank, from.local_size,
                          from.cross_rank, from.cross_size, from.homogeneous};
  return HR_OK;
}

HR_EXPORT int hr_place_now(int32_t process_set, int32_t* place, int32_t* size) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Remember(NotInitialized());
  const std::shared_ptr<const ProcessSet> set = engine->sets().Find(process_set);
  const int found = set == nullptr ? -1 : set->IndexOf(engine->topology().rank);
  if (found < 0) {
    return Remember(Status(Code::kInvalidArgument,
                           "this rank is in no process set " + std::to_string(process_set)));
  }
  *place = found;
  *size = set->size();
  return HR_OK;
}

HR_EXPORT const char* hr_host_name(int32_t rank) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr || rank < 0 || rank >= engine->topology().size) return nullptr;
  const Topology& topology = engine->topology();
  thread_local std::string host;
  host = topology.hosts[static_cast<size_t>(topology.host_of[static_cast<size_t>(rank)])];
  return host.c_str();
}

HR_EXPORT const char* hr_last_error(void) { return last_error.c_str(); }
HR_EXPORT int32_t hr_last_error_rank(void) { return last_error_rank; }

HR_EXPORT int64_t hr_submit(const hr_request* request) {
  int64_t handle = 0;
  const Status status = Submit(*request, &handle);
  return status.ok() ? handle : -Remember(status);
}

HR_EXPORT int64_t hr_submit_as(const hr_request* request, const char* name, uintptr_t input,
                               uintptr_t output, int32_t wait_follows) {
  hr_tensor tensor = request->tensors[0];
  tensor.input = input;
  tensor.output = output;
  hr_request moved = *request;
  moved.name = name;
  moved.tensors = &tensor;
  moved.wait_follows = wait_follows;
  return hr_submit(&moved);
}

HR_EXPORT int32_t hr_allreduce_many(const hr_request* const* requests, const uintptr_t* addresses,
                                    int32_t count, int64_t* handles) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) {
    handles[0] = -Remember(NotInitialized());
    return 0;
  }
  const size_t wanted = static_cast<size_t>(count);
  std::vector<OneTensor> tensors(wanted);
  size_t known = 0;
  for (; known < wanted && IsOneTensor(*requests[known], &tensors[known]); ++known) {
    tensors[known].input = tensors[known].output = reinterpret_cast<void*>(addresses[known]);
  }
  const size_t again = engine->SubmitAgain(tensors.data(), known, false, handles);
  if (again == wanted) return count;
  std::vector<std::unique_ptr<TensorEntry>> entries;
  const Status made =
      MakeEntries(*engine, requests + again, addresses + again, wanted - again, &entries);
  size_t submitted = 0;
  Status status = engine->SubmitMany(std::move(entries), handles + again, &submitted);
  submitted += again;
  if (status.ok()) status = made;
  if (!status.ok()) handles[submitted] = -Remember(status);
  return static_cast<int32_t>(submitted);
}

HR_EXPORT int hr_poll(int64_t handle) {
  if (in_forked_child.load()) return -Remember(NotInitialized());
  switch (TheProcess().handles->Poll(handle)) {
    case HandleTable::Look::kPending: return 0;
    case HandleTable::Look::kDone: return 1;
    case HandleTable::Look::kUnknown: break;
  }
  return -Remember(Status(Code::kInvalidArgument, "there is no handle " + std::to_string(handle)));
}

HR_EXPORT int hr_wait(int64_t handle, double timeout_s) {
  if (in_forked_child.load()) return Remember(NotInitialized());
  Status status;
  const TimeNs timeout = timeout_s < 0 ? kForever : Scaled(timeout_s, kSecond);
  const std::shared_ptr<Engine> engine = CurrentEngine();
  HandleTable::Look look;
  if (engine != nullptr) {
    look = engine->Wait(handle, timeout, &status);
  } else {
    look = TheProcess().handles->Wait(handle, timeout, &status);
  }
  switch (look) {
    case HandleTable::Look::kPending: return HR_PENDING;
    case HandleTable::Look::kDone: return Remember(status);
    case HandleTable::Look::kUnknown: break;
  }
  return Remember(Status(Code::kInvalidArgument, "there is no handle " + std::to_string(handle)));
}

HR_EXPORT int hr_wait_many(const int64_t* handles, int32_t count, double timeout_s) {
  return WaitMany(handles, count, timeout_s, nullptr);
}

HR_EXPORT int hr_finish(int64_t handle, double timeout_s) {
  return hr_wait_many(&handle, 1, timeout_s);
}

HR_EXPORT int hr_take_result(int64_t handle, int32_t index, hr_result* result) {
  if (in_forked_child.load()) return Remember(NotInitialized());
  GatheredTensor gathered;
  const Status status = TheProcess().handles->Take(handle, static_cast<size_t>(index), &gathered);
  if (!status.ok()) return Remember(status);
  if (gathered.on_device() != nullptr) {
    return Remember(Status(Code::kInvalidArgument, "the result was on a device: hr_move_result"));
  }
  result->bytes = static_cast<int64_t>(gathered.bytes());
  result->rows = gathered.rows();
  result->data = reinterpret_cast<uintptr_t>(gathered.Release());
  return HR_OK;
}

HR_EXPORT void hr_free(uintptr_t data) { std::free(reinterpret_cast<void*>(data)); }

HR_EXPORT int hr_release(int64_t handle) {
  if (in_forked_child.load()) return Remember(NotInitialized());
  if (TheProcess().handles->Release(handle)) return HR_OK;
  return Remember(Status(Code::kInvalidArgument, "there is no handle " + std::to_string(handle)));
}

HR_EXPORT const char* hr_kernels(void) { return KernelsInUse(); }

HR_EXPORT int hr_describe_mpi(const char* mpi_library, char* text, int32_t text_bytes) {
  MpiInfo info;
  const Status status = DescribeMpi(Text(mpi_library), &info);
  if (!status.ok()) return Remember(status);
  const std::string described = info.library + "\n" + info.thread_level;
  const size_t bytes = std::min(described.size(), static_cast<size_t>(text_bytes) - 1);
  std::memcpy(text, described.data(), bytes);
  text[bytes] = '\0';
  return HR_OK;
}
