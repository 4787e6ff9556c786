#include "transport/shm/one_shot_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/copy.h"

namespace hororing {
namespace {

// How long a rank waits for the others: about the time of the same sum by messages, so that a
// failed attempt at most doubles the time. It allows for thread switches if ranks share cores.
constexpr TimeNs kMaxWait = 40 * kMicrosecond;
// Peers in step arrive within this many polls, before reading the clock would pay.
constexpr int kFirstPolls = 64;
// After this many failures in a row, a rank that would arrive first tries only once in kSkip calls.
constexpr int kFailuresToSkip = 4, kSkip = 32;

constexpr int kBits = OneShotExchange::kMaxRanks;
constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;

uint64_t Present(uint64_t word) { return word & kMask; }
uint64_t Left(uint64_t word) { return word >> kBits & kMask; }
uint32_t Generation(uint64_t word) { return static_cast<uint32_t>(word >> 2 * kBits); }

uint64_t Word(uint32_t generation, uint64_t left, uint64_t present) {
  return static_cast<uint64_t>(generation) << 2 * kBits | left << kBits | present;
}

}  // namespace

OneShotExchange::OneShotExchange(std::shared_ptr<ShmSegment> segment, int rank, TimeNs spin_ns)
    : segment_(std::move(segment)), rank_(rank), limit_ns_(std::min(spin_ns, kMaxWait)) {}

bool OneShotExchange::Try(const void* signature, size_t signature_bytes, const void* payload,
                          size_t payload_bytes) {
  uint64_t word = word_.load(std::memory_order_acquire);
  if (!IsLate(word) && Present(word) == 0 && failed_ >= kFailuresToSkip) {
    if (++skipped_ < kSkip) return false;
    skipped_ = 0;
  }
  // The generation cannot change before this rank has arrived.
  const uint32_t generation = Generation(word);
  bool filled = false;
  while (!IsLate(word)) {
    if (!filled) {
      Fill(generation, signature,
           {static_cast<uint32_t>(signature_bytes), static_cast<uint32_t>(payload_bytes)}, payload);
      filled = true;
    }
    const uint64_t present = Present(word) | own_bit_;
    const bool last = present == all_bits_;
    if (!TryReplace(&word, last ? Word(generation + 1, 0, 0) : Word(generation, 0, present)))
      continue;
    if (!last && !AwaitOthers(generation)) return false;
    completed_ = generation;
    failed_ = 0;
    return SignaturesMatch(generation);
  }
  while (IsLate(word) && !TryReplace(&word, WithoutThisRank(word))) continue;
  return false;
}

// If false, `word` is the current value. (May fail spuriously.)
bool OneShotExchange::TryReplace(uint64_t* word, uint64_t next) {
  return word_.compare_exchange_weak(*word, next, std::memory_order_acq_rel);
}

// The word after this rank has left or has arrived late.
uint64_t OneShotExchange::WithoutThisRank(uint64_t word) const {
  uint64_t left = Left(word) | own_bit_;
  if (left == all_bits_) left = 0;  // every rank knows by now
  return Word(Generation(word), left, Present(word) & ~own_bit_);
}

// Whether other ranks have arrived and left. If this rank is among them, that was another attempt.
bool OneShotExchange::IsLate(uint64_t word) const {
  return Left(word) != 0 && (Left(word) & own_bit_) == 0;
}

const std::byte* OneShotExchange::payload(int rank) const {
  const std::byte* const slot = Slot(rank, completed_);
  return slot + reinterpret_cast<const Sizes*>(slot)->payload_at();
}

void OneShotExchange::Fill(uint32_t generation, const void* signature, Sizes sizes,
                           const void* payload) {
  std::byte* const slot = Slot(rank_, generation);
  std::memcpy(slot, &sizes, sizeof sizes);
  std::memcpy(slot + kSignatureAt, signature, sizes.signature);
  CopyBytes(slot + sizes.payload_at(), payload, sizes.payload);
}

// Whether the other ranks arrive within the time limit.
bool OneShotExchange::AwaitOthers(uint32_t generation) {
  const auto met = [&] { return Generation(word_.load(std::memory_order_acquire)) != generation; };
  for (int look = 0; look < kFirstPolls && !spinner_.core_is_shared(); ++look) {
    if (met()) return true;
    CpuRelax();
  }
  const TimeNs begin = NowNs();
  for (TimeNs now = begin; now - begin < limit_ns_; now = NowNs()) {
    spinner_.Pause(now, now - begin);
    if (met()) return true;
  }
  return !Leave(generation);
}

// False if it is too late because all ranks have arrived.
bool OneShotExchange::Leave(uint32_t generation) {
  uint64_t word = word_.load(std::memory_order_acquire);
  while (Generation(word) == generation) {
    if (!TryReplace(&word, WithoutThisRank(word))) continue;
    ++failed_;
    return true;
  }
  return false;
}

bool OneShotExchange::SignaturesMatch(uint32_t generation) const {
  const std::byte* const mine = Slot(rank_, generation);
  const size_t signature = reinterpret_cast<const Sizes*>(mine)->signature;
  for (int rank = 0; rank < size_; ++rank) {
    const std::byte* const theirs = Slot(rank, generation);
    if (rank == rank_) continue;
    if (std::memcmp(mine, theirs, sizeof(Sizes)) != 0) return false;
    if (std::memcmp(mine + kSignatureAt, theirs + kSignatureAt, signature) != 0) return false;
  }
  return true;
}

}  // namespace hororing
