// ShmTransport, second part: which ranks are alive, which have failed, and what a rank announces.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/process.h"
#include "base/text.h"
#include "transport/shm/shm_transport.h"

namespace hororing {
constexpr uint32_t kAttached = 1, kDetached = 2;

ShmTransport::ShmTransport(std::shared_ptr<ShmSegment> segment, int rank, TimeNs spin_ns)
    : segment_(std::move(segment)),
      rank_(rank),
      spin_ns_(spin_ns),
      exchange_(segment_->geometry().exchange_bytes > 0 && spin_ns > 0
                    ? std::make_shared<OneShotExchange>(segment_, rank, spin_ns)
                    : nullptr),
      peers_(static_cast<size_t>(size_)) {
  const ProcessIdentity self = ThisProcess();
  self_.start_time = self.start_time;
  self_.pid = self.pid;
  self_.alive_ns = NowNs();
  self_.attached = kAttached;
}

ShmTransport::~ShmTransport() { self_.attached = kDetached; }

void ShmTransport::SoundAlarm() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    segment_->rank_state(peer).alarm.store(1);
    Ring(peer);
  }
}

TimeNs ShmTransport::Silence(int peer) {
  const RankState& state = segment_->rank_state(peer);
  if (state.attached.load() != kAttached || state.failed.load() != 0) return 0;
  const TimeNs latest = std::max(state.alive_ns.load(std::memory_order_relaxed), stopped_until());
  return std::max<TimeNs>(NowNs() - latest, 0);
}

bool ShmTransport::PeerProcessIsGone(int peer) const {
  const RankState& state = segment_->rank_state(peer);
  if (!segment_->process_shared() || !IsGone({state.pid.load(), state.start_time.load()})) {
    return false;
  }
  // Read this last: the rank may have shut down, and its process ended, in the meantime.
  return state.attached.load() != kDetached;
}

// Looks at a few processes, at others each time. All ranks of the host do, and begin at different
// ones, so every process is looked at often, and a check costs the same on a host of any size.
void ShmTransport::LookForDeadPeers() {
  for (int left = std::min(kLooksPerCheck, size_ - 1); left > 0; --left) {
    looked_at_ = (looked_at_ + 1) % size_;
    if (looked_at_ == rank_) looked_at_ = (looked_at_ + 1) % size_;
    RankState& state = segment_->rank_state(looked_at_);
    if (state.gone.load() != 0 || !PeerProcessIsGone(looked_at_)) continue;
    state.gone.store(1);
    SoundAlarm();
  }
}

bool ShmTransport::PeerHasStopped(int peer) const {
  const RankState& state = segment_->rank_state(peer);
  return state.attached.load() == kDetached || state.failed.load() != 0 || PeerProcessIsGone(peer);
}

// If there are several causes, reports the first of these: a rank that announced its own failure; a
// process that died without an announcement; a rank that announced the loss of another rank; a
// needed rank that has shut down.
Status ShmTransport::CheckPeers(const std::vector<int>& lagging) {
  const TimeNs now = NowNs();
  self_.alive_ns.store(now, std::memory_order_relaxed);
  NoteCheck(now);
  if (revoked()) return revocation();
  const auto announced = [this](bool of_itself) {
    for (int peer = 0; peer < size_; ++peer) {
      const RankState& state = segment_->rank_state(peer);
      const int blamed = static_cast<int>(state.failed.load()) - 1;
      if (peer == rank_ || blamed < 0 || (blamed == peer) != of_itself) continue;
      return Status(static_cast<Code>(state.failure_code.load()), state.reason, blamed);
    }
    return Status::Ok();
  };
  HORORING_RETURN_IF_ERROR(announced(true));
  LookForDeadPeers();
  for (int peer = 0; peer < size_; ++peer) {
    const RankState& state = segment_->rank_state(peer);
    if (peer == rank_ || state.gone.load() == 0) continue;
    // It may have announced its failure and ended since the first check.
    HORORING_RETURN_IF_ERROR(announced(true));
    if (state.failed.load() != 0) continue;
    return Status(
        Code::kPeerLost,
        "rank " + std::to_string(peer) + " (pid " + std::to_string(state.pid.load()) + ") died",
        peer);
  }
  HORORING_RETURN_IF_ERROR(announced(false));
  for (const int peer : lagging) {
    if (segment_->rank_state(peer).attached.load() != kDetached) continue;
    return Status(Code::kPeerLost,
                  "rank " + std::to_string(peer) + " has shut down while others still needed it",
                  peer);
  }
  return Status::Ok();
}

void ShmTransport::AnnounceFailure(const Status& why) {
  if (self_.failed.load() != 0) return;
  const Status announced = Announced(why, rank_);
  const std::string_view reason = Shortened(announced.message(), sizeof self_.reason - 1);
  reason.copy(self_.reason, reason.size());
  self_.reason[reason.size()] = '\0';
  self_.failure_code.store(static_cast<uint32_t>(announced.code()));
  self_.failed.store(static_cast<uint32_t>(announced.rank()) + 1);
  SoundAlarm();
}

}  // namespace hororing
