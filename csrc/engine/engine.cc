#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/arithmetic.h"
#include "base/log.h"
#include "base/recorder.h"
#include "base/signals.h"
#include "base/text.h"
#include "engine/handshake.h"
#include "engine/loop.h"
#include "kernels/reduce.h"

namespace hororing {
namespace {

// How long ranks wait for one another at shutdown.
constexpr TimeNs kCloseTime = 5 * kSecond;
// Extra time for steps of the start that have their own time limits and better error texts.
constexpr TimeNs kStartGrace = 2 * kSecond;

// Whether a peer is silent: a stopped process would not close its side.
bool IsSilent(Transport& transport) {
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank() && transport.Silence(peer) > kSecond) return true;
  }
  return false;
}

// Waits for the others as long as all are alive; after a stall, not for silent ranks.
void CloseAll(World& world, bool stalled = false) {
  const TimeNs deadline = After(NowNs(), kCloseTime);
  if (stalled) IsSilent(*world.transport);  // asks the peers for signs of life
  for (Transport* transport : {world.transport.get(), world.bootstrap.get()}) {
    if (transport == nullptr) continue;
    while (!transport->Close(After(NowNs(), 50 * kMillisecond))) {
      if (NowNs() >= deadline || !world.transport->CheckPeers().ok()) return;
      if (stalled && IsSilent(*world.transport)) return;
    }
  }
}

void BindToCpu(int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) != 0) {
    Log(LogLevel::kWarning,
        "hororing's thread could not be bound to core " + std::to_string(cpu) + "; it runs on any");
  }
}

}  // namespace

Engine::Engine(const EngineConfig& config, std::shared_ptr<HandleTable> handles)
    : shared_(config, std::move(handles)),
      start_deadline_(After(NowNs(), After(config.timeout_ns, kStartGrace))) {}

Engine::~Engine() {
  if (thread_.joinable()) thread_.join();
  if (device_watch_.valid()) device_watch_.wait();
}

std::unique_ptr<Engine> Engine::Begin(const EngineConfig& config, WorldMaker make_world,
                                      std::shared_ptr<HandleTable> handles) {
  std::unique_ptr<Engine> starting(new Engine(config, std::move(handles)));
  Engine* raw = starting.get();
  std::packaged_task<void()> run(
      [raw, make_world = std::move(make_world)] { raw->ThreadMain(make_world); });
  starting->ended_ = run.get_future().share();
  const SignalsBlocked blocked;
  starting->thread_ = std::thread(std::move(run));
  return starting;
}

bool Engine::AwaitStart(TimeNs timeout_ns, Status* status) {
  const TimeNs left = std::max<TimeNs>(start_deadline_ - NowNs(), 0);
  const std::chrono::nanoseconds most(std::min({left, timeout_ns, kSecond}));
  if (started_.wait_for(most) != std::future_status::ready) {
    // In MPI_Init, which nothing can end. If it returns after Abort, the loop informs the others
    // and ends. Until then the thread needs its engine, which is therefore leaked.
    *status = Status(Code::kTransport,
                     "init: not all ranks of the job have called it in time (HORORING_TIMEOUT_S "
                     "sets the limit); each of its processes must call init");
    return NowNs() >= start_deadline_;
  }
  *status = started_.get();
  const bool from_start = !shared_.config.timeline.empty() && shared_.config.timeline_from <= 1;
  if (status->ok() && from_start && topology_.rank == 0) {
    const Status timeline = StartTimeline(shared_.config.timeline, shared_.config.timeline_cycles);
    const bool over = timeline.code() == Code::kShutDown;
    const std::string why = over ? "the script of a rank has already ended" : timeline.message();
    if (!timeline.ok()) Log(LogLevel::kError, "no timeline: " + why);
  }
  return true;
}

