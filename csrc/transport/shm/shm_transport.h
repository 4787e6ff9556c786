// ShmTransport: a Transport over one ShmSegment: byte streams between pairs of ranks, and a
// doorbell per rank. Serves processes of one host ("shm") and threads of one process
// ("inproc"), so that the sanitizers see the code that users run.
//
// All ranks of a world must attach before any of them waits for another one, because a rank's death
// is visible only after it has attached. Waiting ranks notice the end of a process within 50 ms:
// each looks at a few of the others, and tells all.
//
// While a rank waits, it also moves everything else in flight (outgoing data, queued control
// messages), so two ranks that wait for each other's bytes always make progress.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "kernels/shared_writer.h"
#include "transport/long_wait.h"
#include "transport/polling.h"
#include "transport/shm/one_shot_exchange.h"
#include "transport/shm/segment.h"
#include "transport/transfers.h"
#include "transport/transport.h"

namespace hororing {

class ShmTransport final : public Transport, private Eventcount {
 public:
  // `spin_ns`: how long a wait polls before it sleeps on the futex.
  ShmTransport(std::shared_ptr<ShmSegment> segment, int rank, TimeNs spin_ns);
  ~ShmTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return segment_->process_shared() ? "shm" : "inproc"; }

  Request Send(int peer, const void* data, size_t bytes) override;
  Request Receive(int peer, void* data, size_t bytes) override;
  Status Wait(Request request, TimeNs deadline) override;
  bool Done(Request request) override;
  void Post(int peer, std::string message) override;
  bool Poll(int* peer, std::string* message) override;
  void Sleep(TimeNs deadline) override;
  void Wake() override { Ring(rank_); }
  Eventcount* eventcount() override { return this; }
  std::shared_ptr<OneShotExchange> one_shot_exchange() const override { return exchange_; }
  Status CheckPeers() override { return CheckPeers({}); }
  TimeNs Silence(int peer) override;
  void AnnounceFailure(const Status& why) override;
  bool Flush(TimeNs deadline) override;
  // Whether a pipe was too full for everything that was posted.
  bool HasUnsent() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return !peer.outbox.empty(); });
  }

  // For backend/host_pipeline.h, which shares the segment and this rank's doorbell.
  ShmSegment& segment() { return *segment_; }
  // Rings the doorbell of another rank of a batch, with a system call only if it sleeps. A parked
  // loop thread has no batch under way and is not woken.
  void RingWorker(int peer) { Ring(peer, /*parked_too=*/false); }
  // For a worker that also waits for other things: the `Bell` of Backoff (transport/polling.h).
  uint32_t Epoch() const override { return self_.doorbell.load(); }
  void SleepUnless(uint32_t seen, TimeNs span_ns);
  // Ranks that may still read this rank's slot: those of the latest batch through slots, until all
  // of them have consumed its blocks before `end`.
  struct SlotReaders {
    std::vector<int> slots;  // empty: none
    std::vector<int> ranks;  // of the job; they own those slots
    int set = 0;             // as in RankState::progress
    uint64_t incarnation = 0;
    uint64_t end = 0;
  };
  SlotReaders& slot_readers() { return slot_readers_; }
  SharedWriter& to_slot() { return to_slot_; }

  // Blocks until ready() is true: makes progress, spins, then sleeps on the doorbell. Ends early if
  // a peer has died or failed, if a lagging rank has shut down, or at the deadline (kTransport).
  // lagging() lists the awaited ranks. `ready` reads only shared atomics whose writers ring this
  // rank's doorbell.
  template <typename Ready, typename Lagging>
  Status WaitUntil(Ready ready, Lagging lagging, TimeNs deadline) {
    Backoff backoff(spin_ns_, kCheckInterval, &spinner_);
    LongWait wait(backoff.begin_ns());
    TimeNs check_ns = After(backoff.begin_ns(), kCheckInterval);
    for (;;) {
      const uint32_t epoch = Epoch();
      if (ready()) return Status::Ok();
      data_moved_ = false;
      const bool moved = Progress();
      if (data_moved_) wait.NoteProgress(NowNs());
      const TimeNs until = Extended(deadline, wait.progressed_ns());
      if (!backoff.Pause(*this, epoch, moved, revoked() ? 0 : until)) {
        const Status peers = CheckPeers(lagging());
        if (!peers.ok()) return peers;
        // This process may have been stopped.
        if (NowNs() < Extended(deadline, wait.progressed_ns())) continue;
        return wait.GiveUp(*this, lagging());
      }
      if (!CheckIsDue(backoff.now_ns(), kCheckInterval, &check_ns)) continue;
      const Status peers = CheckPeers(lagging());
      wait.Check(*this, backoff.now_ns(), lagging);
      if (peers.ok()) continue;
      // Data that a peer wrote before it ended still counts.
      Progress();
      return ready() ? Status::Ok() : peers;
    }
  }

 private:
  // How often a waiting rank checks whether its peers are alive.
  static constexpr TimeNs kCheckInterval = 50 * kMillisecond;
  // The number of processes that a check looks at. Each costs about 10 us.
  static constexpr int kLooksPerCheck = 4;
  // RankState::sleepers. kWorker: the thread that runs the loop; kParked: the loop thread while a
  // caller runs it. They are also the futex bits by which each is woken.
  static constexpr uint32_t kWorker = 1, kParked = 2, kCallerProgress = 4;
  // Transfers and messages in flight with one peer.
  struct Peer : PeerTransfers {
    std::deque<std::string> outbox;  // framed messages
    size_t outbox_offset = 0;        // bytes of the first message that are already sent
    // The message that is arriving: its frame, then its body.
    uint64_t inbox_bytes = 0;
    std::string inbox;
    size_t inbox_offset = 0;  // bytes received, of frame and body
  };
  // The frame of a control message: the size of its body, uint64.
  static constexpr size_t kFrameBytes = sizeof(uint64_t);

  void Ring(int peer, bool parked_too = true);
  void RingForPipe(int peer);
  void SpinThenPark(uint32_t seen, TimeNs deadline) override;
  void Park(uint32_t seen, TimeNs deadline) override { SleepOnDoorbell(seen, deadline, kParked); }
  void BeginCallerProgress() override { self_.sleepers.fetch_or(kCallerProgress); }
  void EndCallerProgress() override { self_.sleepers.fetch_and(~kCallerProgress); }
  bool Progress() override;
  template <typename Move>
  bool MoveOpen(Transfers& transfers, const Move& move);
  bool Push(int peer);
  bool Pull(int peer);
  bool PushControl(int peer);
  bool PullControl(int peer);
  bool CheckIsDue(TimeNs now, TimeNs interval, TimeNs* check_ns);
  void SleepOnDoorbell(uint32_t epoch, TimeNs deadline, uint32_t sleeper);
  Status CheckPeers(const std::vector<int>& lagging);
  bool PeerProcessIsGone(int peer) const;
  void LookForDeadPeers();
  bool PeerHasStopped(int peer) const;
  void SoundAlarm();

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_;
  const int size_ = segment_->geometry().ranks;
  const TimeNs spin_ns_;
  RankState& self_ = segment_->rank_state(rank_);
  const std::shared_ptr<OneShotExchange> exchange_;  // null: spin_ns is 0, or there are no slots
  std::vector<Peer> peers_;
  Inbox received_;
  bool data_moved_ = false;  // by a Progress
  Spinner spinner_{16};
  uint32_t last_sleep_epoch_ = 0;  // the doorbell after the last Sleep: shows a later Wake
  Status broken_;                  // first data-plane error
  SlotReaders slot_readers_;
  int looked_at_ = rank_;            // the latest peer whose process a check has looked at
  SharedWriter to_slot_, to_pipes_;  // they have different readers, so each learns
};

}  // namespace hororing
