#include "transport/shm_transport.h"

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>

namespace hororing {
namespace {

constexpr uint32_t kAttached = 1, kDetached = 2;
// How often a waiting rank looks whether its peers are alive.
constexpr TimeNs kCheckInterval = 50 * kMillisecond;

// The kernel's idea of when a process began, in clock ticks since boot; 0 when it is gone or a
// zombie. Field 22 of /proc/<pid>/stat; the name in field 2 may hold anything, so parsing starts
// behind its closing bracket.
int64_t StartTime(int pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return 0;
  const size_t bytes = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[bytes] = '\0';
  const char* after_name = std::strrchr(text, ')');
  char state = 'Z';
  long long start = 0;
  if (after_name == nullptr ||
      std::sscanf(after_name + 1,
                  " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lld",
                  &state, &start) != 2) {
    return 0;
  }
  return state == 'Z' || state == 'X' ? 0 : static_cast<int64_t>(start);
}

void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

uint64_t Slot(int peer, bool receive, uint64_t sequence) {
  return sequence << 17 | static_cast<uint64_t>(peer) << 1 | (receive ? 1 : 0);
}

}  // namespace

ShmTransport::WaitState::WaitState(TimeNs spin_ns)
    : begin_ns(NowNs()),
      spin_until_ns(After(begin_ns, spin_ns)),
      next_check_ns(After(begin_ns, kCheckInterval)) {}

ShmTransport::ShmTransport(std::shared_ptr<ShmSegment> segment, int rank, TimeNs spin_ns)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(segment_->geometry().ranks),
      spin_ns_(spin_ns),
      self_(segment_->rank_state(rank)),
      peers_(static_cast<size_t>(size_)) {
  self_.start_time = StartTime(getpid());
  self_.pid = getpid();
  self_.attached = kAttached;
}

ShmTransport::~ShmTransport() {
  self_.attached = kDetached;
  RingPeers();
}

Transport::Request ShmTransport::Send(int peer, const void* data, size_t bytes) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  state.sends.push_back({static_cast<std::byte*>(const_cast<void*>(data)), bytes});
  const uint64_t sequence = ++state.sends_posted;
  Push(peer);
  return {Slot(peer, false, sequence)};
}

Transport::Request ShmTransport::Receive(int peer, void* data, size_t bytes) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  state.receives.push_back({static_cast<std::byte*>(data), bytes});
  const uint64_t sequence = ++state.receives_posted;
  Pull(peer);
  return {Slot(peer, true, sequence)};
}

Status ShmTransport::Wait(Request request, TimeNs deadline) {
  const int peer = static_cast<int>(request.slot >> 1 & 0xffff);
  Peer& state = peers_[static_cast<size_t>(peer)];
  const uint64_t sequence = request.slot >> 17;
  const uint64_t& done = (request.slot & 1) != 0 ? state.receives_done : state.sends_done;
  if (done >= sequence) return Status::Ok();
  if (broken_.ok()) {
    broken_ = WaitUntil([&] { return done >= sequence; },
                        [peer] { return std::to_string(peer); }, deadline);
    if (broken_.ok()) return broken_;
    // Nothing is touched any more: the buffers belong to the caller again.
    for (Peer& each : peers_) {
      each.sends.clear();
      each.receives.clear();
    }
  }
  return broken_;
}

void ShmTransport::Post(int peer, std::string message) {
  uint64_t bytes = message.size();
  std::string framed(reinterpret_cast<const char*>(&bytes), kFrameBytes);
  framed += message;
  peers_[static_cast<size_t>(peer)].outbox.push_back(std::move(framed));
  PushControl(peer);
}

bool ShmTransport::Poll(int* peer, std::string* message) {
  if (received_.empty()) Progress();
  if (received_.empty()) return false;
  *peer = received_.front().first;
  *message = std::move(received_.front().second);
  received_.pop_front();
  return true;
}

void ShmTransport::Sleep(TimeNs deadline) {
  WaitState wait(spin_ns_);
  for (;;) {
    const uint32_t bell = Bell();
    Progress();
    if (!received_.empty() || bell != last_sleep_bell_) {
      last_sleep_bell_ = bell;
      return;
    }
    if (NowNs() >= deadline) return;
    if (!Pause(wait, bell, deadline).ok()) return;
  }
}

void ShmTransport::Wake() { Ring(rank_); }

