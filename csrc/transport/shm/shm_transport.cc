#include "transport/shm/shm_transport.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "kernels/copy.h"

namespace hororing {
namespace {

// How often a sleeping rank, whose caller checks too, checks whether its peers are alive.
constexpr TimeNs kIdleCheckInterval = 500 * kMillisecond;

// Both move all they can. Counters never wrap; an offset is one modulo the capacity (2^n).
size_t Write(Pipe& pipe, std::byte* ring, size_t capacity, const std::byte* data, size_t bytes,
             SharedWriter& writer) {
  const uint64_t written = pipe.written.load(std::memory_order_relaxed);
  const auto room = [&] { return capacity - static_cast<size_t>(written - pipe.read.load()); };
  const bool full = room() < bytes;
  if (full != (pipe.full.load(std::memory_order_relaxed) != 0)) pipe.full.store(full ? 1 : 0);
  // Read it again: the reader rings only if it has seen that the pipe is full.
  bytes = std::min(bytes, room());
  if (bytes == 0) return 0;
  const size_t at = static_cast<size_t>(written) & (capacity - 1);
  const size_t first = std::min(bytes, capacity - at);
  writer.Copy(ring + at, data, first);
  if (bytes > first) writer.Copy(ring, data + first, bytes - first);
  writer.Fence();
  pipe.written.store(written + bytes, std::memory_order_release);
  return bytes;
}

size_t Read(Pipe& pipe, const std::byte* ring, size_t capacity, std::byte* data, size_t bytes) {
  const uint64_t read = pipe.read.load(std::memory_order_relaxed);
  const uint64_t written = pipe.written.load(std::memory_order_acquire);
  bytes = std::min(bytes, static_cast<size_t>(written - read));
  if (bytes == 0) return 0;
  const size_t at = static_cast<size_t>(read) & (capacity - 1);
  const size_t first = std::min(bytes, capacity - at);
  CopyBytes(data, ring + at, first);
  if (bytes > first) CopyBytes(data + first, ring, bytes - first);
  pipe.read.store(read + bytes);  // sequentially consistent, as `full` is in Write
  return bytes;
}

}  // namespace

Transport::Request ShmTransport::Send(int peer, const void* data, size_t bytes) {
  const Request request =
      peers_[static_cast<size_t>(peer)].PostSend(peer, data, bytes, !broken_.ok());
  Push(peer);
  return request;
}

Transport::Request ShmTransport::Receive(int peer, void* data, size_t bytes) {
  const Request request =
      peers_[static_cast<size_t>(peer)].PostReceive(peer, data, bytes, !broken_.ok());
  Pull(peer);
  return request;
}

Status ShmTransport::Wait(Request request, TimeNs deadline) {
  HORORING_RETURN_IF_ERROR(broken_);
  const PostedTransfer posted(request, peers_);
  if (posted.done()) return Status::Ok();
  broken_ = WaitUntil([&] { return posted.done(); }, [&] { return std::vector<int>{posted.peer}; },
                      deadline);
  for (Peer& each : peers_) {
    if (!broken_.ok()) each.Drop();
  }
  return broken_;
}

bool ShmTransport::Done(Request request) {
  const PostedTransfer posted(request, peers_);
  if (!posted.done()) Progress();
  return posted.done() || !broken_.ok() || revoked();
}

void ShmTransport::Post(int peer, std::string message) {
  const uint64_t bytes = message.size();
  message.insert(0, reinterpret_cast<const char*>(&bytes), kFrameBytes);
  peers_[static_cast<size_t>(peer)].outbox.push_back(std::move(message));
  PushControl(peer);
}

bool ShmTransport::Poll(int* peer, std::string* message) {
  if (received_.empty()) Progress();
  return received_.Take(peer, message);
}

void ShmTransport::Sleep(TimeNs deadline) {
  Backoff backoff(spin_ns_, kIdleCheckInterval, &spinner_);
  TimeNs check_ns = After(backoff.begin_ns(), kIdleCheckInterval);
  for (;;) {
    const uint32_t epoch = Epoch();
    const bool moved = Progress();
    if (!received_.empty() || epoch != last_sleep_epoch_ || revoked()) {
      last_sleep_epoch_ = epoch;
      return;
    }
    if (!backoff.Pause(*this, epoch, moved, deadline)) return;
    if (CheckIsDue(backoff.now_ns(), kIdleCheckInterval, &check_ns) && !CheckPeers().ok()) return;
  }
}

void ShmTransport::Ring(int peer, bool parked_too) {
  RankState& state = segment_->rank_state(peer);
  // Sequentially consistent here and in SleepOnDoorbell: either the sleeper sees the new value and
  // does not sleep, or we see that it sleeps. The same goes for a caller that leaves the loop.
  state.doorbell.fetch_add(1);
  const uint32_t sleepers = state.sleepers.load();
  const bool everybody = parked_too && (sleepers & kCallerProgress) == 0;
  const uint32_t whom = sleepers & (everybody ? kWorker | kParked : kWorker);
  if (whom == 0) return;
  const int scope = segment_->process_shared() ? 0 : FUTEX_PRIVATE_FLAG;
  syscall(SYS_futex, &state.doorbell, FUTEX_WAKE_BITSET | scope, INT_MAX, nullptr, nullptr, whom);
}

// After a change of a pipe that the peer reads or writes.
void ShmTransport::RingForPipe(int peer) {
  segment_->rank_state(peer).changed.fetch_or(uint64_t{1} << (rank_ % 64));
  Ring(peer);
}

// Whether to check the peers: at intervals, and at once if one of them has sounded the alarm.
bool ShmTransport::CheckIsDue(TimeNs now, TimeNs interval, TimeNs* check_ns) {
  const bool alarm = self_.alarm.load() != 0 && self_.alarm.exchange(0) != 0;
  if (!alarm && now < *check_ns) return false;
  *check_ns = After(now, interval);
  return true;
}

void ShmTransport::SleepUnless(uint32_t seen, TimeNs span_ns) {
  SleepOnDoorbell(seen, After(NowNs(), span_ns), kWorker);
}

void ShmTransport::SleepOnDoorbell(uint32_t epoch, TimeNs deadline, uint32_t sleeper) {
  self_.sleepers.fetch_or(sleeper);
  if (self_.doorbell.load() == epoch) {
    // The kernel's timeout is absolute here, by the clock that NowNs() reads.
    const timespec until{static_cast<time_t>(deadline / kSecond),
                         static_cast<long>(deadline % kSecond)};
    const int scope = segment_->process_shared() ? 0 : FUTEX_PRIVATE_FLAG;
    syscall(SYS_futex, &self_.doorbell, FUTEX_WAIT_BITSET | scope, epoch, &until, nullptr, sleeper);
  }
  self_.sleepers.fetch_and(~sleeper);
}

// Reads shared atomics only: another thread may be using the transport.
void ShmTransport::SpinThenPark(uint32_t seen, TimeNs deadline) {
  const TimeNs begin = NowNs(), spin_until = std::min(deadline, After(begin, spin_ns_));
  Spinner spinner(16);
  while (self_.doorbell.load() == seen) {
    const TimeNs now = NowNs();
    if (now >= spin_until || (self_.sleepers.load() & kCallerProgress) != 0) {
      return SleepOnDoorbell(seen, deadline, kParked);
    }
    spinner.Pause(now, now - begin);
  }
}

bool ShmTransport::Flush(TimeNs deadline) {
  Backoff backoff(spin_ns_, kCheckInterval, &spinner_);
  TimeNs check_ns = After(backoff.begin_ns(), kCheckInterval);
  bool delivered = true;
  for (;;) {
    const uint32_t epoch = Epoch();
    const bool moved = Progress();
    if (!HasUnsent()) return delivered;
    if (!backoff.Pause(*this, epoch, moved, revoked() ? 0 : deadline)) return false;
    if (!CheckIsDue(backoff.now_ns(), kCheckInterval, &check_ns)) continue;
    // Peers that cannot be reached must not keep the others from their messages.
    for (int peer = 0; peer < size_; ++peer) {
      Peer& state = peers_[static_cast<size_t>(peer)];
      if (state.outbox.empty() || !PeerHasStopped(peer)) continue;
      state.outbox.clear();
      delivered = false;
    }
  }
}

bool ShmTransport::Progress() {
  // A rank that changes a pipe says so. This rank's own posts are tried at once.
  if (self_.changed.load() == 0) return false;
  const uint64_t changed = self_.changed.exchange(0);
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || (changed >> (peer % 64) & 1) == 0) continue;
    const bool sent = Push(peer), received = Pull(peer);
    data_moved_ |= sent || received;
    moved |= sent || received;
    moved |= PushControl(peer);
    moved |= PullControl(peer);
  }
  return moved;
}

