// MpiTransport, for the files of this folder. All others include transport/mpi_library.h.
//
//   data_plane.cc     Send, Receive, Wait: through staging buffers, on a communicator of its own
//   control_plane.cc  Post, Poll, Sleep, announcements of failures, Close: on another one
//   world.cc          starts MPI and makes the communicators; what the library exports
//   failure.cc        errors of MPI, and memory that it may still use after a failure
//
// A wait in one plane also makes progress in the other: a peer may wait for a transfer there.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/call_watch.h"
#include "transport/long_wait.h"
#include "transport/polling.h"
#include "transport/transfers.h"
#include "transport/transport.h"

namespace hororing {

// A transport of this process has lost a peer: MPI_Finalize could wait forever. Any thread may read
// it; the rest is only for the thread that runs the loop.
extern std::atomic<bool> broken_here;

// `peer`: the rank that the call concerned, or -1.
Status MpiError(const char* call, int error, int peer);

// The ranks of `communicator` that MPI knows to be dead, unordered; none if MPI keeps no such list.
std::vector<int> KnownDead(MPI_Comm communicator);

// Until this call, MPI reports the dead ranks of `communicator` instead of messages from any rank.
void AcknowledgeDead(MPI_Comm communicator);

// Keeps memory that MPI may still use after a failure, until the process ends.
void LeakUntilExit(std::shared_ptr<void> memory);

class MpiTransport final : public Transport {
 public:
  // Takes ownership of the communicators.
  MpiTransport(MPI_Comm data, MPI_Comm control, TimeNs spin_ns);
  ~MpiTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "mpi"; }

  Request Send(int peer, const void* data, size_t bytes) override;
  Request Receive(int peer, void* data, size_t bytes) override;
  Status Wait(Request request, TimeNs deadline) override;
  bool Done(Request request) override;

  void Post(int peer, std::string message) override;
  bool Poll(int* peer, std::string* message) override;
  bool Progress() override { return ProgressControl() | ProgressData(); }
  void Sleep(TimeNs deadline) override;
  void Wake() override { bell_.Ring(); }
  void WatchProcesses(std::vector<ProcessIdentity> of_ranks, std::vector<bool> here) override;
  void Watch(CallWatch* calls) override { calls_ = calls; }
  Status CheckPeers() override;
  TimeNs Silence(int peer) override;
  void AnnounceFailure(const Status& why) override;
  bool Flush(TimeNs deadline) override;
  bool Close(TimeNs deadline) override;

 private:
  using Buffer = std::unique_ptr<std::byte[]>;
  struct Piece {
    Buffer buffer;
    MPI_Request request;
    std::byte* place;  // of the bytes in the caller's memory
    size_t bytes;
    bool last;  // of its transfer
  };
  struct Message {
    std::string text;
    MPI_Request request;
    int tag;
  };
  // A Transfer is the part that is not yet staged (sends) or started (receives).
  struct Peer : PeerTransfers {
    std::deque<Piece> sending, receiving;
    std::deque<std::string> outbox;  // not yet given to MPI
    std::deque<Message> outgoing, arriving;
    bool failed = false;  // it has announced a failure
    bool closed = false;  // its Close has arrived; nothing follows
    TimeNs asked_ns = 0;  // when it was asked and did not answer yet; 0: it has answered
  };

  // Calls an MPI function that should return at once. Returns its error code.
  template <typename MpiCall>
  int Call(const char* name, const MpiCall& mpi_call) {
    const CallWatch::Call call(calls_, {name});
    return mpi_call();
  }
  Peer& PeerOf(int peer) { return peers_[static_cast<size_t>(peer)]; }

  // data_plane.cc
  Buffer TakeBuffer();
  void GiveBack(Buffer buffer);
  template <typename StartPiece>
  void Start(int peer, const char* call, std::deque<Transfers::Transfer>& open,
             std::deque<Piece>& under_way, const StartPiece& start);
  void StartSends(int peer);
  void StartReceives(int peer);
  bool Done(MPI_Request* request, const char* what, int peer);
  bool ProgressData();  // true if anything moved
  void NoteDataError(const char* call, int error, int peer);
  void Abandon();

  // control_plane.cc
  void StartControl(int peer, std::string text, int tag);
  void SendControl(int peer);
  bool ProgressControl();  // true if anything moved
  bool ControlDone(Message& message, int peer);
  void Accept(MPI_Message* matched, const MPI_Status& status);
  void Deliver(int peer, Message message);
  void NoteFailure(Status failure);
  void NoteControlError(const char* call, int error, int peer);
  bool SeenGone(int peer) const {
    const size_t rank = static_cast<size_t>(peer);
    return here_[rank] && IsGone(processes_[rank]);
  }
  Status Died(int peer) const;
  Status CallError(const char* call, int error, int peer);
  void ReceiveFinalMessages(int peer);
  bool CheckProcesses();  // false: it is too early
  int FindDeadPeer();

  MPI_Comm data_, control_;
  CallWatch* calls_ = nullptr;
  const TimeNs spin_ns_;
  int rank_ = 0, size_ = 1;
  std::vector<Peer> peers_;
  std::vector<Buffer> spare_;
  size_t pieces_ = 0;  // buffers in use
  Inbox inbox_;
  std::vector<ProcessIdentity> processes_;  // per rank
  std::vector<bool> here_;                  // per rank: its process can be seen
  TimeNs next_check_ns_ = 0;
  WakeBell bell_;
  uint32_t last_sleep_bell_ = 0;  // after the last Sleep: shows a later Wake
  bool announced_ = false;
  bool receiving_final_ = false;  // receiving the last messages of dead ranks
  bool close_sent_ = false;
  bool closed_ = false;         // every rank has taken all messages
  bool failure_shown_ = false;  // a Sleep has ended because of it
  Status failure_;              // the first that a peer announced or a control call returned
  Status data_error_;           // the first that a data call returned
  Status broken_;               // what every later Wait returns
};

}  // namespace hororing
