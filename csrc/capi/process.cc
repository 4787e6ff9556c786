// The C interface: the one engine of the process, from its configuration to its end.
#include "capi/process.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/text.h"
#include "capi/generation.h"
#include "kernels/reduce.h"
#include "transport/bootstrap.h"
#include "transport/factory.h"

namespace hororing {
namespace {

#ifndef HORORING_VERSION
#error "HORORING_VERSION comes from the build"
#endif

// The process's engine. `engine` is replaced under the mutex and shared by calls in progress,
// so that a shutdown on another thread cannot destroy it during a call.
struct Process {
  std::mutex mutex;
  std::shared_ptr<Engine> engine;           // GUARDED_BY(mutex)
  std::shared_ptr<Engine> starting;         // from hr_init to hr_init_wait; GUARDED_BY(mutex)
  bool abandoned = false;                   // whether a former engine was; GUARDED_BY(mutex)
  std::vector<int> unreachable;             // by the latest engine; GUARDED_BY(mutex)
  std::string ended_by;                     // why a former engine ended; GUARDED_BY(mutex)
  std::shared_ptr<OutOfBandBootstrap> oob;  // of the engine that starts; GUARDED_BY(mutex)
  std::shared_ptr<HandleTable> handles = std::make_shared<HandleTable>();
};

// Never destroyed: handles may be queried until the very end of the process.
Process& process = *new Process();

std::atomic<bool> in_forked_child{false};

thread_local std::string exchange_text;
thread_local std::string last_error;
thread_local int last_error_rank = -1;

}  // namespace

int Remember(const Status& status) {
  if (status.ok()) return HR_OK;
  last_error = status.message();
  last_error_rank = status.rank();
  return static_cast<int>(status.code());
}

int Caught() noexcept {
  Status status(Code::kInternal, "an unknown exception");
  try {
    throw;
  } catch (const std::system_error& error) {
    const bool no_thread = error.code() == std::errc::resource_unavailable_try_again;
    const std::string what = no_thread ? "a thread cannot be created; raise the limit of processes "
                                         "(ulimit -u, pids.max of the container): "
                                       : "";
    status = Status(Code::kInternal, what + error.what());
  } catch (const std::exception& error) {
    status = Status(Code::kInternal, error.what());
  } catch (...) {
  }
  return Remember(status);
}

void CopyText(std::string_view from, char* text, int32_t text_bytes) {
  const std::string_view kept = Shortened(from, static_cast<size_t>(text_bytes) - 1);
  kept.copy(text, kept.size());
  text[kept.size()] = '\0';
}

Status NotInitialized() {
  if (InForkedChild()) {
    return Status(Code::kNotInitialized,
                  "hororing has not been initialized in this process, which was forked from one "
                  "that is: communicate in the parent, or start workers with the 'spawn' method");
  }
  std::string text = "hororing has not been initialized; use hvd.init().";
  std::lock_guard<std::mutex> lock(process.mutex);
  const std::string& ended_by = process.ended_by;
  if (!ended_by.empty()) text += " It has ended before: " + ended_by;
  return Status(Code::kNotInitialized, text);
}

bool InForkedChild() { return in_forked_child.load(std::memory_order_relaxed); }

const std::shared_ptr<HandleTable>& Handles() { return process.handles; }

std::shared_ptr<Engine> CurrentEngine() {
  if (InForkedChild()) return nullptr;
  std::lock_guard<std::mutex> lock(process.mutex);
  return process.engine;
}

namespace {

EngineConfig EngineConfigFrom(const hr_config& from) {
  EngineConfig config;
  config.fusion_bytes = from.fusion_bytes;
  config.verify = from.verify;
  if (from.cycle_time_ms >= 0) {
    config.cycle_time_ns = config.nccl_cycle_time_ns = Scaled(from.cycle_time_ms, kMillisecond);
  }
  config.cache_capacity = from.cache_capacity;
  config.allreduce.reproducible = from.reproducible != 0;
  config.fingerprint = Text(from.fingerprint);
  config.backend = Text(from.backend);
  if (from.cuda_library != nullptr) config.devices.cuda_library = from.cuda_library;
  if (from.nccl_libraries != nullptr) config.devices.nccl_libraries = from.nccl_libraries;
  config.stall.warning_ns = SecondsToNs(from.stall_warning_s);
  config.stall.shutdown_ns = SecondsToNs(from.stall_shutdown_s);
  config.stall.deadlock_ns = SecondsToNs(from.deadlock_s);
  config.timeout_ns = SecondsToNs(from.timeout_s);
  config.cpu = from.cpu;
  config.watch_parent = from.watch_parent != 0;
  config.timeline = Text(from.timeline);
  config.timeline_cycles = from.timeline_mark_cycles != 0;
  config.timeline_bytes = from.timeline_bytes;
  config.timeline_from = from.timeline_from;
  config.timeline_to = from.timeline_to;
  return config;
}

WorldOptions WorldOptionsFrom(const hr_config& from) {
  WorldOptions options;
  options.launched = from.launched != 0;
  options.transport = Text(from.transport);
  options.address = Text(from.address);
  options.key = Text(from.key);
  options.fabric = Text(from.fabric);
  options.mpi_library_path = Text(from.mpi_library);
  options.mpi.communicator = from.mpi_communicator;
  options.mpi.launched = from.launched;
  if (from.ranks != nullptr) options.mpi.ranks.assign(from.ranks, from.ranks + from.ranks_count);
  options.spin_ns = Scaled(from.spin_us, kMicrosecond);
  options.timeout_ns = SecondsToNs(from.timeout_s);
  options.silent_ns = Scaled(from.silent_s, kSecond);
  options.unreachable = [](int peer) {
    std::lock_guard<std::mutex> lock(process.mutex);
    process.unreachable.push_back(peer);
  };
  return options;
}

// How long an engine may take to stop once its waits have ended.
constexpr TimeNs kAbortTime = 2 * kSecond;

Status TimedOut() {
  return Status(Code::kStalled,
                "shutdown: communication did not end in time; a peer may be frozen");
}

// Removes the engine from the process and ends it. If its loop does not end in time, because it is
// in a call that does not return, it is leaked with its thread: the process is about to end anyway,
// and anything else could hang or crash.
int EndEngine(const char* reason, const std::function<bool(Engine&)>& end) {
  if (in_forked_child.load()) return HR_OK;
  std::shared_ptr<Engine> engine;
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    const bool started = process.starting == nullptr;
    if (process.oob != nullptr) {
      process.oob->Exchanged(Status(Code::kTransport, "init was given up"), {});
    }
    engine = std::exchange(started ? process.engine : process.starting, nullptr);
    if (engine == nullptr) return HR_OK;
    if (!started) process.abandoned = true;  // until its thread has ended
    process.ended_by = Text(reason);
    WatchGeneration(0, nullptr);
  }
  if (end(*engine)) {
    std::lock_guard<std::mutex> lock(process.mutex);
    process.abandoned = false;
    return HR_OK;
  }
  const bool abandoned = engine->abandoned();
  const bool freed = abandoned && engine->AwaitFreed(kAbortTime);
  new std::shared_ptr<Engine>(std::move(engine));
  if (freed) return HR_OK;
  if (!abandoned) return Remember(TimedOut());
  std::lock_guard<std::mutex> lock(process.mutex);
  process.abandoned = true;
  return Remember(
      Status(Code::kTransport, "shutdown: hororing's thread stays in a call that does not return"));
}

}  // namespace
}  // namespace hororing

