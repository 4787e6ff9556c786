#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <utility>

#include "base/log.h"
#include "base/recorder.h"
#include "base/reduce.h"
#include "engine/handshake.h"
#include "engine/loop.h"

namespace hororing {
namespace {

// How long ranks wait for one another when they all stop.
constexpr TimeNs kCloseTime = 5 * kSecond;
// What steps of the start with time limits of their own, which know more, get beyond it.
constexpr TimeNs kStartGrace = 2 * kSecond;

// Somebody who has been stopped does not come.
bool IsSilent(Transport& transport) {
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank() && transport.Silence(peer) > kSecond) return true;
  }
  return false;
}

// Waits for the others, as long as all are alive; after a stall not for who is `silent`.
void CloseAll(World& world, bool stalled = false) {
  const TimeNs deadline = After(NowNs(), kCloseTime);
  if (stalled) IsSilent(*world.transport);  // asks
  for (Transport* transport : {world.transport.get(), world.bootstrap.get()}) {
    if (transport == nullptr) continue;
    while (!transport->Close(After(NowNs(), 50 * kMillisecond))) {
      if (NowNs() >= deadline || !world.transport->CheckPeers().ok()) return;
      if (stalled && IsSilent(*world.transport)) return;
    }
  }
}

// "shm_direct, host"
std::string Names(const std::vector<std::unique_ptr<Backend>>& backends) {
  std::string names;
  for (const std::unique_ptr<Backend>& backend : backends) {
    names += (names.empty() ? "" : ", ") + std::string(backend->name());
  }
  return names;
}

void BindToCpu(int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) != 0) {
    Log(LogLevel::kWarning, "the engine's thread could not be bound to core " +
                                std::to_string(cpu) + "; it runs on any");
  }
}

}  // namespace

Engine::Engine(const EngineConfig& config, std::shared_ptr<HandleTable> handles)
    : config_(config),
      handles_(std::move(handles)),
      start_deadline_(After(NowNs(), After(config.timeout_ns, kStartGrace))) {}

Engine::~Engine() {
  if (thread_.joinable()) thread_.join();
}

Status Engine::Start(const EngineConfig& config, WorldMaker make_world,
                     std::shared_ptr<HandleTable> handles, std::unique_ptr<Engine>* engine) {
  std::unique_ptr<Engine> starting = Begin(config, std::move(make_world), std::move(handles));
  Status status;
  while (!starting->AwaitStart(kSecond, &status)) continue;
  if (status.ok()) {
    *engine = std::move(starting);
  } else if (!starting->Abort("init had failed", kStartGrace)) {
    static_cast<void>(starting.release());
  }
  return status;
}

std::unique_ptr<Engine> Engine::Begin(const EngineConfig& config, WorldMaker make_world,
                                      std::shared_ptr<HandleTable> handles) {
  std::unique_ptr<Engine> starting(new Engine(config, std::move(handles)));
  Engine* raw = starting.get();
  starting->thread_ = std::thread([raw, make_world = std::move(make_world)] {
    raw->ThreadMain(make_world);
    raw->Ended();
  });
  return starting;
}

bool Engine::AwaitStart(TimeNs timeout_ns, Status* status) {
  std::unique_lock<std::mutex> lock(mutex_);
  const TimeNs left = std::max<TimeNs>(start_deadline_ - NowNs(), 0);
  changed_.wait_for(lock, std::chrono::nanoseconds(std::min({left, timeout_ns, kSecond})),
                    [&] { return started_; });
  if (!started_) {
    // Inside MPI_Init, which nothing can end. Should it come out of there after Abort, the loop
    // tells the others and ends; until then the thread needs its engine, which is therefore leaked.
    *status = Status(Code::kTransport,
                     "init: not all ranks of the job have called it in time (HORORING_TIMEOUT_S "
                     "sets the limit); every process that mpirun starts must call init");
    return NowNs() >= start_deadline_;
  }
  *status = start_status_;
  lock.unlock();
  const bool from_start = !config_.timeline.empty() && config_.timeline_from <= 1;
  if (status->ok() && from_start && topology_.rank == 0) {
    const Status timeline = StartTimeline(config_.timeline, config_.timeline_cycles);
    if (!timeline.ok()) Log(LogLevel::kError, "no timeline: " + timeline.message());
  }
  return true;
}

