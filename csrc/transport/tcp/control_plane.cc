// The control plane of TcpTransport: messages, announcements of failures, and the end.
//
// A frame has its length (4 bytes, native order), its kind (1 byte) and its text.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "transport/polling.h"
#include "transport/tcp/tcp_transport.h"

namespace hororing {
constexpr TimeNs kLongestSleep = kSecond;  // events end it
constexpr size_t kHead = 5;
constexpr TimeNs kRevokedFlush = kSecond / 5;

bool TcpTransport::Poll(int* peer, std::string* message) {
  if (inbox_.empty()) Events();
  return inbox_.Take(peer, message);
}

bool TcpTransport::Progress() {
  const bool moved = MoveData();
  return Events() || moved;
}

void TcpTransport::Sleep(TimeNs deadline) {
  Backoff backoff(options_.spin_ns, kLongestSleep);
  for (;;) {
    const bool moved = Progress();
    if (!inbox_.empty() || woken_ || revoked() || (!failure_.ok() && !failure_shown_)) {
      woken_ = false;
      failure_shown_ = !failure_.ok();
      return;
    }
    if (!backoff.Pause(*this, 0, moved, deadline)) return;
  }
}

void TcpTransport::Wake() {
  const uint64_t one = 1;
  // Fails only if the counter is at its limit, and then it has been rung.
  [[maybe_unused]] const ssize_t written = write(bell_.fd(), &one, sizeof one);
}

Status TcpTransport::CheckPeers() {
  Events();
  return failure_;
}

TimeNs TcpTransport::Silence(int peer) {
  Peer& state = PeerOf(peer);
  if (peer == rank_ || state.lost || state.closed) return 0;
  if (closing_ && state.asked_ns == 0) return 0;  // no message may follow kClose
  if (!state.links[kControl].begun()) return 0;   // asking would take a connection
  if (state.asked_ns != 0) return NowNs() - std::max(state.asked_ns, stopped_until());
  state.asked_ns = NowNs();
  Put(peer, kAsk, "");
  return 0;
}

// Not every rank of a large job can connect to every other at once. A rank announces a failure to
// its connected peers and to those at distances that are powers of two, who announce it, too.
bool TcpTransport::AnnouncesTo(int peer) {
  const int distance = (peer - rank_ + size()) % size();
  return IsEager(peer, kControl) || (distance & (distance - 1)) == 0 ||
         PeerOf(peer).links[kControl].begun();
}

// Ahead of queued messages: a peer that does not receive must not keep others from knowing.
void TcpTransport::AnnounceFailure(const Status& why) {
  if (std::exchange(announced_, true)) return;
  const Status announced = Announced(why, rank_);
  const std::string text = std::to_string(static_cast<int>(announced.code())) + " " +
                           std::to_string(announced.rank()) + " " + announced.message();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_ && AnnouncesTo(peer)) Put(peer, kFailure, text, true);
  }
}

// After Revoke, the peers know from the store: those that are not connected are not waited for.
bool TcpTransport::Flush(TimeNs deadline) {
  Backoff backoff(options_.spin_ns, kLongestSleep);
  for (;;) {
    const bool moved = Progress();
    bool unsent = false, deaf = false;
    for (const Peer& peer : peers_) {
      if (!peer.outbox.empty()) (peer.lost ? deaf : unsent) = true;
    }
    if (!unsent) return !deaf;
    if (revoked()) deadline = std::min(deadline, After(NowNs(), kRevokedFlush));
    if (!backoff.Pause(*this, 0, moved, deadline)) return false;
  }
}

bool TcpTransport::Close(TimeNs deadline) {
  const auto connected = [](const Peer& peer) { return peer.links[kControl].begun(); };
  for (int peer = 0; peer < size() && !closing_; ++peer) {
    if (peer != rank_ && (connected(PeerOf(peer)) || IsEager(peer, kControl))) {
      Put(peer, kClose, "");
    }
  }
  closing_ = true;
  Backoff backoff(options_.spin_ns, kLongestSleep);
  for (;;) {
    const bool moved = Events();
    inbox_.clear();
    bool waiting = false;
    for (const Peer& peer : peers_) {
      waiting |= !peer.lost && (!peer.outbox.empty() || (connected(peer) && !peer.closed));
    }
    if (!waiting || revoked()) return true;
    if (!backoff.Pause(*this, 0, moved, deadline)) return false;
  }
}

