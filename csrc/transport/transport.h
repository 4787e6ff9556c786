// Transport: moves bytes between the ranks of one world, of types and meanings unknown to it.
//
// Thread-safety: one thread at a time, except Wake(), Revoke() and the constant rank()/size().
// If eventcount() is null, it must always be the same thread.
//
// Two planes over the same wires:
//   data     sizes known on both sides; messages of one ordered pair of ranks match in the
//            order in which they were posted.
//   control  messages of any size, from any rank, at any time; posting never blocks.
//
// Invariants
//   1. Every request is waited for exactly once, on error paths too; Wait returns only when
//      the transport will not touch the buffer again.
//   2. Every wait ends: by completion, by the death of a peer (kPeerLost with its rank), by a
//      peer that announced its failure, by Revoke, or by the deadline (kTransport, naming the
//      peer).
//   3. After the first error the data plane is broken: every later Wait fails at once with that
//      same error. The control plane continues as far as possible.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/call_watch.h"
#include "base/clock.h"
#include "base/process.h"
#include "base/status.h"

namespace hororing {

// The loop's thread sleeps on it while a caller that waits for its own request may run the loop
// (docs/threading.md). A lock of the engine decides which of them runs it.
class Eventcount {
 public:
  virtual ~Eventcount() = default;

  // Any thread. Changes whenever something may have happened: read it before looking for work.
  virtual uint32_t Epoch() const = 0;
  // The loop's thread, without that lock: sleeps until the epoch differs from `seen`, or until
  // `deadline`. It is not woken while a caller runs the loop. May return early.
  virtual void Park(uint32_t seen, TimeNs deadline) = 0;
  // The same, but polls briefly first.
  virtual void SpinThenPark(uint32_t seen, TimeNs deadline) = 0;
  // Between these two calls a caller runs the loop, and no event wakes the loop's thread.
  virtual void BeginCallerProgress() = 0;
  virtual void EndCallerProgress() = 0;
};

class OneShotExchange;

class Transport {
 public:
  // A posted data transfer. Small and copyable; each transport defines `slot`.
  struct Request {
    uint64_t slot = 0;
  };

  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* name() const = 0;  // "inproc", "shm", "tcp", "mpi"

  static constexpr TimeNs kNoWait = 0;  // a deadline

  // Data plane. `data` stays valid and, for Receive, untouched until the Wait returns.
  // Zero bytes are legal. `peer` is never this rank.
  virtual Request Send(int peer, const void* data, size_t bytes) = 0;
  virtual Request Receive(int peer, void* data, size_t bytes) = 0;
  virtual Status Wait(Request request, TimeNs deadline) = 0;
  // Makes progress, never blocks. Returns whether Wait(request), still required, would return at
  // once. For callers that wait for other things as well; they check for lost peers (CheckPeers).
  virtual bool Done(Request request) = 0;

  // Control plane. Post takes ownership of the message and delivers messages to a peer in order,
  // perhaps later, while waiting or sleeping. Poll returns one received message, if there is one.
  virtual void Post(int peer, std::string message) = 0;
  virtual bool Poll(int* peer, std::string* message) = 0;

  // Moves data in flight in both planes, never blocks. True if the transport noticed any progress.
  virtual bool Progress() { return false; }
  // Returns when a control message may have arrived, after a Wake() since the last Sleep, or at
  // `deadline`, or early. Spins briefly, then sleeps without using CPU time.
  virtual void Sleep(TimeNs deadline) = 0;
  virtual void Wake() = 0;  // Any thread. Ends the current or the next Sleep.
  // Any thread. Ends every wait of this rank, now and later: waits of the data plane fail with
  // `why`, which CheckPeers also returns; Sleep and Close return. The first call counts. Peers are
  // not notified: AnnounceFailure and Flush still work.
  virtual void Revoke(const Status& why);
  bool revoked() const { return revoked_.load(std::memory_order_acquire); }
  // Null if only the engine's thread may use this transport. Only shared memory (and inproc) has an
  // eventcount; MPI, TCP and a routed transport have none.
  virtual Eventcount* eventcount() { return nullptr; }
  // The exchange of all ranks of this world; null if there is none.
  virtual std::shared_ptr<OneShotExchange> one_shot_exchange() const { return nullptr; }

