// The data plane of TcpTransport: bare streams. Both sides know the sizes, so bytes go from one
// caller's memory into the other's. Nothing is read before a receive: TCP's window holds it back.
#include <algorithm>
#include <cerrno>

#include "transport/long_wait.h"
#include "transport/polling.h"
#include "transport/tcp/tcp_transport.h"

namespace hororing {
constexpr TimeNs kLongestSleep = 50 * kMillisecond;  // events end it
// A wait for this many bytes sleeps at once: polling for that long would not pay.
constexpr size_t kLargeMessage = 128 << 10;
// Large transfers wake the loop once per portion, small ones with every packet.
constexpr size_t kPortion = 32 << 10, kLittle = 4 << 10;
// Polls for data between two polls for events, while data moves.
constexpr unsigned kPollsPerCheck = 8;

Transport::Request TcpTransport::Send(int peer, const void* data, size_t bytes) {
  const Request request = PeerOf(peer).PostSend(peer, data, bytes, !broken_.ok());
  Activate(peer);
  PushData(peer);
  return request;
}

Transport::Request TcpTransport::Receive(int peer, void* data, size_t bytes) {
  const Request request = PeerOf(peer).PostReceive(peer, data, bytes, !broken_.ok());
  Activate(peer);
  return request;
}

Status TcpTransport::Wait(Request request, TimeNs deadline) {
  const PostedTransfer posted(request, peers_);
  const Transfers& transfers = posted.transfers;
  const bool much = !posted.done() && broken_.ok() &&
                    transfers.open[posted.number - transfers.done - 1].left >= kLargeMessage;
  // Polling did not pay in the last wait that had to sleep, or will not in this one.
  const bool sleeps = much || last_gap_ns_ > options_.spin_ns + Backoff::kYield;
  Backoff backoff(options_.spin_ns, kLongestSleep, sleeps ? -options_.spin_ns : Backoff::kYield,
                  kLongestSleep);
  LongWait wait(backoff.begin_ns());
  const auto lagging = [&] { return std::vector<int>{posted.peer}; };
  bool moved = true;
  for (unsigned look = 1; broken_.ok(); ++look) {
    if (posted.done()) return Status::Ok();
    if (!moved || look % kPollsPerCheck == 0) {
      Events();
      wait_limits().meanwhile();
      wait.Check(*this, NowNs(), lagging);
    }
    moved = MoveData();  // after all polls, which consume the edges of data
    if (moved && look > 1) {
      const TimeNs gap = NowNs() - backoff.quiet_since_ns();
      if (gap > kSpinBeforeYield) last_gap_ns_ = gap;
    }
    if (posted.done()) return Status::Ok();
    if (moved) wait.NoteProgress(NowNs());
    if (!failure_.ok()) {
      broken_ = failure_;
    } else if (!backoff.Pause(*this, 0, moved, Extended(deadline, wait.progressed_ns()))) {
      Events();  // notices whether this process was stopped
      if (NowNs() >= Extended(deadline, wait.progressed_ns()))
        broken_ = wait.GiveUp(*this, lagging());
    }
  }
  // The callers may use their memory again: only the kernel has bytes, their streams are not read.
  for (Peer& peer : peers_) peer.Drop();
  return broken_;
}

bool TcpTransport::Done(Request request) {
  const PostedTransfer posted(request, peers_);
  if (!posted.done() && !Progress()) wait_limits().meanwhile();
  return posted.done() || !broken_.ok() || !failure_.ok();
}

void TcpTransport::Activate(int peer) {
  if (std::exchange(PeerOf(peer).active, true)) return;
  active_.push_back(peer);
}

bool TcpTransport::MoveData() {
  bool moved = false;
  for (size_t i = 0; i < active_.size();) {
    const int peer = active_[i];
    moved |= PushData(peer) | PullData(peer);
    Peer& state = PeerOf(peer);
    if (state.sends.open.empty() && state.receives.open.empty()) {
      state.active = false;
      active_[i] = active_.back();
      active_.pop_back();
    } else {
      ++i;
    }
  }
  return moved;
}

bool TcpTransport::PushData(int peer) {
  Peer& state = PeerOf(peer);
  Links& links = state.links[kData];
  if (!state.sends.open.empty()) EnsureConnection(peer, kData);
  bool moved = false;
  while (!state.sends.open.empty()) {
    Transfers::Transfer& transfer = state.sends.open.front();
    if (transfer.left > 0) {
      if (links.sends == nullptr || !links.sends->ready()) break;
      const ptrdiff_t sent = SendSome(links.sends->socket.fd(), transfer.data, transfer.left);
      if (sent < 0) {
        const int error = errno;
        links.sends->socket = Socket();
        OnConnectionLost(peer, error);
      }
      if (sent <= 0) break;
      transfer.data += sent;
      transfer.left -= static_cast<size_t>(sent);
    }
    moved = true;
    if (transfer.left > 0) break;  // the socket is full
    state.sends.FinishFirst();
  }
  return moved;
}

bool TcpTransport::PullData(int peer) {
  Peer& state = PeerOf(peer);
  Links& links = state.links[kData];
  bool moved = false;
  while (!state.receives.open.empty()) {
    Transfers::Transfer& transfer = state.receives.open.front();
    const size_t before = transfer.left;
    std::optional<int> ended;
    for (Link* link : {&links.outgoing, &links.incoming}) {
      if (transfer.left == 0 || !link->ready()) continue;
      const size_t portion = transfer.left < kLittle ? 1 : std::min(transfer.left, kPortion);
      if (portion != std::exchange(link->portion, portion)) WakeFor(link->socket.fd(), portion);
      const ptrdiff_t got = ReceiveSome(link->socket.fd(), transfer.data, transfer.left);
      if (got < 0) {
        ended = errno;
        link->socket = Socket();
      }
      if (got <= 0) continue;
      transfer.data += got;
      transfer.left -= static_cast<size_t>(got);
    }
    // With two connections, the missing bytes may have arrived over the other one.
    if (ended && transfer.left > 0) OnConnectionLost(peer, *ended);
    if (transfer.left > 0 && transfer.left == before) break;
    moved = true;
    if (transfer.left > 0) continue;
    state.receives.FinishFirst();
  }
  return moved;
}

}  // namespace hororing
