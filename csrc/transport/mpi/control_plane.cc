// The control plane of MpiTransport: messages, announcements of failures, and the end.
//
// Control messages have a communicator of their own. A rank receives them, and announcements of
// failures, while it waits for anything.
#include <algorithm>
#include <cstdlib>

#include "transport/mpi/mpi_transport.h"

namespace hororing {
// Control messages that MPI holds for one peer; the others queue here.
constexpr size_t kControlWindow = 16;
// Time between two checks of the peers' processes.
constexpr TimeNs kCheckInterval = 100 * kMillisecond;
// A dead rank's last messages may arrive this much later than its death is noticed.
constexpr TimeNs kFinalMessageTime = 100 * kMillisecond;
constexpr int kControlTag = 2, kFailureTag = 3, kCloseTag = 4;
constexpr int kAskTag = 5, kAnswerTag = 6;  // "are you alive?" and "yes"

MpiTransport::MpiTransport(MPI_Comm data, MPI_Comm control, TimeNs spin_ns)
    : data_(data), control_(control), spin_ns_(spin_ns) {
  MPI_Comm_rank(data_, &rank_);
  MPI_Comm_size(data_, &size_);
  peers_ = std::vector<Peer>(static_cast<size_t>(size_));
}

MpiTransport::~MpiTransport() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized == 0) {
    ProgressControl();
    ProgressData();
  }
  const bool idle = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return peer.outgoing.empty() && peer.arriving.empty() && peer.sending.empty() &&
           peer.receiving.empty();
  });
  if (!idle) {
    // Moved with their elements in place, because MPI holds pointers to them.
    LeakUntilExit(std::make_shared<std::vector<Peer>>(std::move(peers_)));
  } else if (finalized == 0 && closed_) {
    MPI_Comm_free(&data_);
    MPI_Comm_free(&control_);
  }
}

// A freed communicator's id may be reused while messages are in flight on it. So every rank first
// receives everything that the others have sent.
bool MpiTransport::Close(TimeNs deadline) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  // After a failure there is no clean shutdown, so do not wait again.
  if (finalized != 0 || announced_ || !failure_.ok() || !broken_.ok()) return true;
  if (!Flush(deadline)) return false;
  for (int peer = 0; peer < size_ && !close_sent_; ++peer) {
    if (peer != rank_) StartControl(peer, "", kCloseTag);
  }
  close_sent_ = true;
  Backoff backoff(spin_ns_, kLongestDataSleep);
  const auto all_have = [this] {
    for (int peer = 0; peer < size_; ++peer) {
      const Peer& state = PeerOf(peer);
      if (peer != rank_ && (!state.closed || !state.outgoing.empty())) return false;
    }
    return true;
  };
  while (!(closed_ = all_have())) {
    const uint32_t seen = bell_.count();
    const bool moved = ProgressControl() | ProgressData();
    if (!failure_.ok()) return true;
    if (!backoff.Pause(bell_, seen, moved, deadline)) return false;
  }
  return true;
}

void MpiTransport::Post(int peer, std::string message) {
  PeerOf(peer).outbox.push_back(std::move(message));
  SendControl(peer);
}

bool MpiTransport::Poll(int* peer, std::string* message) {
  if (inbox_.empty()) ProgressControl();
  return inbox_.Take(peer, message);
}

void MpiTransport::Sleep(TimeNs deadline) {
  Backoff backoff(spin_ns_, kLongestIdleSleep);
  for (;;) {
    const uint32_t seen = bell_.count();
    // Data, too: a peer may wait for pieces that this rank has staged.
    const bool moved = ProgressControl() | ProgressData();
    if (!inbox_.empty() || seen != last_sleep_bell_ || revoked() ||
        (!failure_.ok() && !failure_shown_)) {
      last_sleep_bell_ = seen;
      failure_shown_ = !failure_.ok();
      return;
    }
    if (!backoff.Pause(bell_, seen, moved, deadline)) return;
  }
}

void MpiTransport::WatchProcesses(std::vector<ProcessIdentity> of_ranks, std::vector<bool> here) {
  processes_ = std::move(of_ranks);
  here_ = std::move(here);
}

