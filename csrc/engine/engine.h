// Engine: one rank's background thread and its interface for callers. A value, not a global: a test
// world is several engines in one process.
//
//   callers      Submit -> TensorTable, wake the loop (engine/mailbox.h)     Wait -> HandleTable
//   the loop     report -> NEGOTIATE -> agreement -> PLAN .. COMPLETE (engine/loop.h)
//
// If the loop's thread is asleep, a caller in Wait runs the loop (ADR 12).
//
// States: Starting -> Running -> Stopped (some rank shut down) or Failed (a peer was lost, or
// worse). In the last two every request fails at once, with the reason.
//
// Thread-safety: everything but Begin and the destructor from any thread. See docs/threading.md.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/call_watch.h"
#include "base/process.h"
#include "engine/shared.h"
#include "transport/factory.h"
#include "transport/shm/one_shot_exchange.h"

namespace hororing {

class Loop;

using StreamEvents = std::map<CuStream, std::shared_ptr<DeviceEvent>>;

class Engine {
 public:
  enum class State { kStarting, kRunning, kStopped, kFailed };
  // Called once, on the loop's thread, so that one thread does all communication.
  using WorldMaker = std::function<Status(World*)>;

  // Call Begin, then AwaitStart until it returns true, or Abort. On success all ranks run. On
  // failure all reachable ranks get the same error; call Abort, and destroy the engine only if it
  // returns true. `handles` may be shared by engines that follow one another.
  static std::unique_ptr<Engine> Begin(const EngineConfig& config, WorldMaker make_world,
                                       std::shared_ptr<HandleTable> handles);
  bool AwaitStart(TimeNs timeout_ns, Status* status);
  ~Engine();  // REQUIRES: the loop has ended (Shutdown or Abort returned true).

  // Submits `**entry`, whose handle and times are unset and whose request matches its views. `id`:
  // for Start, or 0. Afterwards `*entry` is null or may be used again. `blocking`: this thread
  // calls Wait next, so if it may run the loop, no other thread is woken.
  Status Submit(std::unique_ptr<TensorEntry>* entry, bool blocking, int64_t* handle, uint64_t* id);
  // See TensorTable.
  size_t Start(const Restart* restarts, const uintptr_t* addresses, size_t count, int64_t* handles);
  // Sums the tensor through the one-shot exchange of all ranks (transport/shm/one_shot_exchange.h),
  // without the loop, for a caller that would wait. True: `handle` is complete, with the bits that
  // the loop would have computed. False: nothing has happened and the caller must submit it,
  // because the ranks did not call at the same time, or this rank has a request in flight.
  bool AllreduceOneShot(const TensorEntry& entry, int64_t* handle);
  // See HandleTable. Polling for a request reports it immediately, just as waiting does.
  HandleState Poll(int64_t handle);
  HandleState Wait(int64_t handle, TimeNs timeout_ns, Status* status);
  HandleState WaitMany(const int64_t* handles, size_t count, TimeNs timeout_ns, bool* all_ok,
                       std::vector<std::shared_ptr<const DeviceEvent>>* done_events = nullptr);

  // See HandleTable; for a caller that blocks until then.
  int64_t NextCompletion(int64_t seen, TimeNs timeout_ns);

  // For callers that wait elsewhere: if the loop's thread is in a call that does not return
  // (base/call_watch.h), abandons the loop, so that all pending requests fail.
  void CheckLoop();
  bool abandoned() const { return calls_.abandoned(); }
  // Whether the process may start another engine although this one is abandoned: its GPU work is
  // aborted, so that the call has returned. Waits for that until `timeout_ns` is over.
  bool AwaitFreed(TimeNs timeout_ns) const;

  // Asks all ranks to stop; see hr_shutdown. False: the loop did not end in time; leak the engine.
  bool Shutdown(const std::string& reason, TimeNs timeout_ns);
  // Ends every wait of the loop with `why`; rank -1 means this one. Does not block.
  void Revoke(const Status& why) { shared_.mailbox.Revoke(why); }
  // Fails this rank and informs the peers; see hr_abort. Ends all waits of the loop. Like Shutdown.
  bool Abort(const std::string& reason, TimeNs timeout_ns);

  // Records in `entry`, whose views are on device `ordinal`, when its inputs are ready: view i is
  // computed by the work that is now in streams[i]. `events`: the events recorded by one call, one
  // per stream. kInvalidArgument if the device cannot be used.
  Status MarkReady(int ordinal, const std::vector<CuStream>& streams, StreamEvents* events,
                   TensorEntry* entry);

  Devices& devices() { return *shared_.devices; }

  const ProcessSets& sets() const { return *shared_.sets; }

  // On rank 0, starts and stops the timeline of all ranks; on others, only checks the state.
  Status StartTimeline(const std::string& path, bool mark_cycles);
  Status StopTimeline(TimeNs timeout_ns);

  State state() const { return state_.load(); }
  const Topology& topology() const { return topology_; }
  TraceSink& trace() { return shared_.trace; }
  const Stats& stats() const { return shared_.stats; }

 private:
  Engine(const EngineConfig& config, std::shared_ptr<HandleTable> handles);

  void ThreadMain(const WorldMaker& make_world);
  Status Prepare(const WorldMaker& make_world, World* world, std::optional<Loop>* loop);
  Status PrepareWorld(const WorldMaker& make_world, World* world);
  void Serve(World& world, Loop& loop);
  void AnnounceStartFailure(World& world, const Status& why);
  void Finish(const Status& why, bool peaceful = false);
  void WatchDevice();
  template <typename Future>
  bool Await(const Future& future, TimeNs timeout_ns);
  Status RunCommand(Mailbox::Command command, TimeNs timeout_ns);
  template <typename WaitFn>
  HandleState WaitUntil(const WaitFn& wait, TimeNs timeout_ns);
  void ProgressUntil(const std::function<bool()>& done, TimeNs deadline);

  Shared shared_;
  std::atomic<State> state_{State::kStarting};

  // Written by the loop thread before `started_`, constant afterwards.
  Topology topology_;
  std::string transport_name_;
  std::vector<ProcessIdentity> local_processes_;
  bool all_fail_ = false;  // loop thread: the start fails alike on all ranks

  // Null: every request goes through the loop.
  std::shared_ptr<OneShotExchange> exchange_;
  std::mutex exchange_mutex_;  // held by the one caller that exchanges
  // Set on rank 0, which disables the exchange for all ranks: the timeline must show every request.
  std::atomic<bool> exchange_disabled_{false};

  const TimeNs start_deadline_;
  CallWatch calls_;  // of the loop's thread
  // Set when the loop is abandoned in a call that returns once its GPU work is aborted.
  std::atomic<Loop*> waits_for_kernels_{nullptr};
  std::promise<void> free_;
  const std::shared_future<void> freed_{free_.get_future()};
  // Entries of a loop that has failed or was abandoned. They hold events of the device.
  std::vector<std::unique_ptr<TensorEntry>> failed_entries_;

  std::mutex progress_mutex_;  // held by the thread that runs the loop; see Eventcount
  // GUARDED_BY(progress_mutex_); null before it begins and after it has ended.
  Loop* loop_ = nullptr;

  std::mutex command_mutex_;  // serialises callers of RunCommand
  std::promise<Status> start_;
  std::shared_future<Status> started_{start_.get_future()};
  std::shared_future<void> ended_;
  std::thread thread_;
  std::once_flag device_in_use_;
  std::future<void> device_watch_;  // a thread from the first tensor on a device
};

}  // namespace hororing