void ShmTransport::Ring(int peer) {
  RankState& state = segment_->rank_state(peer);
  // seq_cst on both: either the sleeper's futex call sees the new value, or we see it asleep.
  state.doorbell.fetch_add(1);
  if (state.sleeping.load() == 0) return;
  const int operation = segment_->process_shared() ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE;
  syscall(SYS_futex, &state.doorbell, operation, INT_MAX, nullptr, nullptr, 0);
}

void ShmTransport::RingPeers() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) Ring(peer);
  }
}

uint32_t ShmTransport::Bell() const { return self_.doorbell.load(); }

// One step of waiting. Sets `expired` at the deadline; an error when a peer is gone.
Status ShmTransport::Pause(WaitState& wait, uint32_t bell, TimeNs deadline) {
  const TimeNs now = NowNs();
  if (now >= deadline) {
    wait.expired = true;
    return Status::Ok();
  }
  if (now < wait.spin_until_ns) {
    // The second half leaves the core to whoever needs it: ranks may outnumber cores.
    if (now - wait.begin_ns < (wait.spin_until_ns - wait.begin_ns) / 2) {
      for (int i = 0; i < 16; ++i) CpuRelax();
    } else {
      sched_yield();
    }
    return Status::Ok();
  }
  if (now >= wait.next_check_ns) {
    wait.next_check_ns = After(now, kCheckInterval);
    HORORING_RETURN_IF_ERROR(CheckPeers());
  }
  SleepOnBell(bell, std::min(deadline, wait.next_check_ns) - now);
  return Status::Ok();
}

void ShmTransport::SleepOnBell(uint32_t bell, TimeNs timeout_ns) {
  self_.sleeping.store(1);
  if (self_.doorbell.load() == bell) {
    const timespec timeout{static_cast<time_t>(timeout_ns / kSecond),
                           static_cast<long>(timeout_ns % kSecond)};
    const int operation = segment_->process_shared() ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE;
    syscall(SYS_futex, &self_.doorbell, operation, bell, &timeout, nullptr, 0);
  }
  self_.sleeping.store(0);
}

Status ShmTransport::NoProgress(const std::string& ranks, const WaitState& wait) {
  const Status peers = CheckPeers();
  if (!peers.ok()) return peers;
  return Status(Code::kTransport,
                "no progress from rank(s) " + ranks + " for " +
                    std::to_string((NowNs() - wait.begin_ns) / kSecond) +
                    " s; the process may be stopped or its machine overloaded (HORORING_TIMEOUT_S "
                    "sets the limit)",
                ranks.empty() ? -1 : std::atoi(ranks.c_str()));
}

bool ShmTransport::PeerProcessIsGone(int peer) const {
  const RankState& state = segment_->rank_state(peer);
  const int pid = state.pid.load();
  if (!segment_->process_shared() || pid == 0) return false;
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  return StartTime(pid) != state.start_time.load();
}

Status ShmTransport::CheckPeers() {
  // Deaths first: a rank that has failed because another one died is not the one to blame.
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || segment_->rank_state(peer).attached.load() == kDetached) continue;
    if (PeerProcessIsGone(peer)) {
      return Status(Code::kPeerLost,
                    "rank " + std::to_string(peer) + " (process " +
                        std::to_string(segment_->rank_state(peer).pid.load()) +
                        ") has died",
                    peer);
    }
  }
  for (int pass = 0; pass < 2; ++pass) {
    for (int peer = 0; peer < size_; ++peer) {
      const RankState& state = segment_->rank_state(peer);
      const uint32_t failed = state.failed.load(std::memory_order_acquire);
      if (peer == rank_ || failed == 0) continue;
      const int blamed = static_cast<int>(failed) - 1;
      if (pass == 0 && blamed != peer) continue;
      return Status(Code::kPeerLost, std::string(state.reason), blamed);
    }
  }
  return Status::Ok();
}

void ShmTransport::AnnounceFailure(const std::string& reason) {
  if (self_.failed.load() != 0) return;
  const size_t bytes = std::min(reason.size(), sizeof self_.reason - 1);
  std::memcpy(self_.reason, reason.data(), bytes);
  self_.reason[bytes] = '\0';
  self_.failed.store(static_cast<uint32_t>(rank_) + 1, std::memory_order_release);
  RingPeers();
}

bool ShmTransport::Flush(TimeNs deadline) {
  const auto idle = [this] {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.outbox.empty(); });
  };
  return WaitUntil(idle, [] { return std::string("?"); }, deadline).ok();
}

bool ShmTransport::Progress() {
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    moved |= Push(peer);
    moved |= Pull(peer);
    moved |= PushControl(peer);
    moved |= PullControl(peer);
  }
  return moved;
}