using namespace hororing;  // the functions below are the only ones outside the namespace

HR_EXPORT int hr_abi_version(void) { return HR_ABI_VERSION; }
HR_EXPORT const char* hr_version(void) { return HORORING_VERSION; }

HR_EXPORT int hr_init(const hr_config* config) try {
  [[maybe_unused]] static const int watched =
      pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });
  if (in_forked_child.load()) return Remember(NotInitialized());
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    if (process.engine != nullptr || process.starting != nullptr) return HR_OK;
    if (process.abandoned) {
      return Remember(
          Status(Code::kTransport,
                 "init: hororing's thread of before shutdown() is in a call that does not "
                 "return, or still waits for the other ranks; start this process again"));
    }
    process.unreachable.clear();
  }
  SetLogLevel(static_cast<LogLevel>(config->log_level));
  const std::string kernels = Text(config->kernels);
  if (kernels != "auto" && !SetKernels(kernels.c_str())) {
    return Remember(
        Status(Code::kInvalidArgument, "KERNELS=" + kernels +
                                           ": this processor, or this build, lacks them; "
                                           "use auto"));
  }
  WorldOptions world = WorldOptionsFrom(*config);
  EngineConfig engine_config = EngineConfigFrom(*config);
  const std::string& backend = engine_config.backend;
  if (backend != "auto" && backend != "host") {
    return Remember(
        Status(Code::kInvalidArgument, "unknown backend '" + backend + "'; choose auto or host"));
  }
  const Status parsed = Parse(Text(config->gpu), &engine_config.gpu);
  if (!parsed.ok()) return Remember(parsed);
  std::shared_ptr<OutOfBandBootstrap> oob;
  if (config->size > 0) oob = std::make_shared<OutOfBandBootstrap>(config->rank, config->size);
  world.bootstrap = oob.get();
  const auto make = [world, oob](World* made) {
    const Status status = MakeWorld(world, made);
    if (oob != nullptr) oob->Close();
    return status;
  };
  std::shared_ptr<Engine> engine = Engine::Begin(engine_config, make, process.handles);
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    process.oob = std::move(oob);
    process.starting = engine;
  }
  WatchGeneration(config->generation, engine);
  return HR_OK;
}
HR_OR(Caught())

