// The connections of TcpTransport: how they are opened, accepted, authenticated and lost.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "transport/tcp/tcp_transport.h"

namespace hororing {
namespace {

// Limits for accepted connections whose handshake is not complete: their number and their age.
constexpr size_t kMaxPending = 64;
constexpr TimeNs kPendingTime = 3 * kSecond;
constexpr TimeNs kRetryInterval = 50 * kMillisecond;
// A dead rank's last control messages may arrive this much later than the end of its data stream.
constexpr TimeNs kFinalMessageTime = 100 * kMillisecond;
// Keepalive of data connections, which may be idle for hours.
constexpr int kDataIdleSeconds = 60, kDataIntervalSeconds = 10, kDataProbes = 6;
// Longer than this beyond the limit for a cut network, no host takes to answer at all.
constexpr TimeNs kAnswerTime = kSecond;
// Time between two checks of deadlines, which raise no event.
constexpr TimeNs kCheckInterval = 10 * kMillisecond;

constexpr char kAdvice[] =
    "its process may be stopped, a firewall may block the port, or HORORING_INTERFACE may name the "
    "wrong network";

constexpr uint32_t kAllEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

// The source of an event. For peers: kOfPeer + 4 * peer + 2 * plane + (incoming ? 1 : 0).
constexpr uint64_t kListener = 0, kBell = 1, kPending = 2, kOfPeer = 4;

Status Failed(const char* what) {
  return Status(Code::kTransport, std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

Status TcpTransport::Make(int rank, std::vector<std::string> addresses, Socket listener,
                          TcpOptions options, std::unique_ptr<Transport>* made) {
  std::unique_ptr<TcpTransport> transport(
      new TcpTransport(rank, std::move(addresses), std::move(listener), std::move(options)));
  TcpTransport& self = *transport;
  self.epoll_ = Socket(epoll_create1(EPOLL_CLOEXEC));
  self.bell_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!self.epoll_ || !self.bell_) return Failed("cannot wait for connections");
  HORORING_RETURN_IF_ERROR(self.WatchSocket(self.listener_.fd(), kListener, EPOLLIN | EPOLLET));
  HORORING_RETURN_IF_ERROR(self.WatchSocket(self.bell_.fd(), kBell, EPOLLIN));
  for (int peer = rank + 1; peer < self.size(); ++peer) {
    for (const Plane plane : {kControl, kData}) {
      if (self.IsEager(peer, plane)) self.StartConnect(peer, plane);
    }
  }
  *made = std::move(transport);
  return Status::Ok();
}

TcpTransport::TcpTransport(int rank, std::vector<std::string> addresses, Socket listener,
                           TcpOptions options)
    : rank_(rank),
      addresses_(std::move(addresses)),
      options_(std::move(options)),
      listener_(std::move(listener)),
      peers_(addresses_.size()) {}

Status TcpTransport::WatchSocket(int fd, uint64_t what, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = what;
  if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) == 0 ||
      (errno == EEXIST && epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, fd, &event) == 0)) {
    return Status::Ok();
  }
  return Failed("cannot wait for a connection");
}

bool TcpTransport::Events() {
  epoll_event events[64];
  const int count = epoll_wait(epoll_.fd(), events, 64, 0);
  const TimeNs now = NowNs();
  const TimeNs stopped = NoteCheck(now);
  for (const auto& [peer, plane] : connecting_) {
    PeerOf(peer).links[plane].outgoing.give_up_ns += stopped;
  }
  if (revoked()) NoteFailure(revocation());
  bool moved = false, accept_events = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t what = events[i].data.u64;
    if (what == kListener) {
      accepting_ = true;
    } else if (what == kBell) {
      uint64_t rung = 0;
      woken_ = read(bell_.fd(), &rung, sizeof rung) > 0 || woken_;
    } else if (what == kPending) {
      accept_events = true;
    } else {
      const int peer = static_cast<int>((what - kOfPeer) / 4);
      const Plane plane = (what & 2) != 0 ? kControl : kData;
      Links& links = PeerOf(peer).links[plane];
      Link& link = (what & 1) != 0 ? links.incoming : links.outgoing;
      if (link.handshake) AdvanceLink(peer, plane, &link);
      // This poll has consumed the edge: MoveData has to try again.
      moved |= plane == kData || (PullControl(peer) | PushControl(peer));
    }
  }
  if (accepting_) AcceptAll();
  for (auto each = pending_.begin(); accept_events && each != pending_.end();)
    AdvanceAccept(each++);
  if (!pending_.empty() && now - pending_.front().since_ns > kPendingTime) pending_.pop_front();
  if (!connecting_.empty()) Retry();
  if (!losing_.empty()) CheckLostConnections();
  return moved;
}