void TcpTransport::Put(int peer, Frame kind, const std::string& text, bool first) {
  Peer& state = PeerOf(peer);
  const uint32_t bytes = static_cast<uint32_t>(text.size());
  std::string frame(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  frame += static_cast<char>(kind);
  frame += text;
  auto at = state.outbox.end();
  if (first) at = state.outbox.begin() + (state.out_at > 0 ? 1 : 0);
  state.outbox.insert(at, std::move(frame));
  PushControl(peer);
}

bool TcpTransport::PushControl(int peer) {
  Peer& state = PeerOf(peer);
  if (state.outbox.empty() || state.lost) return false;
  EnsureConnection(peer, kControl);
  Links& links = state.links[kControl];
  bool moved = false;
  while (!state.outbox.empty() && links.sends != nullptr && links.sends->ready()) {
    const std::string& frame = state.outbox.front();
    const ptrdiff_t sent = SendSome(links.sends->socket.fd(), frame.data() + state.out_at,
                                    frame.size() - state.out_at);
    if (sent < 0) {
      const int error = errno;
      // Read the messages that it sent before.
      while (PullControl(peer)) continue;
      links.sends->socket = Socket();
      OnConnectionLost(peer, error);
    }
    if (sent <= 0) break;
    moved = true;
    state.out_at += static_cast<size_t>(sent);
    if (state.out_at < frame.size()) continue;
    state.outbox.pop_front();
    state.out_at = 0;
  }
  return moved;
}

bool TcpTransport::PullControl(int peer) {
  Peer& state = PeerOf(peer);
  Links& links = state.links[kControl];
  bool moved = false;
  char bytes[64 << 10];
  for (Link* link : {&links.outgoing, &links.incoming}) {
    while (link->ready()) {
      const ptrdiff_t got = ReceiveSome(link->socket.fd(), bytes, sizeof bytes);
      if (got < 0) {
        const int error = errno;
        link->socket = Socket();
        OnConnectionLost(peer, error);
      }
      if (got <= 0) break;
      moved = true;
      state.inbox.append(bytes, static_cast<size_t>(got));
    }
  }
  // Deliver may send and, if that fails, call this again. That call then delivers the rest.
  while (state.inbox.size() - state.in_at >= kHead) {
    const char* head = state.inbox.data() + state.in_at;
    uint32_t length = 0;
    std::memcpy(&length, head, sizeof length);
    if (state.inbox.size() - state.in_at < kHead + length) break;
    const Frame kind = static_cast<Frame>(head[kHead - 1]);
    std::string text(head + kHead, length);
    state.in_at += kHead + length;
    Deliver(peer, kind, std::move(text));
  }
  state.inbox.erase(0, std::exchange(state.in_at, 0));
  return moved;
}

void TcpTransport::Deliver(int peer, Frame kind, std::string text) {
  Peer& state = PeerOf(peer);
  if (kind == kMessage) {
    inbox_.emplace_back(peer, std::move(text));
  } else if (kind == kFailure) {
    state.lost = true;
    char* rest = nullptr;
    const auto code = static_cast<Code>(std::strtol(text.c_str(), &rest, 10));
    const long blamed = std::strtol(rest, &rest, 10);
    NoteFailure(Status(code, *rest == '\0' ? "" : rest + 1, static_cast<int>(blamed)));
  } else if (kind == kClose) {
    state.closed = true;
  } else if (kind == kAsk) {
    if (!closing_) Put(peer, kAnswer, "");  // no message may follow kClose
  } else {
    state.asked_ns = 0;
  }
}

void TcpTransport::NoteFailure(Status failure) {
  if (failure_.ok()) failure_ = std::move(failure);
}

}  // namespace hororing
