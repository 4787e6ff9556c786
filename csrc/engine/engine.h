// Engine: one rank's background thread and what the callers share with it. A value, not a
// global: a test world is several engines in one process.
//
//   callers      Submit -> TensorTable, wake the loop          Wait -> HandleTable
//   loop thread  report -> NEGOTIATE -> agreement -> PLAN .. COMPLETE (engine/loop.h)
//
// A caller in Wait takes the loop over while it waits, if its thread is asleep (ADR 0012).
//
// States: Starting -> Running -> Stopped (some rank shut down) or Failed (a peer was lost, or
// worse). In the last two every request fails at once, with the reason.
//
// Thread-safety: everything but Start and the destructor from any thread. See docs/threading.md.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend/factory.h"
#include "base/call_watch.h"
#include "base/clock.h"
#include "base/process.h"
#include "base/status.h"
#include "collective/algorithm.h"
#include "engine/handle_table.h"
#include "engine/shared_process_sets.h"
#include "engine/stats.h"
#include "engine/tensor_table.h"
#include "negotiation/stall_inspector.h"
#include "schedule/tuner.h"
#include "trace/trace.h"
#include "transport/factory.h"
#include "transport/rendezvous.h"

namespace hororing {

struct EngineConfig {
  // Rank-visible.
  int64_t fusion_bytes = 64 << 20;
  TimeNs hold_ns = kMillisecond;
  int cache_capacity = 8192;
  AllreduceOptions allreduce;  // but for what the wire costs, which is measured
  // Finds fusion_bytes and hold_ns by trying. Its initial setting is those.
  std::optional<Tuner::Options> tune;
  std::string tune_log;     // path, for rank 0; empty: none
  std::string fingerprint;  // see CompareFingerprints
  // Local.
  std::string backend = "auto";
  DeviceWay gpu = DeviceWay::kAuto;  // rank-visible
  Devices::Options devices;          // but for `likely`
  StallInspector::Options stall;
  TimeNs timeout_ns = kForever;  // for every wait on a peer
  // How often a rank that has nothing to do looks whether its peers and its parent are alive.
  TimeNs checks_ns = 250 * kMillisecond;
  int cpu = -1;               // core for the loop thread; -1: any
  bool watch_parent = false;  // end the process when its parent dies
  std::string timeline;       // path; rank 0's counts
  bool timeline_cycles = false;
  int64_t timeline_bytes = 0;  // most of any timeline; 0: no limit
  // The steps of training that `timeline` is about, counted from 1; 0: everything.
  int64_t timeline_from = 0, timeline_to = 0;
};

class Loop;

class Engine {
 public:
  enum class State { kStarting, kRunning, kStopped, kFailed };
  // Called once, on the loop thread, so that one thread does all the communication.
  using WorldMaker = std::function<Status(World*)>;

  // Blocks until the loop runs on every rank, or fails (alike on all ranks, where they can still
  // talk). `handles` may be shared by engines that follow one another.
  static Status Start(const EngineConfig& config, WorldMaker make_world,
                      std::shared_ptr<HandleTable> handles, std::unique_ptr<Engine>* engine);
  // The same in steps: Begin, and AwaitStart until it returns true, or Abort. `status` is that of
  // Start; where it is an error, Abort tells whether the engine can be destroyed.
  static std::unique_ptr<Engine> Begin(const EngineConfig& config, WorldMaker make_world,
                                       std::shared_ptr<HandleTable> handles);
  bool AwaitStart(TimeNs timeout_ns, Status* status);
  // REQUIRES: the loop has ended (Shutdown or Abort returned true).
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // `entry` without handle and times; its request matches its views. `wait_follows`: this thread
  // calls Wait(*handle) next, so nobody else needs to be woken.
  Status Submit(std::unique_ptr<TensorEntry> entry, bool wait_follows, int64_t* handle);
  // Those of the first tensors whose names were used for the same before and are not in flight:
  // they cost little. How many; nothing is said of the others.
  size_t SubmitAgain(const OneTensor* tensors, size_t count, bool wait_follows, int64_t* handles);
  // Several, for which nobody waits next; the first that is refused is the last that is tried.
  // `submitted` of them then have handles.
  Status SubmitMany(std::vector<std::unique_ptr<TensorEntry>> entries, int64_t* handles,
                    size_t* submitted);
  // Sums the tensor at the rendezvous of all ranks (transport/rendezvous.h), without the loop, for
  // a caller that would wait. True: it is done, with the bits that the loop would have come to, and
  // `handle` is complete. False: nothing has happened; submit it. That is so where the ranks do not
  // come at the same time, or this one has something else in flight. (engine/at_once.cc)
  bool AtOnce(const OneTensor& tensor, int64_t* handle);
  // As those of HandleTable. What is polled for is reported at once, as what is waited for.
  HandleTable::Look Poll(int64_t handle);
  HandleTable::Look Wait(int64_t handle, TimeNs timeout_ns, Status* status);
  HandleTable::Look WaitMany(const int64_t* handles, size_t count, TimeNs timeout_ns, bool* all_ok,
                             std::vector<std::shared_ptr<const DeviceEvent>>* landed = nullptr);

  // As that of HandleTable, for a caller that is blocked until then.
  int64_t NextCompletion(int64_t seen, TimeNs timeout_ns);

  // For those who wait in another way: gives the loop up where its thread is in a call that does
  // not return (base/call_watch.h), so that everything pending fails.
  void LookAtLoop();
  // That has happened.
  bool given_up() const { return calls_.given_up(); }

