#include "membership/membership.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "base/signals.h"

namespace hororing {
Membership::Membership(int socket, TimeNs interval_ns, Ended ended)
    : socket_(socket), interval_ns_(interval_ns), ended_(std::move(ended)) {
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { ThreadMain(); });
}

Membership::~Membership() {
  leaving_ = true;
  shutdown(socket_, SHUT_RDWR);
  thread_.join();
}

Status Membership::Check(int64_t generation) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return generation <= over_ ? why_ : Status::Ok();
}

Membership::Updates Membership::UpdatesSince(int64_t generation) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {updates_.stamp, updates_.generation == generation ? updates_.what : 0};
}

void Membership::ThreadMain() {
  pthread_setname_np(pthread_self(), "hororing-beats");
  TimeNs next = NowNs();
  for (bool connected = true; connected && !leaving_;) {
    const TimeNs now = NowNs();
    if (now >= next) {
      connected = Beat();
      next = After(now, interval_ns_);
    }
    pollfd incoming = {socket_, POLLIN, 0};
    const TimeNs left = std::max<TimeNs>(next - now, 0) / kMillisecond + 1;
    if (poll(&incoming, 1, static_cast<int>(left)) > 0) connected = connected && Receive();
  }
  if (leaving_) return;
  End(std::numeric_limits<int64_t>::max(),
      Status(Code::kTransport,
             "the store of the job has ended, or it has declared this process lost"));
}

// False if the connection has ended. A store that does not read needs no further beat.
bool Membership::Beat() {
  const char beat = 1;
  return send(socket_, &beat, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1 || errno == EAGAIN ||
         errno == EINTR;
}

bool Membership::Receive() {
  char* const place = reinterpret_cast<char*>(&incoming_) + received_;
  const ssize_t got = recv(socket_, place, sizeof incoming_ - received_, MSG_DONTWAIT);
  if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
  received_ += static_cast<size_t>(got);
  if (received_ < sizeof incoming_) return true;
  received_ = 0;
  incoming_.text[sizeof incoming_.text - 1] = '\0';
  Take(incoming_);
  return true;
}

void Membership::Take(const Frame& frame) {
  if (frame.kind == kOver) {
    End(frame.generation, Status(Code::kPeerLost, frame.text, frame.rank));
  } else if (frame.kind == kUpdated) {
    std::lock_guard<std::mutex> lock(mutex_);
    updates_ = frame;
  }
}

void Membership::End(int64_t generation, const Status& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (generation <= over_) return;
    over_ = generation;
    why_ = why;
  }
  ended_(generation, why);
}

}  // namespace hororing