void TcpTransport::AcceptAll() {
  for (size_t i = 0; i < kMaxPending; ++i) {
    Socket socket = Accept(listener_.fd());
    // If the process has no free file descriptors, it accepts the others later.
    accepting_ = socket || errno != EAGAIN;
    if (!socket && accepting_ && !accept_failed_) {
      accept_failed_ = true;
      Log(LogLevel::kError, std::string("cannot accept connections: ") + std::strerror(errno));
    }
    if (!socket) return;
    if (!WatchSocket(socket.fd(), kPending, kAllEvents).ok()) continue;
    if (pending_.size() == kMaxPending) pending_.pop_front();
    pending_.push_back({std::move(socket), Handshake::Accepting(options_.key, rank_), NowNs()});
    AdvanceAccept(std::prev(pending_.end()));
  }
}

void TcpTransport::AdvanceAccept(std::list<PendingConnection>::iterator pending) {
  const Handshake::State state = pending->handshake.Advance(pending->socket.fd());
  if (state == Handshake::State::kUnderWay) return;
  if (state == Handshake::State::kDone) AttachToPeer(&*pending);
  pending_.erase(pending);
}

// The handshake is complete: the connection becomes that of a peer.
void TcpTransport::AttachToPeer(PendingConnection* pending) {
  const Hello& hello = pending->handshake.hello();
  if (hello.rank < 0 || hello.rank >= size() || hello.rank == rank_ || hello.plane < 0 ||
      hello.plane >= kPlanes) {
    return;
  }
  const Plane plane = static_cast<Plane>(hello.plane);
  Link& link = PeerOf(hello.rank).links[plane].incoming;
  link.socket = std::move(pending->socket);
  Open(hello.rank, plane, &link);
}

// Whether the lower rank of the two makes this connection at start.
bool TcpTransport::IsEager(int peer, Plane plane) const {
  const size_t rank = static_cast<size_t>(peer);
  return size() <= options_.eager_ranks ||
         (plane == kControl && rank < options_.here.size() && options_.here[rank]);
}

// Starts to connect unless there is a connection to send over.
void TcpTransport::EnsureConnection(int peer, Plane plane) {
  Links& links = PeerOf(peer).links[plane];
  if (links.sends != nullptr || links.outgoing.give_up_ns != 0) return;
  if (!IsEager(peer, plane)) StartConnect(peer, plane);
}

// Starts to connect, and retries until it succeeds or has taken too long.
void TcpTransport::StartConnect(int peer, Plane plane) {
  Link& link = PeerOf(peer).links[plane].outgoing;
  link.give_up_ns = After(NowNs(), options_.connect_ns);
  link.retry_ns = NowNs();
  connecting_.emplace_back(peer, plane);
  Retry();
}

void TcpTransport::Retry() {
  const TimeNs now = NowNs();
  for (size_t i = 0; i < connecting_.size();) {
    const auto [peer, plane] = connecting_[i];
    Link& link = PeerOf(peer).links[plane].outgoing;
    if (link.ready() || PeerOf(peer).lost) {
      connecting_[i] = connecting_.back();
      connecting_.pop_back();
      continue;
    }
    ++i;
    const std::string& address = addresses_[static_cast<size_t>(peer)];
    link.answered = link.answered || (link.socket && IsConnected(link.socket.fd()));
    const TimeNs deaf = std::min(options_.connect_ns, options_.silent_ns + kAnswerTime);
    if (now >= link.give_up_ns - (link.answered ? 0 : options_.connect_ns - deaf)) {
      PeerOf(peer).lost = true;
      options_.unreachable(peer);
      NoteFailure(Status(Code::kPeerLost,
                         "rank " + std::to_string(peer) + " cannot be reached at " + address +
                             (link.why.empty() ? std::string("; ") + kAdvice : ": " + link.why),
                         peer));
    } else if (!link.socket && now >= link.retry_ns) {
      link.retry_ns = After(now, kRetryInterval);
      const Status begun = Connect(address, &link.socket);
      if (begun.ok()) {
        link.handshake = Handshake::Connecting(options_.key, {rank_, peer, plane});
        const uint64_t place = static_cast<uint64_t>(peer) * 4 + (plane == kControl ? 2 : 0);
        if (!WatchSocket(link.socket.fd(), kOfPeer + place, kAllEvents).ok()) {
          link.handshake.reset();
          link.socket = Socket();
        }
      } else {
        link.why = begun.message();
      }
    }
  }
}