// The thread lets no exception escape: out of memory becomes a failure of this rank, sent to all.
void Engine::ThreadMain(const WorldMaker& make_world) {
  pthread_setname_np(pthread_self(), "hororing");
  const StandardArithmetic arithmetic;  // not that of the thread that calls init
  const CallWatch::Thread watched(&calls_);
  World world;
  Status status;
  try {
    std::optional<Loop> loop;
    status = Prepare(make_world, &world, &loop);
    if (status.ok()) {
      Serve(world, *loop);
      return shared_.mailbox.Attach(nullptr);
    }
  } catch (const std::exception& error) {
    status = Status(Code::kInternal, std::string("hororing could not start: ") + error.what());
  }
  AnnounceStartFailure(world, status);
  const bool starting = state_ == State::kStarting;
  Finish(status);
  if (starting) start_.set_value(status);
  shared_.mailbox.Attach(nullptr);
}

// Makes a world that all ranks have reached, and the loop over it.
Status Engine::Prepare(const WorldMaker& make_world, World* world, std::optional<Loop>* loop) {
  HORORING_RETURN_IF_ERROR(PrepareWorld(make_world, world));
  const EngineConfig& config = shared_.config;
  Devices::Options devices = config.devices;
  devices.likely = topology_.local_rank;
  shared_.devices = std::make_shared<Devices>(devices);
  const BackendOptions options{config.backend,
                               config.allreduce,
                               {shared_.devices, config.gpu, config.allreduce.reproducible,
                                static_cast<size_t>(config.fusion_bytes)}};
  std::vector<std::unique_ptr<Backend>> backends =
      MakeBackends(options, *world, *world->transport, Members::World(topology_.size));
  std::vector<TimeNs> clock_offsets;
  HORORING_RETURN_IF_ERROR(MeasureClocks(*world->transport, world->topology,
                                         After(NowNs(), config.timeout_ns), &clock_offsets));
  Log(LogLevel::kDebug,
      "running as rank " + std::to_string(topology_.rank) + " of " +
          std::to_string(topology_.size) + ", " + std::to_string(topology_.local_rank) + " of " +
          std::to_string(topology_.local_size) + " on its host; transport " + transport_name_ +
          (world->why.empty() ? "" : ", since " + world->why) + "; backends " +
          Listed(backends, [](const auto& each) { return std::string(each->name()); }) +
          "; kernels " + KernelsInUse());
  loop->emplace(shared_, *world, options, std::move(backends), std::move(clock_offsets));
  return Status::Ok();
}

void Engine::Serve(World& world, Loop& loop) {
  std::unique_lock<std::mutex> progress(progress_mutex_);
  loop_ = &loop;
  state_ = State::kRunning;
  start_.set_value(Status::Ok());
  Status why;
  bool peaceful = false;
  try {
    why = loop.Run(progress);
    peaceful = loop.peaceful();
  } catch (const std::exception& error) {  // from DrainAndStop: the loop itself catches
    why = Status(Code::kInternal, std::string("an internal error of hororing: ") + error.what());
  }
  loop_ = nullptr;
  progress.unlock();
  Finish(why, peaceful);
  if (peaceful || loop.end_agreed()) CloseAll(world, why.code() == Code::kStalled);
}

// Called when the start fails. Peers that run would take this exit for a normal shutdown. If all
// fail with the same error, they wait for one another, so that none reports a lost peer.
void Engine::AnnounceStartFailure(World& world, const Status& why) {
  if (world.transport == nullptr) return;
  if (all_fail_) return CloseAll(world);
  const bool heard = why.message().rfind("init: ", 0) == 0;  // from another rank, perhaps
  const std::string text = (heard ? "" : "init: ") + why.message();
  world.transport->AnnounceFailure({why.code(), text, why.rank()});
  world.transport->Flush(After(NowNs(), kStartGrace));
}

Status Engine::PrepareWorld(const WorldMaker& make_world, World* world) {
  BindToCpu(shared_.config.cpu);
  HORORING_RETURN_IF_ERROR(make_world(world));
  topology_ = world->topology;
  shared_.sets.emplace(topology_.size);
  transport_name_ = world->transport->name();
  shared_.transport_allows_callers = world->transport->eventcount() != nullptr;
  shared_.mailbox.Attach(world->transport.get());
  // Counting steps needs every request. Other backends compute other bits.
  const EngineConfig& config = shared_.config;
  if (config.backend == "auto" && config.timeline_to == 0)
    exchange_ = world->transport->one_shot_exchange();
  local_processes_ = world->local_processes;
  world->transport->Watch(&calls_);
  if (!world->note.empty()) Log(LogLevel::kWarning, world->note);
  const Status same = CompareFingerprints(*world->transport, shared_.config.fingerprint,
                                          After(NowNs(), shared_.config.timeout_ns));
  all_fail_ = same.code() == Code::kMismatch;
  return same;
}

