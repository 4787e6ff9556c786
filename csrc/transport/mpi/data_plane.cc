// The data plane of MpiTransport.
//
// Data travels in pieces of kPieceBytes through our own staging buffers, because MPI cannot take
// back a started transfer: a send cannot be cancelled, nor a receive whose first bytes have
// arrived. After a failure the staging buffers are leaked, and callers may use their memory again.
// This costs one copy on each side, which overlaps with the transfer of the previous pieces. Both
// sides cut a message alike, so pieces need no headers.
//
//   caller's memory -> staging -> MPI_Isend ~~~> MPI_Irecv -> staging -> caller's memory
#include <algorithm>

#include "kernels/copy.h"
#include "transport/mpi/mpi_transport.h"

namespace hororing {
constexpr size_t kPieceBytes = 256 << 10;
// Pieces in flight with one peer. The limit is lower while many are in flight with all peers
// together, but at least one, or ranks could wait for one another. It is this high because over TCP
// each piece first waits for the receiver's answer, twice through all queues between them.
constexpr size_t kWindow = 16, kSharedWindow = 64;
constexpr int kDataTag = 1;
// Polls for data between two polls for control messages, while waiting for data.
constexpr unsigned kPollsPerCheck = 8;

Transport::Request MpiTransport::Send(int peer, const void* data, size_t bytes) {
  const Request request = PeerOf(peer).PostSend(peer, data, bytes, !broken_.ok());
  StartSends(peer);
  return request;
}

Transport::Request MpiTransport::Receive(int peer, void* data, size_t bytes) {
  const Request request = PeerOf(peer).PostReceive(peer, data, bytes, !broken_.ok());
  StartReceives(peer);
  return request;
}

Status MpiTransport::Wait(Request request, TimeNs deadline) {
  const PostedTransfer posted(request, peers_);
  Backoff backoff(spin_ns_, kLongestDataSleep);
  LongWait wait(backoff.begin_ns());
  const auto lagging = [&] { return std::vector<int>{posted.peer}; };
  for (unsigned look = 1; broken_.ok(); ++look) {
    const uint32_t seen = bell_.count();
    if (posted.done()) return Status::Ok();
    const bool moved = ProgressData();
    if (posted.done() && data_error_.ok()) return Status::Ok();
    if (moved) wait.NoteProgress(NowNs());
    if (look % kPollsPerCheck == 0) {
      ProgressControl();
      if (CheckProcesses()) wait.Check(*this, NowNs(), lagging);
    }
    if (!failure_.ok()) {
      broken_ = failure_;
    } else if (!data_error_.ok()) {
      broken_ = data_error_;
    } else if (!backoff.Pause(bell_, seen, moved, Extended(deadline, wait.progressed_ns()))) {
      CheckProcesses();  // notices whether this process was stopped
      if (NowNs() >= Extended(deadline, wait.progressed_ns()))
        broken_ = wait.GiveUp(*this, lagging());
    }
  }
  Abandon();
  return broken_;
}

bool MpiTransport::Done(Request request) {
  const PostedTransfer posted(request, peers_);
  if (!posted.done()) ProgressData();
  return posted.done() || !broken_.ok() || !failure_.ok() || !data_error_.ok();
}

MpiTransport::Buffer MpiTransport::TakeBuffer() {
  ++pieces_;
  if (spare_.empty()) return Buffer(new std::byte[kPieceBytes]);
  Buffer buffer = std::move(spare_.back());
  spare_.pop_back();
  return buffer;
}

void MpiTransport::GiveBack(Buffer buffer) {
  --pieces_;
  if (spare_.size() < kSharedWindow) spare_.push_back(std::move(buffer));
}

// Starts the next pieces of the open transfers in one direction. start(piece, data) gives a piece
// to MPI, whose data is at that place of the caller's memory.
template <typename StartPiece>
void MpiTransport::Start(int peer, const char* call, std::deque<Transfers::Transfer>& open,
                         std::deque<Piece>& under_way, const StartPiece& start) {
  const auto has_room = [&] {
    return under_way.empty() || (under_way.size() < kWindow && pieces_ < kSharedWindow);
  };
  while (!open.empty() && has_room() && data_error_.ok()) {
    Transfers::Transfer& transfer = open.front();
    const size_t bytes = std::min(transfer.left, kPieceBytes);
    Piece piece{TakeBuffer(), MPI_REQUEST_NULL, transfer.data, bytes, bytes == transfer.left};
    NoteDataError(call, Call(call, [&] { return start(piece, static_cast<int>(bytes)); }), peer);
    transfer.data += bytes;
    transfer.left -= bytes;
    under_way.push_back(std::move(piece));
    if (under_way.back().last) open.pop_front();
  }
}

void MpiTransport::StartSends(int peer) {
  Peer& state = PeerOf(peer);
  const size_t before = state.sends.open.size();
  Start(peer, "MPI_Isend", state.sends.open, state.sending, [&](Piece& piece, int bytes) {
    CopyBytes(piece.buffer.get(), piece.place, piece.bytes);
    return MPI_Isend(piece.buffer.get(), bytes, MPI_BYTE, peer, kDataTag, data_, &piece.request);
  });
  state.sends.done += before - state.sends.open.size();  // staged: the caller may go on
}

void MpiTransport::StartReceives(int peer) {
  Peer& state = PeerOf(peer);
  Start(peer, "MPI_Irecv", state.receives.open, state.receiving, [&](Piece& piece, int bytes) {
    return MPI_Irecv(piece.buffer.get(), bytes, MPI_BYTE, peer, kDataTag, data_, &piece.request);
  });
}

bool MpiTransport::Done(MPI_Request* request, const char* what, int peer) {
  int done = 0;
  const int error = Call("MPI_Test", [&] { return MPI_Test(request, &done, MPI_STATUS_IGNORE); });
  NoteDataError(what, error, peer);
  return done != 0 && data_error_.ok();
}

bool MpiTransport::ProgressData() {
  bool moved = false;
  if (!broken_.ok()) return false;
  for (int peer = 0; peer < size_; ++peer) {
    Peer& state = PeerOf(peer);
    while (!state.receiving.empty() && Done(&state.receiving.front().request, "receive", peer)) {
      Piece& piece = state.receiving.front();
      Buffer buffer = std::move(piece.buffer);
      CopyBytes(piece.place, buffer.get(), piece.bytes);
      if (piece.last) ++state.receives.done;
      state.receiving.pop_front();
      GiveBack(std::move(buffer));
      StartReceives(peer);
      moved = true;
    }
    while (!state.sending.empty() && Done(&state.sending.front().request, "send", peer)) {
      Buffer buffer = std::move(state.sending.front().buffer);
      state.sending.pop_front();
      GiveBack(std::move(buffer));
      moved = true;
    }
    // Even if nothing has moved here: another peer may have made room.
    StartSends(peer);
    StartReceives(peer);
  }
  return moved;
}

void MpiTransport::NoteDataError(const char* call, int error, int peer) {
  if (error != MPI_SUCCESS && data_error_.ok()) data_error_ = CallError(call, error, peer);
}

// After a failure: callers may use their memory again, and MPI keeps the staging buffers.
void MpiTransport::Abandon() {
  broken_here = true;
  for (Peer& peer : peers_) {
    peer.Drop();
    if (peer.sending.empty() && peer.receiving.empty()) continue;
    for (Piece& piece : peer.receiving) {
      if (piece.request == MPI_REQUEST_NULL) continue;
      Call("MPI_Cancel", [&] { return MPI_Cancel(&piece.request); });
    }
    LeakUntilExit(std::make_shared<std::deque<Piece>>(std::exchange(peer.sending, {})));
    LeakUntilExit(std::make_shared<std::deque<Piece>>(std::exchange(peer.receiving, {})));
  }
}

}  // namespace hororing