// The thread never lets an exception escape: out of memory becomes a failure of this rank, which
// its peers hear of.
void Engine::ThreadMain(const WorldMaker& make_world) {
  pthread_setname_np(pthread_self(), "hororing");
  const CallWatch::Thread watched(&calls_);
  World world;
  Status status;
  try {
    std::optional<Loop> loop;
    status = Prepare(make_world, &world, &loop);
    if (status.ok()) {
      Serve(world, *loop);
      return SetTarget(nullptr);
    }
  } catch (const std::exception& error) {
    status = Status(Code::kInternal, std::string("the engine could not start: ") + error.what());
  }
  AnnounceStartFailure(world, status);
  Finish(status);
  Started(status);
  SetTarget(nullptr);
}

// A world that all ranks have reached, and the loop over it.
Status Engine::Prepare(const WorldMaker& make_world, World* world, std::optional<Loop>* loop) {
  HORORING_RETURN_IF_ERROR(PrepareWorld(make_world, world));
  backend_options_.name = config_.backend;
  backend_options_.allreduce = config_.allreduce;
  Devices::Options devices = config_.devices;
  devices.likely = topology_.local_rank;
  devices_ = std::make_shared<Devices>(devices);
  backend_options_.cuda = {devices_, config_.gpu, config_.allreduce.reproducible,
                           static_cast<size_t>(config_.fusion_bytes)};
  Status refused;
  HORORING_RETURN_IF_ERROR(Agree(*world->transport, CheckBackends(backend_options_, *world),
                                 After(NowNs(), config_.timeout_ns), &refused));
  all_know_ = !refused.ok();
  HORORING_RETURN_IF_ERROR(refused);
  HORORING_RETURN_IF_ERROR(MeasureWire(*world->transport, world->topology,
                                       After(NowNs(), config_.timeout_ns),
                                       &backend_options_.allreduce.wire));
  std::vector<std::unique_ptr<Backend>> backends;
  HORORING_RETURN_IF_ERROR(MakeBackends(backend_options_, *world, &backends));
  std::vector<TimeNs> clock_offsets;
  HORORING_RETURN_IF_ERROR(MeasureClocks(*world->transport, world->topology,
                                         After(NowNs(), config_.timeout_ns), &clock_offsets));
  Log(LogLevel::kDebug,
      "running as rank " + std::to_string(topology_.rank) + " of " +
          std::to_string(topology_.size) + ", " + std::to_string(topology_.local_rank) + " of " +
          std::to_string(topology_.local_size) + " on its host; transport " + transport_name_ +
          "; backends " + Names(backends) + "; kernels " + KernelsInUse());
  loop->emplace(*this, *world, std::move(backends), std::move(clock_offsets));
  return Status::Ok();
}

void Engine::Serve(World& world, Loop& loop) {
  std::unique_lock<std::mutex> turn(turn_);
  loop_ = &loop;
  state_ = State::kRunning;
  Started(Status::Ok());
  Status why;
  try {
    why = loop.Run(turn);
  } catch (const std::exception& error) {  // from its last words: the loop itself catches
    why = Status(Code::kInternal, std::string("the engine broke: ") + error.what());
  }
  loop_ = nullptr;
  turn.unlock();
  Finish(why);
  if (why.code() == Code::kShutDown || all_know_) CloseAll(world, why.code() == Code::kStalled);
}

void Engine::SetTarget(Transport* target) {
  std::lock_guard<std::mutex> lock(target_mutex_);
  target_ = target;
  RevokeAborted();
}

// REQUIRES: target_mutex_.
void Engine::RevokeAborted() {
  if (target_ == nullptr || !aborted_) return;
  target_->Revoke(Status(Code::kPeerLost, *aborted_, topology_.rank));
}

