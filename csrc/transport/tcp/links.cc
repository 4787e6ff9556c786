// The connections of TcpTransport: made, accepted, proved, and lost.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/tcp/transport.h"

namespace hororing {
namespace {

// Of those who have not shown whose they are: so many, and for so long each.
constexpr size_t kStrangers = 64;
constexpr TimeNs kStrangerTime = 3 * kSecond;
constexpr TimeNs kRetryInterval = 50 * kMillisecond;
// What a rank has told before it ended arrives so much later at most than the end of its data.
constexpr TimeNs kLastWords = 100 * kMillisecond;
// What waits for data may be idle for hours.
constexpr int kDataIdleSeconds = 60, kDataIntervalSeconds = 10, kDataProbes = 6;
// Between two looks at what has a time, not an event.
constexpr TimeNs kLookInterval = 10 * kMillisecond;

constexpr uint32_t kAllEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

// What an event is about. Those of peers: kOfPeer + 4 * peer + 2 * plane + whether it was taken.
constexpr uint64_t kListener = 0, kBell = 1, kOfStranger = 2, kOfPeer = 4;

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
  HORORING_RETURN_IF_ERROR(self.Watch(self.listener_.fd(), kListener, EPOLLIN | EPOLLET));
  HORORING_RETURN_IF_ERROR(self.Watch(self.bell_.fd(), kBell, EPOLLIN));
  const bool eager = self.size() <= self.options_.eager_ranks;
  for (int peer = rank + 1; eager && peer < self.size(); ++peer) {
    self.Reach(peer, kControl);
    self.Reach(peer, kData);
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

TcpTransport::~TcpTransport() = default;

Status TcpTransport::Watch(int fd, uint64_t what, uint32_t events) {
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
  const TimeNs stopped = Looked(now);
  for (const auto& [peer, plane] : connecting_) {
    PeerOf(peer).channels[plane].made.give_up_ns += stopped;
  }
  if (revoked()) NoteFailure(revocation());
  bool moved = false, strange = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t what = events[i].data.u64;
    if (what == kListener) {
      accepting_ = true;
    } else if (what == kBell) {
      uint64_t rung = 0;
      woken_ = read(bell_.fd(), &rung, sizeof rung) > 0 || woken_;
    } else if (what == kOfStranger) {
      strange = true;
    } else {
      const int peer = static_cast<int>((what - kOfPeer) / 4);
      const Plane plane = (what & 2) != 0 ? kControl : kData;
      Channel& channel = PeerOf(peer).channels[plane];
      Link& link = (what & 1) != 0 ? channel.taken : channel.made;
      if (link.handshake) AdvanceLink(peer, plane, &link);
      // The edge is gone with this look: MoveData has to try again.
      moved |= plane == kData || (PullControl(peer) | PushControl(peer));
    }
  }
  if (accepting_) AcceptAll();
  for (auto each = strangers_.begin(); strange && each != strangers_.end();) Greet(each++);
  if (!strangers_.empty() && now - strangers_.front().since_ns > kStrangerTime) {
    strangers_.pop_front();
  }
  if (!connecting_.empty()) Retry();
  if (!ending_.empty()) LookAtEnded();
  return moved;
}

void TcpTransport::AcceptAll() {
  for (size_t i = 0; i < kStrangers; ++i) {
    Socket socket = Accept(listener_.fd());
    // Where file descriptors are used up, others are accepted later.
    accepting_ = socket || errno != EAGAIN;
    if (!socket) return;
    if (!Watch(socket.fd(), kOfStranger, kAllEvents).ok()) continue;
    if (strangers_.size() == kStrangers) strangers_.pop_front();
    strangers_.push_back({std::move(socket), Handshake::Accepting(options_.key, rank_), NowNs()});
    Greet(std::prev(strangers_.end()));
  }
}

void TcpTransport::Greet(std::list<Stranger>::iterator stranger) {
  const Handshake::State state = stranger->handshake.Advance(stranger->socket.fd());
  if (state == Handshake::State::kUnderWay) return;
  if (state == Handshake::State::kDone) Adopt(&*stranger);
  strangers_.erase(stranger);
}

// A stranger turns out to be a peer.
void TcpTransport::Adopt(Stranger* stranger) {
  const Hello& hello = stranger->handshake.hello();
  if (hello.rank < 0 || hello.rank >= size() || hello.rank == rank_ || hello.plane < 0 ||
      hello.plane >= kPlanes) {
    return;
  }
  const Plane plane = static_cast<Plane>(hello.plane);
  Link& link = PeerOf(hello.rank).channels[plane].taken;
  link.socket = std::move(stranger->socket);
  Open(hello.rank, plane, &link);
}

// Makes sure that there is, or will be, a connection to send over.
void TcpTransport::Need(int peer, Plane plane) {
  Channel& channel = PeerOf(peer).channels[plane];
  if (channel.sends != nullptr || channel.made.give_up_ns != 0) return;
  if (size() > options_.eager_ranks) Reach(peer, plane);
}

// Begins to connect, until it works or has taken too long.
void TcpTransport::Reach(int peer, Plane plane) {
  Link& link = PeerOf(peer).channels[plane].made;
  link.give_up_ns = After(NowNs(), options_.connect_ns);
  link.retry_ns = NowNs();
  connecting_.emplace_back(peer, plane);
  Retry();
}

void TcpTransport::Retry() {
  const TimeNs now = NowNs();
  for (size_t i = 0; i < connecting_.size();) {
    const auto [peer, plane] = connecting_[i];
    Link& link = PeerOf(peer).channels[plane].made;
    if (link.ready() || PeerOf(peer).lost) {
      connecting_[i] = connecting_.back();
      connecting_.pop_back();
      continue;
    }
    ++i;
    const std::string& address = addresses_[static_cast<size_t>(peer)];
    if (now >= link.give_up_ns) {
      PeerOf(peer).lost = true;
      NoteFailure(Status(Code::kPeerLost,
                         "rank " + std::to_string(peer) + " cannot be reached at " + address +
                             "; a firewall may stand between the hosts, or HORORING_INTERFACE "
                             "name the wrong network",
                         peer));
    } else if (!link.socket && now >= link.retry_ns) {
      link.retry_ns = After(now, kRetryInterval);
      const Status begun = Connect(address, &link.socket);
      if (begun.ok()) {
        link.handshake = Handshake::Connecting(options_.key, {rank_, peer, plane});
        const uint64_t place = static_cast<uint64_t>(peer) * 4 + (plane == kControl ? 2 : 0);
        if (!Watch(link.socket.fd(), kOfPeer + place, kAllEvents).ok()) {
          link.handshake.reset();
          link.socket = Socket();
        }
      }
    }
  }
}

void TcpTransport::AdvanceLink(int peer, Plane plane, Link* link) {
  const Handshake::State state = link->handshake->Advance(link->socket.fd());
  if (state == Handshake::State::kUnderWay) return;
  link->handshake.reset();
  if (state == Handshake::State::kDone) return Open(peer, plane, link);
  link->socket = Socket();  // Retry makes another one
}

// A connection is there: what waits for it goes on.
void TcpTransport::Open(int peer, Plane plane, Link* link) {
  Channel& channel = PeerOf(peer).channels[plane];
  const uint64_t place = static_cast<uint64_t>(peer) * 4 + (plane == kControl ? 2 : 0) +
                         (link == &channel.taken ? 1 : 0);
  Status status = Watch(link->socket.fd(), kOfPeer + place, kAllEvents);
  if (status.ok()) status = SendAtOnce(link->socket.fd());
  if (status.ok() && plane == kData) status = SetCongestion(link->socket.fd(), options_.congestion);
  if (status.ok()) {
    status = plane == kControl ? BreakWhenSilent(link->socket.fd(), options_.silent_ns)
                               : KeepAlive(link->socket.fd(), kDataIdleSeconds,
                                           kDataIntervalSeconds, kDataProbes);
  }
  if (!status.ok()) return NoteFailure(std::move(status));
  link->portion = 1;
  if (channel.sends == nullptr) channel.sends = link;
  if (plane == kControl) {
    PushControl(peer);
    PullControl(peer);
  } else {
    Activate(peer);
  }
}

// A connection has ended, with an error of the system's or 0. The peer may have told why, or left
// in peace: what it said is read first.
void TcpTransport::Ended(int peer, int error) {
  Peer& state = PeerOf(peer);
  if (state.lost || !state.ended.ok()) return;
  const std::string who = "rank " + std::to_string(peer);
  const bool died = error == 0 || error == ECONNRESET || error == EPIPE;
  state.ended = died ? Status(Code::kPeerLost, who + " died", peer)
                     : Status(Code::kPeerLost,
                              who + " cannot be reached any more (" + std::strerror(error) +
                                  "): its host is down, or the network is cut",
                              peer);
  state.ended_ns = NowNs();
  ending_.push_back(peer);
}

void TcpTransport::LookAtEnded() {
  for (size_t i = 0; i < ending_.size();) {
    Peer& state = PeerOf(ending_[i]);
    const int peer = ending_[i];
    while (PullControl(peer)) continue;
    const Channel& control = state.channels[kControl];
    const bool deaf = !control.made.ready() && !control.taken.ready();
    const bool known = state.closed || closing_ || state.lost;
    if (!known && !deaf && NowNs() - state.ended_ns < kLastWords) {
      ++i;
      continue;
    }
    if (!known) NoteFailure(state.ended);
    state.lost = true;
    ending_[i] = ending_.back();
    ending_.pop_back();
  }
}

void TcpTransport::Block(TimeNs span_ns) {
  if (!connecting_.empty() || !ending_.empty() || !strangers_.empty() || accepting_) {
    span_ns = std::min(span_ns, kLookInterval);
  }
  pollfd epoll = {epoll_.fd(), POLLIN, 0};
  const timespec span{static_cast<time_t>(span_ns / kSecond), static_cast<long>(span_ns % kSecond)};
  ppoll(&epoll, 1, &span, nullptr);
}

}  // namespace hororing
