#include "transport/tcp/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

namespace hororing {
namespace {

constexpr int kFlags = SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr rlim_t kSpareFiles = 64;  // for the script

// The file descriptors of all Sockets, one bit each, for children that fork without exec: a
// connection ends when its last process closes it. Higher descriptors are not tracked.
constexpr size_t kKnown = 1 << 16;
std::atomic<uint64_t> held[kKnown / 64];

// In the child: async-signal-safe calls only.
void CloseAll() {
  for (size_t word = 0; word < kKnown / 64; ++word) {
    for (uint64_t left = held[word].exchange(0); left != 0; left &= left - 1) {
      close(static_cast<int>(word * 64) + __builtin_ctzll(left));
    }
  }
}

void Hold(int fd) {
  static const int registered = pthread_atfork(nullptr, nullptr, CloseAll);
  const size_t at = static_cast<size_t>(fd);
  if (fd < 0 || at >= kKnown || registered != 0) return;
  held[at / 64].fetch_or(uint64_t{1} << at % 64);
}

void Close(int fd) {
  const size_t at = static_cast<size_t>(fd);
  if (at < kKnown) held[at / 64].fetch_and(~(uint64_t{1} << at % 64));
  close(fd);
}

Status Refused(const std::string& what, const std::string& why) {
  return Status(Code::kTransport, what + ": " + why);
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Status Resolve(const std::string& host, const std::string& port, int flags, Addresses* found) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
  if (error != 0) return Refused("address " + host, gai_strerror(error));
  found->reset(list);
  return Status::Ok();
}

Status Set(int fd, int level, int option, int value, const char* name) {
  if (setsockopt(fd, level, option, &value, sizeof value) == 0) return Status::Ok();
  return Refused(name, std::strerror(errno));
}

// The result of send or recv as SendSome and ReceiveSome return it.
ptrdiff_t Moved(ptrdiff_t bytes) {
  if (bytes > 0) return bytes;
  if (bytes == 0) {
    errno = 0;
    return -1;
  }
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

// Makes a socket. If it leaves few file descriptors for the script, or there is none left for it,
// the soft limit becomes the hard one.
template <typename Make>
Socket WithRoom(const Make& make) {
  int fd = make();
  const int error = errno;
  rlimit files = {};
  if ((fd >= 0 || error == EMFILE) && getrlimit(RLIMIT_NOFILE, &files) == 0 &&
      files.rlim_cur < files.rlim_max &&
      (fd < 0 || static_cast<rlim_t>(fd) + kSpareFiles > files.rlim_cur)) {
    files.rlim_cur = files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) == 0 && fd < 0) return Socket(make());
  }
  errno = error;
  return Socket(fd);
}

}  // namespace

Socket::Socket(int fd) : fd_(fd) { Hold(fd); }

Socket::~Socket() {
  if (fd_ >= 0) Close(fd_);
}

Status Listen(const std::string& host, Socket* listener, std::string* address) {
  Addresses found(nullptr, &freeaddrinfo);
  HORORING_RETURN_IF_ERROR(Resolve(host, "0", AI_PASSIVE, &found));
  *listener = Socket(socket(found->ai_family, SOCK_STREAM | kFlags, 0));
  if (!*listener || bind(listener->fd(), found->ai_addr, found->ai_addrlen) != 0 ||
      listen(listener->fd(), SOMAXCONN) != 0) {
    return Refused("cannot listen at " + host, std::strerror(errno));
  }
  sockaddr_storage own = {};
  socklen_t bytes = sizeof own;
  char number[NI_MAXHOST], port[NI_MAXSERV];
  if (getsockname(listener->fd(), reinterpret_cast<sockaddr*>(&own), &bytes) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&own), bytes, number, sizeof number, port,
                  sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return Refused("cannot tell the address of " + host, std::strerror(errno));
  }
  *address = own.ss_family == AF_INET6 ? "[" + std::string(number) + "]:" + port
                                       : std::string(number) + ":" + port;
  return Status::Ok();
}

Status Connect(const std::string& address, Socket* made) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return Refused("address " + address, "it has no port");
  std::string host = address.substr(0, colon);
  if (!host.empty() && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  Addresses found(nullptr, &freeaddrinfo);
  HORORING_RETURN_IF_ERROR(Resolve(host, address.substr(colon + 1), AI_NUMERICHOST, &found));
  Socket begun = WithRoom([&] { return socket(found->ai_family, SOCK_STREAM | kFlags, 0); });
  if (!begun) return Refused("cannot make a socket", std::strerror(errno));
  if (connect(begun.fd(), found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS) {
    return Refused("cannot connect (HORORING_INTERFACE chooses the network)", std::strerror(errno));
  }
  *made = std::move(begun);
  return Status::Ok();
}

bool IsConnected(int fd) {
  sockaddr_storage other = {};
  socklen_t bytes = sizeof other;
  return getpeername(fd, reinterpret_cast<sockaddr*>(&other), &bytes) == 0;
}

Socket Accept(int listener) {
  return WithRoom([&] { return accept4(listener, nullptr, nullptr, kFlags); });
}

Status SendAtOnce(int fd) { return Set(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"); }

void WakeFor(int fd, size_t bytes) {
  (void)Set(fd, SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(bytes), "SO_RCVLOWAT").ok();
}

Status KeepAlive(int fd, int idle_s, int interval_s, int probes) {
  HORORING_RETURN_IF_ERROR(Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE"));
  HORORING_RETURN_IF_ERROR(Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle_s, "TCP_KEEPIDLE"));
  HORORING_RETURN_IF_ERROR(Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval_s, "TCP_KEEPINTVL"));
  return Set(fd, IPPROTO_TCP, TCP_KEEPCNT, probes, "TCP_KEEPCNT");
}

Status BreakWhenSilent(int fd, TimeNs limit_ns) {
  const int ms = static_cast<int>(std::min<TimeNs>(limit_ns / kMillisecond, 1 << 30));
  const int probes = 10, seconds = std::max(1, ms / 1000 / probes);
  HORORING_RETURN_IF_ERROR(KeepAlive(fd, seconds, seconds, probes));
  // Also bounds unacknowledged data. Linux then ignores the number of probes.
  return Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, ms, "TCP_USER_TIMEOUT");
}

ptrdiff_t SendSome(int fd, const void* data, size_t bytes) {
  return Moved(send(fd, data, bytes, MSG_NOSIGNAL));
}

ptrdiff_t ReceiveSome(int fd, void* data, size_t bytes) { return Moved(recv(fd, data, bytes, 0)); }

}  // namespace hororing