// Of a start that has failed. Peers may have started already, and to them who goes without a word
// has left in peace. Where all ranks have come to the same end, they wait for those that do not
// know it yet: nobody must hear of it as of a rank that was lost.
void Engine::AnnounceStartFailure(World& world, const Status& why) {
  if (world.transport == nullptr) return;
  if (all_know_) return CloseAll(world);
  world.transport->AnnounceFailure({why.code(), "init: " + why.message(), why.rank()});
  world.transport->Flush(After(NowNs(), kStartGrace));
}

Status Engine::PrepareWorld(const WorldMaker& make_world, World* world) {
  BindToCpu(config_.cpu);
  HORORING_RETURN_IF_ERROR(make_world(world));
  topology_ = world->topology;
  sets_.Reset(topology_.rank, topology_.size);
  transport_name_ = world->transport->name();
  drivable_ = world->transport->turns() != nullptr;
  SetTarget(world->transport.get());
  // The tuner, and who counts steps, must see everything; the other backends come to other bits.
  const bool direct = config_.backend == "auto" || config_.backend == "shm_direct";
  if (direct && !config_.tune && config_.timeline_to == 0)
    rendezvous_ = world->transport->rendezvous();
  neighbours_ = world->neighbours;
  world->transport->Watch(&calls_);
  if (!world->note.empty()) Log(LogLevel::kWarning, world->note);
  const Status same = CompareFingerprints(*world->transport, config_.fingerprint,
                                          After(NowNs(), config_.timeout_ns));
  all_know_ = same.code() == Code::kMismatch;
  return same;
}

void Engine::Started(Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (started_) return;
  started_ = true;
  start_status_ = std::move(status);
  changed_.notify_all();
}

void Engine::Ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

// Everything that is left fails with `why`, and so does everything that comes later.
void Engine::Finish(const Status& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    final_status_ = why;
    command_waiting_ = false;
    command_done_ = true;
    command_status_ = why;
    changed_.notify_all();
  }
  state_ = why.code() == Code::kShutDown ? State::kStopped : State::kFailed;
  const TimeNs now = NowNs();
  std::vector<std::unique_ptr<TensorEntry>> left = tensors_.Close(why);
  for (const std::unique_ptr<TensorEntry>& entry : left) {
    ++stats_.completed;
    Record(Event::kFailed, now, entry->request.kind, entry->request.name);
    handles_->Complete(entry->handle, During(*entry, why), {});
  }
  // The end of an event is a call of the driver, which the loop's thread may have locked.
  if (given_up()) left_behind_ = std::move(left);
}

Status Engine::MarkReady(int ordinal, const std::vector<CuStream>& streams, TensorEntry* entry) {
  std::shared_ptr<Device> device;
  Status status = devices_->Use(ordinal, &device);
  std::map<CuStream, std::shared_ptr<DeviceEvent>> events;
  for (size_t i = 0; status.ok() && i < streams.size(); ++i) {
    std::shared_ptr<DeviceEvent>& event = events[streams[i]];
    if (event == nullptr) status = device->Record(streams[i], &event);
    entry->ready.push_back(event);
  }
  // That CUDA is broken is no fault of the engine's, which goes on.
  entry->stage = "SUBMIT";
  return status.ok() ? status : During(*entry, Status(Code::kInvalidArgument, status.message()));
}

Status Engine::Submit(std::unique_ptr<TensorEntry> entry, bool wait_follows, int64_t* handle) {
  *handle = handles_->Create();
  const Status status = Add(std::move(entry), *handle);
  if (!status.ok()) {
    *handle = 0;
  } else if (!wait_follows || !Drivable()) {
    WakeForRequests();
  }
  return status;
}