// Moves as much of the open transfers as fits. move(data, bytes) returns how many it has moved.
template <typename Move>
bool ShmTransport::MoveOpen(Transfers& transfers, const Move& move) {
  // A transfer rings at least this often, so that both sides copy at the same time.
  const size_t grain = std::max<size_t>(segment_->geometry().data_pipe_bytes / 4, 1);
  bool moved = false;
  while (!transfers.open.empty()) {
    Transfers::Transfer& transfer = transfers.open.front();
    while (transfer.left > 0) {
      const size_t bytes = move(transfer.data, std::min(transfer.left, grain));
      if (bytes == 0) return moved;
      transfer.data += bytes;
      transfer.left -= bytes;
      moved = true;
    }
    transfers.FinishFirst();
    moved = true;
  }
  return moved;
}

bool ShmTransport::Push(int peer) {
  Pipe& pipe = segment_->data_pipe(rank_, peer);
  std::byte* const ring = segment_->data_pipe_data(rank_, peer);
  const size_t capacity = segment_->geometry().data_pipe_bytes;
  return MoveOpen(peers_[static_cast<size_t>(peer)].sends, [&](std::byte* data, size_t bytes) {
    bytes = Write(pipe, ring, capacity, data, bytes, to_pipes_);
    if (bytes > 0) RingForPipe(peer);
    return bytes;
  });
}

