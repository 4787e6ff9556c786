// TCP sockets: ownership and creation. No function blocks.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/status.h"

namespace hororing {

// A forked child closes its parent's sockets.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Listens at `host`, a name or address of this machine, on a free port. `address` is where others
// reach it: "10.0.0.1:4711", "[fe80::1]:4711".
Status Listen(const std::string& host, Socket* listener, std::string* address);
// Begins to connect. Leaves `socket` unchanged if that fails at once.
Status Connect(const std::string& address, Socket* socket);
// Whether the other end has answered.
bool IsConnected(int fd);
// Returns the next connection to `listener`; empty, with errno, if there is none.
Socket Accept(int listener);

// Sends small messages at once.
Status SendAtOnce(int fd);
// Makes the connection readable for epoll only when this many bytes, or the end, have arrived.
void WakeFor(int fd, size_t bytes);
// Probes an idle connection, and breaks it after this many probes without an answer. Firewalls
// forget connections on which nothing is ever sent.
Status KeepAlive(int fd, int idle_s, int interval_s, int probes);
// Breaks a connection whose other end does not respond for this long; an idle one is probed ten
// times in that time. Not for a connection whose receiver may leave bytes unread for longer,
// because Linux counts that time, too.
Status BreakWhenSilent(int fd, TimeNs limit_ns);

// Like send and recv: return the bytes moved; 0 if none can be moved now; -1 if the connection has
// ended, with errno, which is 0 if the peer has closed it.
ptrdiff_t SendSome(int fd, const void* data, size_t bytes);
ptrdiff_t ReceiveSome(int fd, void* data, size_t bytes);

}  // namespace hororing