  // Asks all ranks to stop; see hr_shutdown. False when the loop did not end in time: the
  // engine must then be leaked, not destroyed.
  bool Shutdown(const std::string& reason, TimeNs timeout_ns);
  // Fails this rank and tells the peers, without their consent; see hr_abort. Ends every wait of
  // the loop. As Shutdown.
  bool Abort(const std::string& reason, TimeNs timeout_ns);

  // Notes in `entry`, whose views lie on device `ordinal`, how far its streams have come: what is
  // in streams[i] now computes view i. kInvalidArgument where the device cannot be used.
  Status MarkReady(int ordinal, const std::vector<CuStream>& streams, TensorEntry* entry);

  Devices& devices() { return *devices_; }

  // The process sets that this rank is a member of, or knows of.
  const SharedProcessSets& sets() const { return sets_; }

  // Rank 0 starts and stops the timeline of all ranks; on others a check of the state.
  Status StartTimeline(const std::string& path, bool mark_cycles);
  Status StopTimeline(TimeNs timeout_ns);

  State state() const { return state_.load(); }
  const Topology& topology() const { return topology_; }
  const std::string& transport_name() const { return transport_name_; }
  TraceSink& trace() { return trace_; }
  const Stats& stats() const { return stats_; }

  // What callers ask of the loop. One at a time; later ones wait.
  struct Command {
    enum class Kind { kNone, kStartTimeline, kStopTimeline };
    Kind kind = Kind::kNone;
    std::string path;
    bool mark_cycles = false;
    int64_t number = 0;  // unique
  };

 private:
  friend class Loop;
  Engine(const EngineConfig& config, std::shared_ptr<HandleTable> handles);

  void ThreadMain(const WorldMaker& make_world);
  Status Prepare(const WorldMaker& make_world, World* world, std::optional<Loop>* loop);
  void Serve(World& world, Loop& loop);
  void Ended();
  Status PrepareWorld(const WorldMaker& make_world, World* world);
  void Started(Status status);
  void AnnounceStartFailure(World& world, const Status& why);
  void Finish(const Status& why);
  void TellPeers(const Status& why);
  bool Await(std::unique_lock<std::mutex>& lock, TimeNs timeout_ns,
             const std::function<bool()>& done);
  bool JoinBefore(TimeNs timeout_ns);
  Status RunCommand(const Command& command, TimeNs timeout_ns);
  Status StoppedStatus() const;
  Status Add(std::unique_ptr<TensorEntry> entry, int64_t handle);
  void Forget(int64_t handle, const Status& status);
  bool Drivable() const;
  void DriveUntil(const std::function<bool()>& done, TimeNs deadline);

  const EngineConfig config_;
  const std::shared_ptr<HandleTable> handles_;
  TensorTable tensors_;
  SharedProcessSets sets_;
  BackendOptions backend_options_;  // loop thread
  bool all_know_ = false;           // loop thread: every rank comes to the same end
  TraceSink trace_;
  Stats stats_;
  std::atomic<State> state_{State::kStarting};

  // Written by the loop thread before `started_`, constant afterwards.
  Topology topology_;
  std::string transport_name_;
  std::shared_ptr<Devices> devices_;
  std::vector<ProcessIdentity> neighbours_;

  // Null: every request goes through the loop.
  std::shared_ptr<Rendezvous> rendezvous_;
  std::mutex rendezvous_mutex_;  // held by the one caller that is there
  // On rank 0, without which no rendezvous succeeds: the timeline is to show everything now.
  std::atomic<bool> shows_all_{false};

  const TimeNs start_deadline_;
  CallWatch calls_;  // of the loop's thread
  // Of a loop that was given up: what still refers to a device.
  std::vector<std::unique_ptr<TensorEntry>> left_behind_;

  std::mutex target_mutex_;
  Transport* target_ = nullptr;         // GUARDED_BY(target_mutex_); null while there is none
  std::optional<std::string> aborted_;  // GUARDED_BY(target_mutex_); why
  void SetTarget(Transport* target);
  void RevokeAborted();
  void Wake();
  void WakeForRequests();
  void WakeUnless(uint32_t bell);  // where the bell still is what it was

  std::mutex turn_;       // held by whoever runs the loop; see Transport
  Loop* loop_ = nullptr;  // GUARDED_BY(turn_); null before it begins and after it has ended
  // Whether the transport lets callers drive the loop. Constant once `started_`.
  bool drivable_ = false;
  // The loop's thread looks at what is submitted in a moment, without being woken. Written by that
  // thread: false before it looks.
  std::atomic<bool> poll_scheduled_{false};
  // Callers in Wait and WaitMany.
  std::atomic<int> waiting_{0};
  std::atomic<int> awaiting_next_{0};  // and in NextCompletion
  class Waits;
  // Somebody polls, and what is submitted is not reported yet.
  std::atomic<bool> asked_for_{false};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false;       // GUARDED_BY(mutex_)
  bool ended_ = false;         // GUARDED_BY(mutex_)
  Status start_status_;        // GUARDED_BY(mutex_)
  Status final_status_;        // GUARDED_BY(mutex_)
  std::string stop_reason_;    // GUARDED_BY(mutex_)
  Command command_;            // GUARDED_BY(mutex_)
  bool command_done_ = false;  // GUARDED_BY(mutex_)
  Status command_status_;      // GUARDED_BY(mutex_)
  std::mutex command_mutex_;   // serialises callers of RunCommand
  std::atomic<bool> leave_{false};
  std::atomic<bool> command_waiting_{false};

  std::thread thread_;
};

}  // namespace hororing
