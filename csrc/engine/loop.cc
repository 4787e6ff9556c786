#include "engine/loop.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "backend/factory.h"
#include "base/log.h"
#include "base/reduce.h"
#include "negotiation/codec.h"
#include "transport/subgroup.h"

namespace hororing {
namespace {

// How often a rank that has nothing to do looks whether its peers and its parent are alive.
constexpr TimeNs kHouseInterval = 250 * kMillisecond;
// How long the last messages (the agreement to stop, the end of the timeline) may take.
constexpr TimeNs kFarewellTime = 2 * kSecond;

Coordinator::Options CoordinatorOptions(const EngineConfig& config, int size) {
  Coordinator::Options options;
  options.size = size;
  options.fusion_bytes = config.fusion_bytes;
  options.hold_ns = config.hold_ns;
  options.cache_capacity = config.cache_capacity;
  options.stall = config.stall;
  return options;
}

Status RemovedStatus() {
  return Status(Code::kInvalidArgument, "the process set has been removed");
}

Channel WorldChannel(const World& world, std::vector<std::unique_ptr<Backend>> backends) {
  Channel channel;
  channel.ranks.resize(static_cast<size_t>(world.topology.size));
  std::iota(channel.ranks.begin(), channel.ranks.end(), 0);
  channel.rank = world.topology.rank;
  channel.backends = std::move(backends);
  return channel;
}

}  // namespace

Loop::Loop(Engine& engine, World& world, std::vector<std::unique_ptr<Backend>> backends,
           std::vector<TimeNs> clock_offsets)
    : engine_(engine),
      transport_(*world.transport),
      turns_(world.transport->turns()),
      topology_(world.topology),
      timeline_(*world.transport, world.topology, std::move(clock_offsets), engine.trace_),
      runner_({engine.config_.fusion_bytes, engine.config_.timeout_ns},
              WorldChannel(world, std::move(backends)), engine.tensors_, *engine.handles_,
              engine.trace_, engine.stats_),
      parent_pid_(getppid()) {
  if (topology_.rank == 0) coordinator_.emplace(CoordinatorOptions(engine.config_, topology_.size));
}

Status Loop::Run(std::unique_lock<std::mutex>& turn) {
  try {
    while (!final_) {
      const uint32_t bell = turns_ != nullptr ? turns_->Bell() : 0;
      if (Step() || final_) continue;
      if (turns_ != nullptr) {
        Doze(turn, bell);
      } else {
        transport_.Sleep(NextDeadline());
      }
      ++engine_.stats_.loop_wakeups;
    }
  } catch (const std::exception& error) {
    Broke(error);
  }
  Farewell();
  return *final_;
}

// Sleeps without the turn, and comes back with it when there is something to do and nobody who
// does it: a driver rings the bell if it leaves anything behind.
void Loop::Doze(std::unique_lock<std::mutex>& turn, uint32_t bell) {
  const TimeNs until = doze_until_ns_ = NextDeadline();
  turn.unlock();
  for (;;) {
    turns_->Doze(bell, until);
    if (NowNs() >= until) return turn.lock();
    bell = turns_->Bell();  // before the attempt: what comes after it rings again
    if (turn.try_lock()) return;
  }
}

Loop::Left Loop::Drive(const std::function<bool()>& done, TimeNs deadline) {
  // Peers ring while the last batch is under way. Another look finds that this was all, mostly,
  // and spares the engine's thread to be woken for it.
  constexpr int kLastLooks = 3;
  turns_->BeginDriving();
  uint32_t bell = 0;
  int last_looks = 0;
  try {
    for (;;) {
      bell = turns_->Bell();
      const bool busy = Step();
      if (final_) break;
      if (done()) {
        if (++last_looks > kLastLooks || turns_->Bell() == bell) break;
        continue;
      }
      if (busy) continue;
      if (NowNs() >= deadline) break;
      transport_.Sleep(std::min(deadline, NextDeadline()));
      ++engine_.stats_.loop_wakeups;
    }
  } catch (const std::exception& error) {
    Broke(error);
  }
  turns_->EndDriving();
  return {bell, final_ || NextDeadline() < doze_until_ns_};
}

// One look at everything; true when there was something to do.
bool Loop::Step() {
  if (engine_.abort_.load()) {
    std::lock_guard<std::mutex> lock(engine_.mutex_);
    End(Status(Code::kPeerLost, engine_.stop_reason_, topology_.rank));
    return true;
  }
  bool busy = Report();
  busy |= Receive();
  if (!final_ && coordinator_) busy |= Decide();
  if (!final_) busy |= ServeCommands();
  if (!final_) KeepHouse(NowNs());
  return busy;
}

// SUBMIT -> NEGOTIATE: what callers have submitted since the last time.
bool Loop::Report() {
  struct Report report;
  report.applied = applied_;
  const TimeNs now = NowNs();
  for (TensorEntry* entry : engine_.tensors_.TakeSubmitted()) {
    if (!engine_.sets_.Holds(entry->request.process_set)) {  // removed since it was submitted
      FailEntry(engine_.tensors_.Remove(Key(entry->request)), RemovedStatus());
      continue;
    }
    entry->reported_ns = now;
    const uint64_t id = cache_.Find(entry->request);
    if (id != 0) {
      report.cached.push_back(id);
    } else {
      report.fresh.push_back(entry->request);
    }
  }
  engine_.stats_.cache_hits += static_cast<int64_t>(report.cached.size());
  engine_.stats_.cache_misses += static_cast<int64_t>(report.fresh.size());
  if (engine_.leave_.load() && !left_) {
    std::lock_guard<std::mutex> lock(engine_.mutex_);
    report.leaving = left_ = true;
    report.reason = engine_.stop_reason_;
  }
  if (report.cached.empty() && report.fresh.empty() && !report.leaving) return false;
  if (coordinator_) {
    coordinator_->Receive(0, report, now);
  } else {
    transport_.Post(0, Encode(report));
    ++engine_.stats_.control_messages_sent;
  }
  return true;
}

bool Loop::Receive() {
  bool any = false;
  int peer = 0;
  std::string message;
  while (!final_ && transport_.Poll(&peer, &message)) {
    any = true;
    ++engine_.stats_.control_messages_received;
    MessageKind kind = MessageKind::kReport;
    bool understood = KindOf(message, &kind);
    if (understood && kind == MessageKind::kReport && coordinator_) {
      struct Report report;
      understood = Decode(message, &report);
      if (understood) coordinator_->Receive(peer, report, NowNs());
    } else if (understood && kind == MessageKind::kAgreement && peer == 0) {
      Agreement agreement;
      understood = Decode(message, &agreement);
      if (understood) Apply(agreement);
    } else if (understood && kind == MessageKind::kTrace) {
      std::string events;
      bool last = false;
      understood = DecodeTrace(message, &events, &last);
      if (understood) timeline_.Receive(peer, events, last);
    } else {
      understood = false;
    }
    if (!understood) {
      End(Status(Code::kInternal, "malformed control message from rank " + std::to_string(peer),
                 peer));
    }
  }
  return any;
}

bool Loop::Decide() {
  const std::string warning = coordinator_->InspectStalls(NowNs());
  if (!warning.empty()) Log(LogLevel::kWarning, "stall: " + warning);
  const std::optional<Agreement> agreement = coordinator_->Decide(NowNs());
  if (!agreement) return false;
  const bool to_all = coordinator_->world_only();
  const std::string message = to_all ? Encode(*agreement) : std::string();
  for (int peer = 1; peer < topology_.size; ++peer) {
    if (to_all) {
      transport_.Post(peer, message);
    } else {
      const std::optional<Agreement> part = coordinator_->PartFor(peer, *agreement);
      if (!part) continue;
      transport_.Post(peer, Encode(*part));
    }
    ++engine_.stats_.control_messages_sent;
  }
  Apply(*agreement);
  return true;
}

void Loop::Apply(const Agreement& agreement) {
  engine_.trace_.CycleStart(NowNs());
  // Not always the next one: agreements that do not concern this rank are not sent to it.
  if (agreement.sequence <= applied_) {
    return End(Status(Code::kInternal, "agreement " + std::to_string(agreement.sequence) +
                                           " came after " + std::to_string(applied_)));
  }
  std::vector<Work> work;
  for (const Decision& decision : agreement.decisions) {
    switch (decision.kind) {
      case Decision::Kind::kRun: {
        std::optional<Work> agreed = Agreed(decision);
        if (!agreed) break;
        if (agreed->entry->views.empty()) {
          // In its place among the batches, since it is about who takes part in them. Not so a
          // barrier: ranks that do not hear of it must come to the same batches.
          if (agreed->entry->request.kind != Collective::kBarrier) Run(&work);
          if (!final_) Settle(*agreed);
        } else {
          work.push_back(std::move(*agreed));
        }
        break;
      }
      case Decision::Kind::kFail: Fail(decision); break;
      case Decision::Kind::kTimeline:
        Run(&work);
        timeline_.Switch(decision.timeline_on, decision.timeline_cycles);
        break;
      case Decision::Kind::kLeave:
      case Decision::Kind::kAbort:
        Run(&work);
        if (!final_) End(decision.status);
        break;
    }
    if (final_) return;
  }
  Run(&work);
  stand_ins_.clear();
  for (uint64_t id : agreement.evicted) cache_.Evict(id);
  applied_ = agreement.sequence;
}

void Loop::Run(std::vector<Work>* work) {
  if (work->empty() || final_) return;
  const Status status = runner_.Run(std::exchange(*work, {}));
  if (!status.ok()) End(status);
}

// What this rank has to do of a decision; nothing, where it does not take part.
std::optional<Work> Loop::Agreed(const Decision& decision) {
  if (!engine_.sets_.Holds(decision.process_set)) return std::nullopt;
  Work work;
  const bool cached = decision.name.empty();
  const ResponseCache::Record* record = cached ? cache_.Lookup(decision.cache_id) : nullptr;
  const std::string key = cached ? (record != nullptr ? Key(record->request) : std::string())
                                 : Key(decision.process_set, decision.name);
  work.entry = engine_.tensors_.Find(key);
  if (work.entry == nullptr) {
    if (decision.stand_in) {
      work.entry = StandIn(*decision.stand_in);
    } else if (record != nullptr) {
      work.entry = StandIn(record->request);
    } else {
      End(Status(Code::kInternal, "agreement on a request that this rank does not have: '" +
                                      decision.name + "', id " +
                                      std::to_string(decision.cache_id)));
    }
    if (work.entry == nullptr) return std::nullopt;
  }
  work.rows = cached ? record->rows : decision.rows;
  if (!cached && decision.cache_id != 0) {
    cache_.Define(decision.cache_id, work.entry->request, decision.rows);
  }
  TraceNegotiation(*work.entry, NowNs());
  return work;
}

// This rank has joined, and contributes what leaves the others' values as they are.
TensorEntry* Loop::StandIn(const Request& request) {
  auto entry = std::make_unique<TensorEntry>();
  entry->request = request;
  entry->reported_ns = NowNs();
  for (const Request::Tensor& tensor : request.tensors) {
    TensorView view;
    view.dtype = tensor.dtype;
    view.shape = tensor.shape;
    GatheredTensor memory;
    if (!memory.Allocate(view.bytes(), 0)) {
      End(Status(Code::kInternal, "no memory to take part in " + request.Title() + " after join, " +
                                      std::to_string(view.bytes()) + " bytes"));
      return nullptr;
    }
    view.input = view.output = memory.data();
    FillNeutral({tensor.dtype, request.op, request.prescale, request.postscale}, memory.data(),
                static_cast<size_t>(view.elements()));
    entry->views.push_back(std::move(view));
    entry->results.push_back(std::move(memory));
  }
  stand_ins_.push_back(std::move(entry));
  return stand_ins_.back().get();
}

// A request without tensors: that all ranks have agreed is all there is to it, mostly.
void Loop::Settle(const Work& work) {
  const Request& request = work.entry->request;
  if (request.kind == Collective::kAddProcessSet) {
    AddSet(static_cast<int32_t>(work.rows[0]), request);
  } else if (request.kind == Collective::kRemoveProcessSet && work.rows[0] != 0) {
    RemoveSet(request.root);
  }
  if (!work.rows.empty()) {
    work.entry->results.emplace_back();
    if (!work.entry->results.back().Hold(work.rows)) {
      return End(Status(Code::kInternal, "no memory for the result of " + request.Title()));
    }
  }
  runner_.Complete(work.entry);
}

void Loop::AddSet(int32_t id, const Request& request) {
  engine_.sets_.Add(id, request.ranks, request.root != 0);
  ++sets_added_;
  const ProcessSet set = *engine_.sets_.Find(id);
  const int place = set.IndexOf(topology_.rank);
  if (place < 0) return;
  Channel channel;
  channel.ranks = set.ranks;
  channel.rank = place;
  channel.transport = std::make_unique<Subgroup>(transport_, set.ranks);
  channel.backends = MakeSetBackends(engine_.config_.backend, engine_.config_.reproducible,
                                     transport_, *channel.transport, {set.ranks, id, sets_added_});
  runner_.AddSet(id, std::move(channel));
}

void Loop::RemoveSet(int32_t id) {
  engine_.sets_.Remove(id);
  for (std::unique_ptr<TensorEntry>& entry : engine_.tensors_.RemoveSet(id)) {
    FailEntry(std::move(entry), RemovedStatus());
  }
  cache_.ForgetSet(id);
  runner_.RemoveSet(id);
}

void Loop::Fail(const Decision& decision) {
  const std::string key = Key(decision.process_set, decision.name);
  if (const TensorEntry* failed = engine_.tensors_.Find(key)) {
    TraceNegotiation(*failed, NowNs());
  }
  std::unique_ptr<TensorEntry> entry = engine_.tensors_.Remove(key);
  if (entry == nullptr) return;
  ++engine_.stats_.completed;
  engine_.handles_->Complete(entry->handle, decision.status, {});
}

void Loop::FailEntry(std::unique_ptr<TensorEntry> entry, const Status& status) {
  ++engine_.stats_.completed;
  engine_.handles_->Complete(entry->handle, During(*entry, status), {});
}

void Loop::TraceNegotiation(const TensorEntry& entry, TimeNs end) {
  if (!engine_.trace_.enabled()) return;
  const std::string name = std::string("NEGOTIATE_") + UpperName(entry.request.kind);
  for (size_t i = 0; i < std::max<size_t>(entry.views.size(), 1); ++i) {
    engine_.trace_.Add({name, TensorName(entry.request, i), Track::kNegotiate, false,
                        entry.reported_ns, end,
                        entry.views.empty() ? 0 : static_cast<int64_t>(entry.views[i].bytes())});
  }
}

bool Loop::ServeCommands() {
  if (!engine_.command_waiting_.load()) return false;
  std::unique_lock<std::mutex> lock(engine_.mutex_);
  Engine::Command command = engine_.command_;
  lock.unlock();
  Status status;
  bool done = true;
  if (command.kind == Engine::Command::Kind::kStartTimeline) {
    status = timeline_.Open(command.path);
    if (status.ok()) coordinator_->SwitchTimeline(true, command.mark_cycles);
  } else {
    done = timeline_.closed();
    if (!done && command.kind == Engine::Command::Kind::kStopTimeline) {
      coordinator_->SwitchTimeline(false, false);
      command.kind = Engine::Command::Kind::kNone;  // from now on only wait for the last events
    }
  }
  lock.lock();
  // Its caller may have given up meanwhile, and another command may be there.
  if (engine_.command_.number != command.number) return true;
  if (done) {
    engine_.command_waiting_ = false;
    engine_.command_done_ = true;
    engine_.command_status_ = status;
    engine_.changed_.notify_all();
  } else {
    const bool first = engine_.command_.kind != command.kind;
    engine_.command_ = command;
    return first;
  }
  return true;
}

void Loop::KeepHouse(TimeNs now) {
  timeline_.Ship(now);
  if (now < next_house_ns_) return;
  next_house_ns_ = After(now, kHouseInterval);
  const Status peers = transport_.CheckPeers();
  if (!peers.ok()) return End(peers);
  if (engine_.config_.watch_parent && getppid() != parent_pid_) {
    End(Status(Code::kPeerLost, "the launcher of this rank has ended"));
    kill(getpid(), SIGTERM);
  }
}

TimeNs Loop::NextDeadline() const {
  TimeNs next = std::min(next_house_ns_, timeline_.NextDeadline());
  if (coordinator_) next = std::min(next, coordinator_->NextDeadline());
  return next;
}

void Loop::Broke(const std::exception& error) {
  End(Status(Code::kInternal, std::string("the engine broke: ") + error.what()));
}

void Loop::End(Status why) {
  if (!final_) final_ = std::move(why);
}

// The last words: peers must learn that this rank takes no further part, and rank 0 wants the
// events that are still on their way.
void Loop::Farewell() {
  if (final_->code() != Code::kShutDown) {
    transport_.AnnounceFailure(final_->message(), final_->rank());
    if (topology_.size > 1) {
      Log(LogLevel::kError, "the engine has failed: " + final_->message());
    }
  }
  timeline_.Switch(false, false);
  const TimeNs deadline = After(NowNs(), kFarewellTime);
  transport_.Flush(deadline);
  if (!timeline_.closed() && final_->code() == Code::kShutDown) {
    int peer = 0;
    std::string message, events;
    bool last = false;
    while (!timeline_.closed() && NowNs() < deadline && transport_.CheckPeers().ok()) {
      if (!transport_.Poll(&peer, &message)) {
        transport_.Sleep(std::min(deadline, After(NowNs(), 20 * kMillisecond)));
      } else if (DecodeTrace(message, &events, &last)) {
        timeline_.Receive(peer, events, last);
      }
    }
  }
  timeline_.CloseNow();
}

}  // namespace hororing