bool ShmTransport::Push(int peer) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  bool moved = false;
  while (!state.sends.empty()) {
    Job& job = state.sends.front();
    const size_t bytes =
        Write(segment_->data_pipe(rank_, peer), segment_->data_pipe_data(rank_, peer),
              segment_->geometry().data_pipe_bytes, job.data, job.left);
    moved |= bytes > 0;
    job.data += bytes;
    job.left -= bytes;
    if (job.left > 0) break;
    state.sends.pop_front();
    ++state.sends_done;
    moved = true;
  }
  if (moved) Ring(peer);
  return moved;
}

bool ShmTransport::Pull(int peer) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  bool moved = false;
  while (!state.receives.empty()) {
    Job& job = state.receives.front();
    const size_t bytes =
        Read(segment_->data_pipe(peer, rank_), segment_->data_pipe_data(peer, rank_),
             segment_->geometry().data_pipe_bytes, job.data, job.left);
    moved |= bytes > 0;
    job.data += bytes;
    job.left -= bytes;
    if (job.left > 0) break;
    state.receives.pop_front();
    ++state.receives_done;
    moved = true;
  }
  if (moved) Ring(peer);
  return moved;
}

bool ShmTransport::PushControl(int peer) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  bool moved = false;
  while (!state.outbox.empty()) {
    const std::string& message = state.outbox.front();
    const size_t bytes = Write(
        segment_->control_pipe(rank_, peer), segment_->control_pipe_data(rank_, peer),
        segment_->geometry().control_pipe_bytes,
        reinterpret_cast<const std::byte*>(message.data()) + state.outbox_offset,
        message.size() - state.outbox_offset);
    moved |= bytes > 0;
    state.outbox_offset += bytes;
    if (state.outbox_offset < message.size()) break;
    state.outbox.pop_front();
    state.outbox_offset = 0;
  }
  if (moved) Ring(peer);
  return moved;
}

bool ShmTransport::PullControl(int peer) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  bool moved = false;
  for (;;) {
    const size_t have = state.inbox.size();
    if (have < state.inbox_wanted) {
      std::byte part[4096];
      const size_t bytes = Read(
          segment_->control_pipe(peer, rank_), segment_->control_pipe_data(peer, rank_),
          segment_->geometry().control_pipe_bytes, part,
          std::min(sizeof part, state.inbox_wanted - have));
      if (bytes == 0) break;
      moved = true;
      state.inbox.append(reinterpret_cast<const char*>(part), bytes);
      continue;
    }
    uint64_t body = 0;
    std::memcpy(&body, state.inbox.data(), kFrameBytes);
    if (have < kFrameBytes + body) {
      state.inbox_wanted = kFrameBytes + body;
      continue;
    }
    received_.emplace_back(peer, state.inbox.substr(kFrameBytes));
    state.inbox.clear();
    state.inbox_wanted = kFrameBytes;
  }
  if (moved) Ring(peer);
  return moved;
}

// Both: as much as there is room, or data, for. The counters never wrap; an offset is the
// counter modulo the capacity, a power of two.
size_t ShmTransport::Write(Pipe& pipe, std::byte* ring, size_t capacity, const std::byte* data,
                           size_t bytes) {
  const uint64_t written = pipe.written.load(std::memory_order_relaxed);
  const uint64_t read = pipe.read.load(std::memory_order_acquire);
  bytes = std::min(bytes, capacity - static_cast<size_t>(written - read));
  const size_t at = static_cast<size_t>(written) & (capacity - 1);
  const size_t first = std::min(bytes, capacity - at);
  if (first > 0) std::memcpy(ring + at, data, first);
  if (bytes > first) std::memcpy(ring, data + first, bytes - first);
  pipe.written.store(written + bytes, std::memory_order_release);
  return bytes;
}

size_t ShmTransport::Read(Pipe& pipe, const std::byte* ring, size_t capacity, std::byte* data,
                          size_t bytes) {
  const uint64_t read = pipe.read.load(std::memory_order_relaxed);
  const uint64_t written = pipe.written.load(std::memory_order_acquire);
  bytes = std::min(bytes, static_cast<size_t>(written - read));
  const size_t at = static_cast<size_t>(read) & (capacity - 1);
  const size_t first = std::min(bytes, capacity - at);
  if (first > 0) std::memcpy(data, ring + at, first);
  if (bytes > first) std::memcpy(data + first, ring, bytes - first);
  pipe.read.store(read + bytes, std::memory_order_release);
  return bytes;
}

}  // namespace hororing