// The error for a dead peer. The text is the same on every rank, however it noticed the death.
Status MpiTransport::Died(int peer) const {
  std::string who = "rank " + std::to_string(peer);
  if (static_cast<size_t>(peer) < processes_.size()) {
    who += " (pid " + std::to_string(processes_[static_cast<size_t>(peer)].pid) + ")";
  }
  return Status(Code::kPeerLost, who + " died", peer);
}

Status MpiTransport::CallError(const char* call, int error, int peer) {
  Status status = MpiError(call, error, peer);
  if (status.code() != Code::kPeerLost) return status;
  ReceiveFinalMessages(peer);
  if (!failure_.ok()) return failure_;
  return peer >= 0 ? Died(peer) : status;
}

// Receives the last messages of a dead rank: it may have announced another rank's failure, or have
// shut down cleanly. `peer`: the rank, or -1 if it is unknown.
void MpiTransport::ReceiveFinalMessages(int peer) {
  if (std::exchange(receiving_final_, true)) return;
  const TimeNs end = After(NowNs(), kFinalMessageTime);
  int late = 0;  // a descheduled thread still makes some progress after `end`
  while (failure_.ok() && !(peer >= 0 && PeerOf(peer).closed) && (NowNs() < end || late++ < 10)) {
    if (!ProgressControl()) sched_yield();
  }
  receiving_final_ = false;
}

// Cheap while it is not due, for loops that wait.
bool MpiTransport::CheckProcesses() {
  const TimeNs now = NowNs();
  if (now < next_check_ns_) return false;
  NoteCheck(now);
  next_check_ns_ = After(now, kCheckInterval);
  for (int peer = 0; peer < static_cast<int>(processes_.size()); ++peer) {
    if (!failure_.ok() || PeerOf(peer).closed || !SeenGone(peer)) continue;
    ReceiveFinalMessages(peer);
    if (!PeerOf(peer).closed) NoteFailure(Died(peer));
  }
  return true;
}

TimeNs MpiTransport::Silence(int peer) {
  Peer& state = PeerOf(peer);
  if (peer == rank_ || state.failed || state.closed) return 0;
  if (close_sent_ && state.asked_ns == 0) return 0;  // no message may follow Close
  if (state.asked_ns != 0) return NowNs() - std::max(state.asked_ns, stopped_until());
  state.asked_ns = NowNs();
  StartControl(peer, "", kAskTag);
  return 0;
}

// For errors of calls that concern no particular peer. Returns a rank that has not closed and whose
// process on this host has ended, or that MPI reports as dead; -1 if there is none.
int MpiTransport::FindDeadPeer() {
  for (int peer = 0; peer < static_cast<int>(processes_.size()); ++peer) {
    if (!PeerOf(peer).closed && SeenGone(peer)) return peer;
  }
  std::vector<int> dead;
  Call("MPIX_Comm_get_failed", [&] {
    dead = KnownDead(control_);
    return MPI_SUCCESS;
  });
  for (const int peer : dead) {
    if (peer >= 0 && peer < size_ && !PeerOf(peer).closed) return peer;
  }
  return -1;
}

Status MpiTransport::CheckPeers() {
  ProgressControl();
  CheckProcesses();
  return failure_.ok() ? data_error_ : failure_;
}

// Ahead of queued messages: a peer that does not receive must not keep others from knowing.
void MpiTransport::AnnounceFailure(const Status& why) {
  if (std::exchange(announced_, true)) return;
  broken_here = true;
  const Status announced = Announced(why, rank_);
  const std::string message = std::to_string(static_cast<int>(announced.code())) + " " +
                              std::to_string(announced.rank()) + " " + announced.message();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) StartControl(peer, message, kFailureTag);
  }
}

bool MpiTransport::Flush(TimeNs deadline) {
  Backoff backoff(spin_ns_, kLongestDataSleep);
  for (;;) {
    const uint32_t seen = bell_.count();
    const bool moved = ProgressControl() | ProgressData();
    bool unsent = false, deaf = false;
    for (const Peer& peer : peers_) {
      if (peer.outbox.empty() && peer.outgoing.empty()) continue;
      const bool silent = peer.asked_ns != 0 && NowNs() - peer.asked_ns > kSecond;
      (peer.failed || silent ? deaf : unsent) = true;
    }
    if (!unsent) return !deaf;
    if (!backoff.Pause(bell_, seen, moved, deadline)) return false;
  }
}

