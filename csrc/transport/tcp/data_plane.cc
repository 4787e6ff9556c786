// The data plane of TcpTransport: bare streams. Sizes are known on both sides, so bytes go straight
// from one caller's memory into the other's. Nothing is read before somebody receives: the window
// of TCP holds the sender back.
#include <algorithm>
#include <cerrno>

#include "transport/long_wait.h"
#include "transport/polling.h"
#include "transport/tcp/transport.h"

namespace hororing {
namespace {

constexpr TimeNs kLongestSleep = 50 * kMillisecond;  // events end it
// Who waits for so much sleeps at once: it takes longer than polling pays for.
constexpr size_t kMuch = 128 << 10;
// Data wakes by portions, not by packets, or by all that is left; a little by every packet.
constexpr size_t kPortion = 32 << 10, kLittle = 4 << 10;
// Looks at the data between two looks at events, while data moves.
constexpr unsigned kDataLooks = 8;

uint64_t Slot(int peer, bool receive, uint64_t sequence) {
  return sequence << 17 | static_cast<uint64_t>(peer) << 1 | (receive ? 1 : 0);
}

}  // namespace

Transport::Request TcpTransport::Send(int peer, const void* data, size_t bytes) {
  Peer& state = PeerOf(peer);
  const uint64_t sequence = ++state.sends_posted;
  if (broken_.ok()) {
    // A Job is used in both directions; that of a send is only read.
    state.sends.push_back({static_cast<std::byte*>(const_cast<void*>(data)), bytes});
    Activate(peer);
    PushData(peer);
  }
  return {Slot(peer, false, sequence)};
}

Transport::Request TcpTransport::Receive(int peer, void* data, size_t bytes) {
  Peer& state = PeerOf(peer);
  const uint64_t sequence = ++state.receives_posted;
  if (broken_.ok()) {
    state.receives.push_back({static_cast<std::byte*>(data), bytes});
    Activate(peer);
  }
  return {Slot(peer, true, sequence)};
}

Status TcpTransport::Wait(Request request, TimeNs deadline) {
  const int peer = static_cast<int>(request.slot >> 1 & 0xffff);
  const uint64_t sequence = request.slot >> 17;
  const Peer& state = PeerOf(peer);
  const uint64_t& done = (request.slot & 1) != 0 ? state.receives_done : state.sends_done;
  const std::deque<Job>& jobs = (request.slot & 1) != 0 ? state.receives : state.sends;
  const bool much = done < sequence && broken_.ok() && jobs[sequence - done - 1].left >= kMuch;
  // Polling did not pay in the last wait that had to sleep, or will not in this one.
  const bool sleeps = much || last_gap_ns_ > options_.spin_ns + Backoff::kYield;
  Backoff backoff(options_.spin_ns, kLongestSleep, sleeps ? -options_.spin_ns : Backoff::kYield,
                  kLongestSleep);
  LongWait wait(backoff.begin_ns());
  const auto lagging = [peer] { return std::to_string(peer); };
  for (unsigned look = 1; broken_.ok(); ++look) {
    if (done >= sequence) return Status::Ok();
    bool moved = MoveData();
    if (moved && look > 1) {
      const TimeNs gap = NowNs() - backoff.quiet_since_ns();
      if (gap > kKeepCore) last_gap_ns_ = gap;
    }
    if (done >= sequence) return Status::Ok();
    if (moved) wait.Moved();
    if (!moved || look % kDataLooks == 0) {
      moved |= Events();
      wait.Look(*this, NowNs(), lagging);
    }
    if (!failure_.ok()) {
      broken_ = failure_;
    } else if (!backoff.Pause(*this, 0, moved, Extended(deadline))) {
      Events();  // tells whether this process was stopped
      if (NowNs() >= Extended(deadline)) broken_ = wait.GiveUp(*this, lagging());
    }
  }
  Abandon();
  return broken_;
}

bool TcpTransport::Done(Request request) {
  const uint64_t sequence = request.slot >> 17;
  const Peer& state = PeerOf(static_cast<int>(request.slot >> 1 & 0xffff));
  const uint64_t& done = (request.slot & 1) != 0 ? state.receives_done : state.sends_done;
  if (done < sequence) Move();
  return done >= sequence || !broken_.ok() || !failure_.ok();
}

void TcpTransport::SleepUnless(uint32_t /*seen*/, TimeNs span_ns) { Block(span_ns); }

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
    if (state.sends.empty() && state.receives.empty()) {
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
  Channel& channel = state.channels[kData];
  if (!state.sends.empty()) Need(peer, kData);
  bool moved = false;
  while (!state.sends.empty()) {
    Job& job = state.sends.front();
    if (job.left > 0) {
      if (channel.sends == nullptr || !channel.sends->ready()) break;
      const ptrdiff_t sent = SendSome(channel.sends->socket.fd(), job.data, job.left);
      if (sent < 0) {
        const int error = errno;
        channel.sends->socket = Socket();
        Ended(peer, error);
      }
      if (sent <= 0) break;
      job.data += sent;
      job.left -= static_cast<size_t>(sent);
    }
    moved = true;
    if (job.left > 0) break;  // the socket is full
    state.sends.pop_front();
    ++state.sends_done;
  }
  return moved;
}

bool TcpTransport::PullData(int peer) {
  Peer& state = PeerOf(peer);
  Channel& channel = state.channels[kData];
  bool moved = false;
  while (!state.receives.empty()) {
    Job& job = state.receives.front();
    const size_t before = job.left;
    std::optional<int> ended;
    for (Link* link : {&channel.made, &channel.taken}) {
      if (job.left == 0 || !link->ready()) continue;
      const size_t portion = job.left < kLittle ? 1 : std::min(job.left, kPortion);
      if (portion != std::exchange(link->portion, portion)) WakeFor(link->socket.fd(), portion);
      const ptrdiff_t got = ReceiveSome(link->socket.fd(), job.data, job.left);
      if (got < 0) {
        ended = errno;
        link->socket = Socket();
      }
      if (got <= 0) continue;
      job.data += got;
      job.left -= static_cast<size_t>(got);
    }
    // Of two connections the other one may have brought what was due.
    if (ended && job.left > 0) Ended(peer, *ended);
    if (job.left > 0 && job.left == before) break;
    moved = true;
    if (job.left > 0) continue;
    state.receives.pop_front();
    ++state.receives_done;
  }
  return moved;
}

// After a failure the callers' memory is theirs again: nothing is under way but what the kernel
// holds, which belongs to streams that nobody reads any more.
void TcpTransport::Abandon() {
  for (Peer& peer : peers_) {
    peer.sends.clear();
    peer.receives.clear();
  }
}

}  // namespace hororing
