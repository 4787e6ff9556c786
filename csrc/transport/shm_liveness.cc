// ShmTransport's other half: who is alive, who has failed, and what a rank says of itself.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "transport/shm_transport.h"

namespace hororing {
namespace {

constexpr int64_t kUnknownStart = -1;  // for want of a file descriptor, say
constexpr uint32_t kAttached = 1, kDetached = 2;

// The kernel's idea of when a process began, in clock ticks since boot; 0 when it is gone or a
// zombie, kUnknownStart when it could not be asked. Field 22 of /proc/<pid>/stat, see proc(5); the
// name in field 2 may hold anything, so parsing starts behind its closing bracket.
int64_t StartTime(int pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return errno == ENOENT || errno == ESRCH ? 0 : kUnknownStart;
  const size_t bytes = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[bytes] = '\0';
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || std::strlen(at) < 4) return 0;
  const char state = at[2];  // field 3
  for (int field = 2; field < 22 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
  if (state == 'Z' || state == 'X' || at == nullptr) return 0;
  return std::strtoll(at, nullptr, 10);
}

// The numbers in "1, 3".
std::vector<int> RanksIn(const std::string& text) {
  std::vector<int> ranks;
  for (const char* at = text.c_str(); *at != '\0';) {
    char* end = nullptr;
    const long rank = std::strtol(at, &end, 10);
    if (end != at) ranks.push_back(static_cast<int>(rank));
    at = end != at ? end : at + 1;
  }
  return ranks;
}

}  // namespace

void ShmTransport::AnnounceArrival() {
  self_.start_time = StartTime(getpid());
  self_.pid = getpid();
  self_.attached = kAttached;
}

void ShmTransport::AnnounceLeave() {
  self_.attached = kDetached;
  SoundAlarm();
}

void ShmTransport::SoundAlarm() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    segment_->rank_state(peer).alarm.store(1);
    Ring(peer);
  }
}

Status ShmTransport::NoProgress(const std::string& lagging, const WaitState& wait) {
  HORORING_RETURN_IF_ERROR(CheckPeers(lagging));
  const std::vector<int> ranks = RanksIn(lagging);
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3g",
                static_cast<double>(NowNs() - wait.begin_ns) / 1e9);
  return Status(Code::kTransport,
                "no progress from rank(s) " + lagging + " for " + seconds +
                    " s; they may be stopped, or their machine overloaded (HORORING_TIMEOUT_S "
                    "sets the limit)",
                ranks.empty() ? -1 : ranks[0]);
}

bool ShmTransport::PeerProcessIsGone(int peer) const {
  const RankState& state = segment_->rank_state(peer);
  const int pid = state.pid.load();
  if (!segment_->process_shared() || pid == 0) return false;
  const auto same = [](int64_t began, int64_t known) {
    return began == known || began == kUnknownStart || known == kUnknownStart;
  };
  const bool lives =
      (kill(pid, 0) == 0 || errno != ESRCH) && same(StartTime(pid), state.start_time.load());
  // Looked at last: it may have left in peace and ended meanwhile.
  return !lives && state.attached.load() != kDetached;
}

bool ShmTransport::PeerListensNoMore(int peer) const {
  const RankState& state = segment_->rank_state(peer);
  return state.attached.load() == kDetached || state.failed.load() != 0 || PeerProcessIsGone(peer);
}

// Of several causes the first one counts: those who told of themselves, then the dead who told
// nothing, then those who failed because of others, then those who left while they were needed.
Status ShmTransport::CheckPeers(const std::string& lagging) {
  const auto told = [this](bool of_itself) {
    for (int peer = 0; peer < size_; ++peer) {
      const RankState& state = segment_->rank_state(peer);
      const int blamed = static_cast<int>(state.failed.load()) - 1;
      if (peer == rank_ || blamed < 0 || (blamed == peer) != of_itself) continue;
      return Status(Code::kPeerLost, std::string(state.reason), blamed);
    }
    return Status::Ok();
  };
  HORORING_RETURN_IF_ERROR(told(true));
  for (int peer = 0; peer < size_; ++peer) {
    const RankState& state = segment_->rank_state(peer);
    if (peer == rank_ || !PeerProcessIsGone(peer)) continue;
    // It may have told and ended since we looked.
    HORORING_RETURN_IF_ERROR(told(true));
    if (state.failed.load() != 0) continue;
    return Status(
        Code::kPeerLost,
        "rank " + std::to_string(peer) + " (pid " + std::to_string(state.pid.load()) + ") died",
        peer);
  }
  HORORING_RETURN_IF_ERROR(told(false));
  for (int peer : RanksIn(lagging)) {
    if (segment_->rank_state(peer).attached.load() != kDetached) continue;
    return Status(Code::kPeerLost,
                  "rank " + std::to_string(peer) + " has shut down while others still needed it",
                  peer);
  }
  return Status::Ok();
}

void ShmTransport::AnnounceFailure(const std::string& reason, int blamed) {
  if (self_.failed.load() != 0) return;
  const std::string text = FailureText(reason, blamed, rank_);
  const size_t bytes = std::min(text.size(), sizeof self_.reason - 1);
  std::memcpy(self_.reason, text.data(), bytes);
  self_.reason[bytes] = '\0';
  // No rank to blame counts as this one.
  self_.failed.store(static_cast<uint32_t>(blamed < 0 ? rank_ : blamed) + 1);
  SoundAlarm();
}

}  // namespace hororing