bool ShmTransport::Pull(int peer) {
  Pipe& pipe = segment_->data_pipe(peer, rank_);
  const std::byte* const ring = segment_->data_pipe_data(peer, rank_);
  const size_t capacity = segment_->geometry().data_pipe_bytes;
  return MoveOpen(peers_[static_cast<size_t>(peer)].receives, [&](std::byte* data, size_t bytes) {
    bytes = Read(pipe, ring, capacity, data, bytes);
    if (bytes > 0 && pipe.full.load() != 0) RingForPipe(peer);
    return bytes;
  });
}

bool ShmTransport::PushControl(int peer) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  bool moved = false;
  while (!state.outbox.empty()) {
    const std::string& message = state.outbox.front();
    const size_t bytes =
        Write(segment_->control_pipe(rank_, peer), segment_->control_pipe_data(rank_, peer),
              segment_->geometry().control_pipe_bytes,
              reinterpret_cast<const std::byte*>(message.data()) + state.outbox_offset,
              message.size() - state.outbox_offset, to_pipes_);
    if (bytes == 0) break;
    moved = true;
    state.outbox_offset += bytes;
    if (state.outbox_offset < message.size()) continue;
    state.outbox.pop_front();
    state.outbox_offset = 0;
  }
  if (moved) RingForPipe(peer);
  return moved;
}

bool ShmTransport::PullControl(int peer) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  Pipe& pipe = segment_->control_pipe(peer, rank_);
  const std::byte* const ring = segment_->control_pipe_data(peer, rank_);
  bool moved = false;
  for (;;) {
    const bool in_frame = state.inbox_offset < kFrameBytes;
    char* const into = in_frame ? reinterpret_cast<char*>(&state.inbox_bytes) + state.inbox_offset
                                : state.inbox.data() + (state.inbox_offset - kFrameBytes);
    const size_t wanted =
        (in_frame ? kFrameBytes : kFrameBytes + state.inbox.size()) - state.inbox_offset;
    const size_t bytes = Read(pipe, ring, segment_->geometry().control_pipe_bytes,
                              reinterpret_cast<std::byte*>(into), wanted);
    if (bytes == 0) break;
    moved = true;
    state.inbox_offset += bytes;
    if (state.inbox_offset == kFrameBytes) state.inbox.resize(state.inbox_bytes);
    if (state.inbox_offset < kFrameBytes + state.inbox.size()) continue;
    received_.emplace_back(peer, std::exchange(state.inbox, {}));
    state.inbox_offset = 0;
  }
  if (moved && pipe.full.load() != 0) RingForPipe(peer);
  return moved;
}

}  // namespace hororing