size_t Engine::SubmitAgain(const OneTensor* tensors, size_t count, bool wait_follows,
                           int64_t* handles) {
  if (trace_.enabled()) return 0;  // each has its span
  const TimeNs now = config_.tune ? NowNs() : 0;
  bool ring = !wait_follows || !Drivable();
  const size_t added = tensors_.AddAgain(tensors, count, handles, now, &ring);
  if (added == 0) return 0;
  stats_.submitted += static_cast<int64_t>(added);
  if (ring) WakeForRequests();
  return added;
}

Status Engine::SubmitMany(std::vector<std::unique_ptr<TensorEntry>> entries, int64_t* handles,
                          size_t* submitted) {
  handles_->Create(handles, entries.size());
  Status status;
  for (*submitted = 0; *submitted < entries.size(); ++*submitted) {
    status = Add(std::move(entries[*submitted]), handles[*submitted]);
    if (!status.ok()) break;
  }
  for (size_t i = *submitted + 1; i < entries.size(); ++i) Forget(handles[i], status);
  if (*submitted > 0) WakeForRequests();
  return status;
}

// On failure `handle` is no more.
Status Engine::Add(std::unique_ptr<TensorEntry> entry, int64_t handle) {
  const TimeNs begin = entry->submitted_ns = NowNs();
  entry->handle = handle;
  const std::string tensor = trace_.enabled() ? entry->request.name : std::string();
  const int64_t bytes = trace_.enabled() ? entry->request.bytes() : 0;
  // From Add on the entry belongs to the loop.
  const Status status = tensors_.Add(std::move(entry));
  if (!status.ok()) {
    Forget(handle, status);
    return status;
  }
  ++stats_.submitted;
  if (trace_.enabled()) trace_.Span(Stage::kSubmit, Track::kCaller, tensor, begin, NowNs(), bytes);
  return Status::Ok();
}

void Engine::Forget(int64_t handle, const Status& status) {
  handles_->Release(handle);
  handles_->Complete(handle, status, {});
}

bool Engine::Shutdown(const std::string& reason, TimeNs timeout_ns) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_reason_.empty()) stop_reason_ = reason;
  }
  leave_ = true;
  Wake();
  return JoinBefore(timeout_ns);
}

bool Engine::Abort(const std::string& reason, TimeNs timeout_ns) {
  {
    std::lock_guard<std::mutex> lock(target_mutex_);
    aborted_ = reason;
    RevokeAborted();
  }
  return JoinBefore(timeout_ns);
}

bool Engine::JoinBefore(TimeNs timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  Await(lock, timeout_ns, [&] { return ended_ || given_up(); });
  return ended_;
}

Status Engine::StoppedStatus() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return final_status_;
}

Status Engine::StartTimeline(const std::string& path, bool mark_cycles) {
  if (state() != State::kRunning) return StoppedStatus();
  if (topology_.rank != 0) return Status::Ok();
  HORORING_RETURN_IF_ERROR(StopTimeline(config_.timeout_ns));
  shows_all_ = true;
  const Status started =
      RunCommand({Command::Kind::kStartTimeline, path, mark_cycles, 0}, config_.timeout_ns);
  if (!started.ok()) shows_all_ = false;
  return started;
}

Status Engine::StopTimeline(TimeNs timeout_ns) {
  if (state() != State::kRunning) return StoppedStatus();
  if (topology_.rank != 0) return Status::Ok();
  shows_all_ = false;
  return RunCommand({Command::Kind::kStopTimeline, "", false, 0}, timeout_ns);
}

Status Engine::RunCommand(const Command& command, TimeNs timeout_ns) {
  std::lock_guard<std::mutex> one_at_a_time(command_mutex_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!final_status_.ok()) return final_status_;
  const int64_t number = command_.number + 1;
  command_ = command;
  command_.number = number;
  command_done_ = false;
  command_waiting_ = true;
  lock.unlock();
  Wake();
  lock.lock();
  if (!Await(lock, timeout_ns, [&] { return command_done_; })) {
    command_waiting_ = false;
    return Status(Code::kStalled, "timeline: the other ranks did not send their last events");
  }
  return command_status_;
}

}  // namespace hororing