// Fails all pending and all later requests with `why`.
void Engine::Finish(const Status& why, bool peaceful) {
  shared_.mailbox.Close(why);
  state_ = peaceful ? State::kStopped : State::kFailed;
  const TimeNs now = NowNs();
  std::vector<std::unique_ptr<TensorEntry>> left = shared_.tensors.Close(why);
  for (const std::unique_ptr<TensorEntry>& entry : left) {
    ++shared_.stats.completed;
    Record(Event::kFailed, now, entry->request.kind, entry->request.process_set,
           entry->request.name);
    shared_.handles->Complete(entry->handle, WithStage(*entry, why), {});
  }
  // Destroying an event calls the driver, which may wait for kernels that are yet to be aborted.
  failed_entries_ = std::move(left);
}

Status Engine::MarkReady(int ordinal, const std::vector<CuStream>& streams, StreamEvents* events,
                         TensorEntry* entry) {
  std::shared_ptr<Device> device;
  Status status = shared_.devices->Use(ordinal, &device);
  std::call_once(device_in_use_, [this] {
    std::packaged_task<void()> watch([this] { WatchDevice(); });
    device_watch_ = watch.get_future();
    const SignalsBlocked blocked;
    std::thread(std::move(watch)).detach();
  });
  for (size_t i = 0; status.ok() && i < streams.size(); ++i) {
    std::shared_ptr<DeviceEvent>& event = (*events)[streams[i]];
    if (event == nullptr) status = device->Record(streams[i], &event);
    entry->ready.push_back(event);
  }
  // A CUDA error does not break the engine itself, which continues.
  entry->stage = "SUBMIT";
  return status.ok() ? status : WithStage(*entry, Status(Code::kInvalidArgument, status.message()));
}

Status Engine::Submit(std::unique_ptr<TensorEntry>* entry, bool blocking, int64_t* handle,
                      uint64_t* id) {
  const bool traces = shared_.trace.enabled();
  const TimeNs begin = traces ? NowNs() : 0;
  const std::string tensor = traces ? (*entry)->request.name : std::string();
  size_t bytes = 0;
  for (const TensorView& view : (*entry)->views) bytes += traces ? view.bytes() : 0;
  HORORING_RETURN_IF_ERROR(shared_.tensors.Submit(entry, handle, id));
  ++shared_.stats.submitted;
  if (!blocking || !shared_.CallersMayProgress()) shared_.mailbox.NotifySubmitted();
  if (traces)
    shared_.trace.Span(Stage::kSubmit, Track::kCaller, tensor, begin, NowNs(),
                       static_cast<int64_t>(bytes));
  return Status::Ok();
}

size_t Engine::Start(const Restart* restarts, const uintptr_t* addresses, size_t count,
                     int64_t* handles) {
  if (shared_.trace.enabled()) return 0;  // each request has its span
  const size_t started = shared_.tensors.Start(restarts, addresses, count, handles);
  if (started > 0) shared_.mailbox.NotifySubmitted();
  shared_.stats.submitted += static_cast<int64_t>(started);
  return started;
}

Status Engine::StartTimeline(const std::string& path, bool mark_cycles) {
  if (topology_.rank != 0) return shared_.mailbox.closed();
  if (!path.empty()) HORORING_RETURN_IF_ERROR(StopTimeline(shared_.config.timeout_ns));
  exchange_disabled_ = true;
  const Status started = RunCommand({path, mark_cycles}, shared_.config.timeout_ns);
  if (!started.ok()) exchange_disabled_ = false;
  return started;
}

Status Engine::StopTimeline(TimeNs timeout_ns) {
  if (topology_.rank != 0) return shared_.mailbox.closed();
  exchange_disabled_ = false;
  return RunCommand({}, timeout_ns);
}

}  // namespace hororing