HR_EXPORT int hr_init_wait(double timeout_s) try {
  std::shared_ptr<Engine> starting;
  std::shared_ptr<OutOfBandBootstrap> oob;
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    starting = process.starting;
    oob = process.oob;
  }
  if (starting == nullptr) return CurrentEngine() != nullptr ? HR_OK : Remember(NotInitialized());
  const TimeNs end = After(NowNs(), Scaled(timeout_s, kSecond));
  if (oob != nullptr && oob->AwaitExchange(end - NowNs(), &exchange_text)) return HR_EXCHANGES;
  Status status;
  if (!starting->AwaitStart(std::max<TimeNs>(end - NowNs(), 0), &status)) return HR_PENDING;
  if (!status.ok()) {
    hr_abort("init had failed");
    return Remember(status);
  }
  std::lock_guard<std::mutex> lock(process.mutex);
  process.engine = std::exchange(process.starting, nullptr);
  return HR_OK;
}
HR_OR(Caught())

HR_EXPORT const char* hr_exchange_text(void) { return exchange_text.c_str(); }

HR_EXPORT void hr_exchanged(const char* const* texts, const char* error) try {
  std::shared_ptr<OutOfBandBootstrap> oob;
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    oob = process.oob;
  }
  if (oob == nullptr) return;
  if (texts == nullptr) return oob->Exchanged(Status(Code::kTransport, Text(error)), {});
  oob->Exchanged(Status::Ok(), std::vector<std::string>(texts, texts + oob->size()));
}
HR_OR(static_cast<void>(Caught()))

HR_EXPORT int hr_shutdown(const char* reason, double timeout_s) try {
  bool late = false;
  const int code = EndEngine(reason, [&](Engine& engine) {
    late = !engine.Shutdown(Text(reason), SecondsToNs(timeout_s));
    return !late || engine.Abort(TimedOut().message(), kAbortTime);
  });
  return late && code == HR_OK ? Remember(TimedOut()) : code;
}
HR_OR(Caught())

HR_EXPORT int hr_abort(const char* reason) try {
  return EndEngine(reason, [&](Engine& engine) {
    // A starting engine may be inside MPI_Init for a long time.
    const bool starting = engine.state() == Engine::State::kStarting;
    return engine.Abort(Text(reason), starting ? kSecond / 2 : kAbortTime);
  });
}
HR_OR(Caught())

HR_EXPORT void hr_finalize(void) try {
  if (!in_forked_child.load()) FinalizeMpi();
}
HR_OR(static_cast<void>(Caught()))

HR_EXPORT int hr_state_now(void) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return HR_STATE_NONE;
  const Engine::State state = engine->state();
  if (state == Engine::State::kStopped) return HR_STATE_STOPPED;
  return state == Engine::State::kFailed ? HR_STATE_FAILED : HR_STATE_RUNNING;
}
HR_OR((Caught(), 0))

HR_EXPORT const char* hr_last_error(void) { return last_error.c_str(); }
HR_EXPORT int32_t hr_last_error_rank(void) { return last_error_rank; }

HR_EXPORT int32_t hr_unreachable(int32_t index) try {
  std::lock_guard<std::mutex> lock(process.mutex);
  const size_t at = static_cast<size_t>(index);
  return at < process.unreachable.size() ? process.unreachable[at] : -1;
}
HR_OR((Caught(), -1))
