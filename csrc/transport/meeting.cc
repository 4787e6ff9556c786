#include "transport/meeting.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/copy.h"
#include "transport/polling.h"

namespace hororing {
namespace {

// How long a rank waits for the others: as long as a turn by messages takes, so that nobody loses
// more by it than twice. It includes changes of threads, where ranks share cores.
constexpr TimeNs kPatience = 40 * kMicrosecond;
// Peers that are in step come within this many looks: less than it takes to read the clock often.
constexpr int kFirstLooks = 64;
// Where the first has waited so often in vain, it does so only now and then.
constexpr int kVainEnough = 4, kPassBy = 32;

constexpr int kBits = Meeting::kMostRanks;
constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;

uint64_t Present(uint64_t word) { return word & kMask; }
uint64_t Left(uint64_t word) { return word >> kBits & kMask; }
uint32_t Generation(uint64_t word) { return static_cast<uint32_t>(word >> 2 * kBits); }

uint64_t Word(uint32_t generation, uint64_t left, uint64_t present) {
  return static_cast<uint64_t>(generation) << 2 * kBits | left << kBits | present;
}

}  // namespace

Meeting::Meeting(std::shared_ptr<ShmSegment> segment, int rank, TimeNs spin_ns)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(segment_->geometry().ranks),
      me_(uint64_t{1} << rank),
      all_((uint64_t{1} << size_) - 1),
      patience_ns_(std::min(spin_ns, kPatience)),
      word_(segment_->meeting_word()) {}

bool Meeting::Come(const void* subject, size_t subject_bytes, const void* part, size_t part_bytes) {
  uint64_t word = word_.load(std::memory_order_acquire);
  if (!IsLate(word) && Present(word) == 0 && in_vain_ >= kVainEnough) {
    if (++passed_by_ < kPassBy) return false;
    passed_by_ = 0;
  }
  // It stays while this rank is not there.
  const uint32_t generation = Generation(word);
  bool brought = false;
  while (!IsLate(word)) {
    if (!brought) {
      Bring(generation, subject,
            {static_cast<uint32_t>(subject_bytes), static_cast<uint32_t>(part_bytes)}, part);
      brought = true;
    }
    const uint64_t present = Present(word) | me_;
    const bool last = present == all_;
    if (!Change(&word, last ? Word(generation + 1, 0, 0) : Word(generation, 0, present))) continue;
    if (!last && !IsAwaited(generation)) return false;
    met_ = generation;
    in_vain_ = 0;
    return Alike(generation);
  }
  while (IsLate(word) && !Change(&word, WithoutMe(word))) continue;
  return false;
}

// False: `word` is what it has become meanwhile. (It may fail without that.)
bool Meeting::Change(uint64_t* word, uint64_t next) {
  return word_.compare_exchange_weak(*word, next, std::memory_order_acq_rel);
}

// As this rank leaves, or comes late.
uint64_t Meeting::WithoutMe(uint64_t word) const {
  uint64_t left = Left(word) | me_;
  if (left == all_) left = 0;  // nobody is to come who would have to know
  return Word(Generation(word), left, Present(word) & ~me_);
}

// Whether others have been here and did not wait. Where this rank was among them, that was another
// time.
bool Meeting::IsLate(uint64_t word) const { return Left(word) != 0 && (Left(word) & me_) == 0; }

const std::byte* Meeting::part(int rank) const {
  const std::byte* const room = Room(rank, met_);
  return room + reinterpret_cast<const Sizes*>(room)->part_at();
}

std::byte* Meeting::Room(int rank, uint32_t generation) const {
  return segment_->meeting_room(rank) + (generation & 1) * kRoomBytes;
}

void Meeting::Bring(uint32_t generation, const void* subject, Sizes sizes, const void* part) {
  std::byte* const room = Room(rank_, generation);
  std::memcpy(room, &sizes, sizeof sizes);
  std::memcpy(room + kSubjectAt, subject, sizes.subject);
  CopyBytes(room + sizes.part_at(), part, sizes.part);
}

// Whether the others have come before this rank's patience ended.
bool Meeting::IsAwaited(uint32_t generation) {
  const auto met = [&] { return Generation(word_.load(std::memory_order_acquire)) != generation; };
  for (int look = 0; look < kFirstLooks && !shares_core_; ++look) {
    if (met()) return true;
    CpuRelax();
  }
  const TimeNs begin = NowNs();
  for (TimeNs now = begin; now - begin < patience_ns_; now = NowNs()) {
    if (!shares_core_ && now - begin < kKeepCore) {
      CpuRelax();
    } else {
      sched_yield();
      shares_core_ = NowNs() - now > kOfferRefused;
    }
    if (met()) return true;
  }
  return !Leave(generation);
}

// False: too late, all have come.
bool Meeting::Leave(uint32_t generation) {
  uint64_t word = word_.load(std::memory_order_acquire);
  while (Generation(word) == generation) {
    if (!Change(&word, WithoutMe(word))) continue;
    ++in_vain_;
    return true;
  }
  return false;
}

bool Meeting::Alike(uint32_t generation) const {
  const std::byte* const mine = Room(rank_, generation);
  const size_t subject = reinterpret_cast<const Sizes*>(mine)->subject;
  for (int rank = 0; rank < size_; ++rank) {
    const std::byte* const theirs = Room(rank, generation);
    if (rank == rank_) continue;
    if (std::memcmp(mine, theirs, sizeof(Sizes)) != 0) return false;
    if (std::memcmp(mine + kSubjectAt, theirs + kSubjectAt, subject) != 0) return false;
  }
  return true;
}

}  // namespace hororing