void TcpTransport::AdvanceLink(int peer, Plane plane, Link* link) {
  errno = 0;  // it stays 0 if the peer closed the connection or has another secret
  const Handshake::State state = link->handshake->Advance(link->socket.fd());
  if (state == Handshake::State::kUnderWay) return;
  if (state == Handshake::State::kFailed && errno != 0) {
    link->why = std::string(std::strerror(errno)) + "; " + kAdvice;
  }
  link->handshake.reset();
  if (state == Handshake::State::kDone) return Open(peer, plane, link);
  link->socket = Socket();  // Retry makes a new one
}

// A connection is ready: transfers that wait for it continue.
void TcpTransport::Open(int peer, Plane plane, Link* link) {
  Links& links = PeerOf(peer).links[plane];
  const uint64_t place = static_cast<uint64_t>(peer) * 4 + (plane == kControl ? 2 : 0) +
                         (link == &links.incoming ? 1 : 0);
  Status status = WatchSocket(link->socket.fd(), kOfPeer + place, kAllEvents);
  if (status.ok()) status = SendAtOnce(link->socket.fd());
  if (status.ok()) {
    status = plane == kControl ? BreakWhenSilent(link->socket.fd(), options_.silent_ns)
                               : KeepAlive(link->socket.fd(), kDataIdleSeconds,
                                           kDataIntervalSeconds, kDataProbes);
  }
  if (!status.ok()) return NoteFailure(std::move(status));
  link->portion = 1;
  if (links.sends == nullptr) links.sends = link;
  if (plane == kControl) {
    PushControl(peer);
    PullControl(peer);
  } else {
    Activate(peer);
  }
}

// A connection was lost. `error`: errno, or 0 if the peer closed it. The peer may have announced a
// failure or shut down cleanly, so CheckLostConnections reads its last messages before it decides.
void TcpTransport::OnConnectionLost(int peer, int error) {
  Peer& state = PeerOf(peer);
  if (state.lost || !state.loss.ok()) return;
  const std::string who = "rank " + std::to_string(peer);
  const bool died = error == 0 || error == ECONNRESET || error == EPIPE;
  state.loss = died ? Status(Code::kPeerLost, who + " died", peer)
                    : Status(Code::kPeerLost,
                             who + " cannot be reached any more (" + std::strerror(error) +
                                 "): its host is down, or the network is cut",
                             peer);
  state.cut = !died;
  state.lost_ns = NowNs();
  losing_.push_back(peer);
}

void TcpTransport::CheckLostConnections() {
  for (size_t i = 0; i < losing_.size();) {
    Peer& state = PeerOf(losing_[i]);
    const int peer = losing_[i];
    while (PullControl(peer)) continue;
    const Links& control = state.links[kControl];
    const bool deaf = !control.outgoing.ready() && !control.incoming.ready();
    const bool known = state.closed || closing_ || state.lost;
    if (!known && !deaf && NowNs() - state.lost_ns < kFinalMessageTime) {
      ++i;
      continue;
    }
    if (!known) NoteFailure(state.loss);
    if (!known && state.cut) options_.unreachable(peer);
    state.lost = true;
    losing_[i] = losing_.back();
    losing_.pop_back();
  }
}

void TcpTransport::SleepUnless(uint32_t /*seen*/, TimeNs span_ns) {
  if (!connecting_.empty() || !losing_.empty() || !pending_.empty() || accepting_) {
    span_ns = std::min(span_ns, kCheckInterval);
  }
  pollfd epoll = {epoll_.fd(), POLLIN, 0};
  const timespec span{static_cast<time_t>(span_ns / kSecond), static_cast<long>(span_ns % kSecond)};
  ppoll(&epoll, 1, &span, nullptr);
}

}  // namespace hororing