// MPI counts in ints: 2 GiB are more than any control message has.
void MpiTransport::StartControl(int peer, std::string text, int tag) {
  // Queued before it is sent, because MPI holds a pointer to the text.
  std::deque<Message>& outgoing = PeerOf(peer).outgoing;
  outgoing.push_back({std::move(text), MPI_REQUEST_NULL, tag});
  Message& message = outgoing.back();
  const int error = Call("MPI_Isend", [&] {
    return MPI_Isend(message.text.data(), static_cast<int>(message.text.size()), MPI_BYTE, peer,
                     tag, control_, &message.request);
  });
  if (error != MPI_SUCCESS) NoteControlError("MPI_Isend", error, peer);
}

void MpiTransport::SendControl(int peer) {
  Peer& state = PeerOf(peer);
  while (!state.outbox.empty() && state.outgoing.size() < kControlWindow) {
    std::string message = std::move(state.outbox.front());
    state.outbox.pop_front();
    StartControl(peer, std::move(message), kControlTag);
  }
}

bool MpiTransport::ProgressControl() {
  if (revoked()) NoteFailure(revocation());
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    Peer& state = PeerOf(peer);
    while (!state.outgoing.empty() && ControlDone(state.outgoing.front(), peer)) {
      state.outgoing.pop_front();
      moved = true;
    }
    SendControl(peer);
  }
  int arrived = 0;
  do {
    MPI_Message matched;
    MPI_Status status;
    const int error = Call("MPI_Improbe", [&] {
      return MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, control_, &arrived, &matched, &status);
    });
    if (error != MPI_SUCCESS) {
      arrived = 0;
      AcknowledgeDead(control_);
      NoteControlError("MPI_Improbe", error, FindDeadPeer());
    }
    if (arrived != 0) Accept(&matched, status);
  } while (arrived != 0);
  for (int peer = 0; peer < size_; ++peer) {
    std::deque<Message>& arriving = PeerOf(peer).arriving;
    while (!arriving.empty() && ControlDone(arriving.front(), peer)) {
      Message message = std::move(arriving.front());
      arriving.pop_front();
      Deliver(peer, std::move(message));
      moved = true;
    }
  }
  return moved;
}

bool MpiTransport::ControlDone(Message& message, int peer) {
  int done = 0;
  const int error =
      Call("MPI_Test", [&] { return MPI_Test(&message.request, &done, MPI_STATUS_IGNORE); });
  if (error != MPI_SUCCESS) NoteControlError("control message", error, peer);
  return error == MPI_SUCCESS && done != 0;
}

void MpiTransport::Accept(MPI_Message* matched, const MPI_Status& status) {
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  std::deque<Message>& arriving = PeerOf(status.MPI_SOURCE).arriving;
  arriving.push_back(
      {std::string(static_cast<size_t>(bytes), '\0'), MPI_REQUEST_NULL, status.MPI_TAG});
  Message& message = arriving.back();
  const int error = Call("MPI_Imrecv", [&] {
    return MPI_Imrecv(message.text.data(), bytes, MPI_BYTE, matched, &message.request);
  });
  if (error != MPI_SUCCESS) NoteControlError("MPI_Imrecv", error, status.MPI_SOURCE);
}

void MpiTransport::Deliver(int peer, Message message) {
  Peer& state = PeerOf(peer);
  if (message.tag == kFailureTag) {
    state.failed = true;
    char* rest = nullptr;
    const auto code = static_cast<Code>(std::strtol(message.text.c_str(), &rest, 10));
    const long blamed = std::strtol(rest, &rest, 10);
    NoteFailure(Status(code, rest + 1, static_cast<int>(blamed)));
    return;
  }
  if (message.tag == kControlTag) inbox_.emplace_back(peer, std::move(message.text));
  // No message may follow Close.
  if (message.tag == kAskTag && !close_sent_) StartControl(peer, "", kAnswerTag);
  if (message.tag == kAnswerTag) state.asked_ns = 0;
  if (message.tag == kCloseTag) state.closed = true;
}

void MpiTransport::NoteControlError(const char* call, int error, int peer) {
  if (!receiving_final_)
    NoteFailure(CallError(call, error, peer));  // otherwise the caller knows it already
}

void MpiTransport::NoteFailure(Status failure) {
  broken_here = true;
  if (failure_.ok()) failure_ = std::move(failure);
}

}  // namespace hororing