  // For a transport that cannot detect the end of a process: the processes of all ranks, and which
  // of them are on this host and can be checked.
  virtual void WatchProcesses(std::vector<ProcessIdentity> /*of_ranks*/,
                              std::vector<bool> /*here*/) {}
  // Reports calls of libraries that could block to `calls`, which outlives this transport's use.
  virtual void Watch(CallWatch* /*calls*/) {}
  // Ok while every peer is alive. Cheap: a few calls a second. Shows peers that this process runs.
  virtual Status CheckPeers() = 0;
  // Returns for how long `peer` has given no sign of life, and requests one: call it repeatedly. A
  // rank gives signs of life while it waits for anything, and in CheckPeers, but not while its
  // process is stopped or its network is cut. 0 for a rank that has failed or left.
  virtual TimeNs Silence(int /*peer*/) { return 0; }
  // Waits longer than `warning_ns` call `warn` with the ranks that make no progress. `limit_ns`:
  // how long a wait may take without progress; deadlines are made from it. `meanwhile`: TCP's waits
  // call it while nothing moves; it may use the control plane only.
  struct WaitLimits {
    TimeNs warning_ns = kForever;
    std::function<void(const std::string&)> warn;
    TimeNs limit_ns = 0;
    std::function<void()> meanwhile = [] {};
  };
  virtual void SetWaitLimits(WaitLimits wait_limits) { wait_limits_ = std::move(wait_limits); }
  const WaitLimits& wait_limits() const { return wait_limits_; }
  // Returns when a wait until `deadline`, in which data last moved at `progressed_ns`, gives up: it
  // has its full limit again after every progress, and after this process was stopped.
  virtual TimeNs Extended(TimeNs deadline, TimeNs progressed_ns) const {
    if (wait_limits_.limit_ns == 0 || deadline == kNoWait) return deadline;
    return std::max(deadline,
                    After(std::max(stopped_until_ns_, progressed_ns), wait_limits_.limit_ns));
  }
  // Announces to the peers that this rank has failed; their waits end with Announced(why). `why`
  // blames the rank at fault: this one, or the one that it has lost.
  virtual void AnnounceFailure(const Status& why) = 0;
  // Sends everything that Post has queued, until `deadline`. True if all is sent.
  virtual bool Flush(TimeNs deadline) = 0;
  // The last call of a clean shutdown, on every rank, so that no message of this world can be
  // mistaken for one of the next. Drops messages that still arrive. Waits for the peers' calls
  // until `deadline`; true if all peers have called it or need not. May be called again.
  virtual bool Close(TimeNs /*deadline*/) { return true; }

 protected:
  // REQUIRES: revoked().
  const Status& revocation() const { return revocation_; }
  // Called whenever this process checks its peers, a few times a second. Returns how long this
  // process was stopped since its last check, or 0.
  TimeNs NoteCheck(TimeNs now);
  TimeNs stopped_until() const { return stopped_until_ns_; }

 private:
  WaitLimits wait_limits_;
  TimeNs checked_ns_ = 0, stopped_until_ns_ = 0;
  std::once_flag revoking_;
  std::atomic<bool> revoked_{false};
  Status revocation_;  // constant once revoked_
};

// Returns the status that peers get when a rank announces `why`. The text is "rank 1 failed: ..."
// if rank 1 announces its own failure. Otherwise it is that of `why`, which names the lost rank. It
// has at most 200 bytes; a longer text is cut and ends in "...". The code is that of `why` if the
// engine has failed, so that all ranks raise the same error; else kPeerLost. Without a rank to
// blame, the announcing one is blamed.
Status Announced(const Status& why, int announcing_rank);

// Send and receive at the same time, with one peer each: the step of most collectives.
Status SendReceive(Transport& transport, int to, const void* data, size_t bytes, int from,
                   void* buffer, size_t buffer_bytes, TimeNs deadline);

}  // namespace hororing
