// Transport: moves bytes between the ranks of one world. Knows neither element types nor
// what is negotiated.
//
// Thread-safety: one thread at a time, except Wake(), Revoke() and the constant rank()/size().
// Where eventcount() is null that is the same thread from the beginning to the end.
//
// Two planes over the same wires:
//   data     sizes known on both sides; messages of one ordered pair of ranks match in the
//            order in which they were posted.
//   control  messages of any size, from anybody, at any time; posting never blocks.
//
// Invariants
//   1. Every request is waited for exactly once, on error paths too; Wait returns only when
//      the transport will not touch the buffer again.
//   2. Every wait ends: by completion, by the death of a peer (kPeerLost with its rank), by a
//      peer that announced its failure, by Revoke, or by the deadline (kTransport, naming the
//      peer).
//   3. After the first error the data plane is broken: every later Wait fails at once with
//      that same error. The control plane goes on as far as it can.
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

// What the loop thread sleeps on while a caller that waits for its own request may run the loop
// (docs/threading.md). A lock of the engine decides which of them runs it.
class Eventcount {
 public:
  virtual ~Eventcount() = default;

  // Any thread. Changes whenever something may have happened: read it before looking for work.
  virtual uint32_t Epoch() const = 0;
  // The loop thread, without that lock: sleeps until the epoch is no longer `seen`, but is not
  // woken while a caller runs the loop; or until `deadline`. May return early.
  virtual void Park(uint32_t seen, TimeNs deadline) = 0;
  // The same, and polls briefly before.
  virtual void SpinThenPark(uint32_t seen, TimeNs deadline) = 0;
  // While a caller runs the loop. Between them no event wakes the loop thread.
  virtual void BeginCallerProgress() = 0;
  virtual void EndCallerProgress() = 0;
};

class Rendezvous;

class Transport {
 public:
  // A posted data transfer. Small and copyable; the meaning of `slot` is the transport's.
  struct Request {
    uint64_t slot = 0;
  };

  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* name() const = 0;  // "inproc", "shm", "tcp", "mpi"

  // Data plane. `data` stays valid and, for Receive, untouched until the Wait returns.
  // Zero bytes are legal. `peer` is never this rank.
  virtual Request Send(int peer, const void* data, size_t bytes) = 0;
  virtual Request Receive(int peer, void* data, size_t bytes) = 0;
  virtual Status Wait(Request request, TimeNs deadline) = 0;
  // Moves what is in flight, and never blocks: true when a Wait for the request, which is still
  // due, would return at once. For those that wait for other things as well; they look for lost
  // peers by themselves (CheckPeers).
  virtual bool Done(Request request) = 0;

  // Control plane. Post takes the message over and delivers it in order per peer; it may be
  // sent later, while waiting or sleeping. Poll returns one received message, if there is one.
  virtual void Post(int peer, std::string message) = 0;
  virtual bool Poll(int* peer, std::string* message) = 0;

  // Moves what is in flight in both planes, and never blocks: true when anything moved, as far as
  // the transport can tell.
  virtual bool Move() { return false; }
  // Returns when a control message may be there, after a Wake() (also one that came before
  // the call, since the last Sleep), or at `deadline`. Spins briefly, then sleeps without
  // burning CPU. May return early.
  virtual void Sleep(TimeNs deadline) = 0;
  // Any thread. Ends the current or the next Sleep.
  virtual void Wake() = 0;
  // Any thread. Every wait of this rank, under way or to come, ends at once: those of the data
  // plane with `why`, which CheckPeers returns, too, and Sleep and Close. The first call counts. It
  // tells nobody: last words can still be announced and flushed.
  virtual void Revoke(const Status& why);
  bool revoked() const { return revoked_.load(std::memory_order_acquire); }
  // Null where one thread must do everything, as with MPI.
  virtual Eventcount* eventcount() { return nullptr; }
  // Of all ranks of this world; null where there is none.
  virtual std::shared_ptr<Rendezvous> rendezvous() const { return nullptr; }

  // The processes of all ranks, and which of them are on this host, where they are looked at: for
  // transports that cannot see by themselves that one ends.
  virtual void WatchProcesses(std::vector<ProcessIdentity> /*of_ranks*/,
                              std::vector<bool> /*here*/) {}
  // Tells `calls`, which outlives this transport's use, of calls of libraries that could block.
  virtual void Watch(CallWatch* /*calls*/) {}
  // Ok while every peer is alive. Cheap enough for a few calls a second; peers see by it that this
  // process runs.
  virtual Status CheckPeers() = 0;
  // For how long `peer` has given no sign of life; asks it for one, so that whoever wants to know
  // calls this again and again. A rank gives signs while it waits for anything, and in CheckPeers:
  // not where its process is stopped, nor through a network that is cut. 0 also for a rank that has
  // failed or left.
  virtual TimeNs Silence(int /*peer*/) { return 0; }
  // Waits that last so long are told to `warn`, with the ranks that make no progress. `limit_ns` is
  // that of every wait, as their deadlines say.
  struct Patience {
    TimeNs warning_ns = kForever;
    std::function<void(const std::string&)> warn;
    TimeNs limit_ns = 0;
  };
  virtual void SetPatience(Patience patience) { patience_ = std::move(patience); }
  const Patience& patience() const { return patience_; }
  // When a wait until `deadline` gives up. A process that was stopped has its whole limit again.
  virtual TimeNs Extended(TimeNs deadline) const {
    return stopped_until_ns_ == 0
               ? deadline
               : std::max(deadline, After(stopped_until_ns_, patience_.limit_ns));
  }
  // Tells the peers that this rank will take no further part: their waits end with what
  // Announced(why) says. `why` blames the rank whose fault it is: this one, or the one that it has
  // lost.
  virtual void AnnounceFailure(const Status& why) = 0;
  // Sends what Post has queued, until `deadline`; true when nothing is left.
  virtual bool Flush(TimeNs deadline) = 0;
  // The last call, where the world ends in peace: on every rank, so that no message of this world
  // can be taken for one of the next. What is still arriving is dropped. Waits for the peers'
  // calls until `deadline`; true when all have come, or are not needed. May be called again.
  virtual bool Close(TimeNs /*deadline*/) { return true; }

 protected:
  // REQUIRES: revoked().
  const Status& revocation() const { return revocation_; }
  // Called whenever this process checks its peers, a few times a second. Returns how long this
  // process was stopped since its last check, or 0.
  TimeNs Looked(TimeNs now);
  TimeNs stopped_until() const { return stopped_until_ns_; }

 private:
  Patience patience_;
  TimeNs looked_ns_ = 0, stopped_until_ns_ = 0;
  std::once_flag revoking_;
  std::atomic<bool> revoked_{false};
  Status revocation_;  // constant once revoked_
};

// What peers are told of a failure. The text is "rank 1 failed: ..." where rank 1 tells of itself,
// else that of `why`, since it names the rank that was lost; at most 200 bytes, and what was cut
// ends in "...". The code is that of `why` where the engine has failed, so that an event is the
// same error on all ranks; else kPeerLost. No rank to blame counts as the announcing one.
Status Announced(const Status& why, int announcing_rank);

// Send and receive at the same time, with one peer each: the step of most collectives.
Status SendReceive(Transport& transport, int to, const void* data, size_t bytes, int from,
                   void* buffer, size_t buffer_bytes, TimeNs deadline);

}  // namespace hororing
