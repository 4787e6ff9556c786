// OneShotExchange: a small allreduce in one exchange through shared memory, without the
// coordinator. Each rank of the segment contributes a signature and a payload. If all ranks arrive
// at the same time with the same signature, each rank sees all payloads.
//
// The first rank to arrive waits some microseconds for the others. The whole state is one atomic
// word, so all ranks agree on whether the exchange took place: the last rank to arrive increments
// the generation, and no rank can leave after that. A rank that arrives after others have left does
// not wait at all.
//
//   | generation : 32 | left : 16 | present : 16 |
//
// Thread-safety: one thread of a rank at a time. Try blocks for the time limit at most.
//
// Invariants
//   1. A rank's slot of one parity is not written while a peer reads it: the generation changes
//      when all ranks have arrived, and by then they have read the previous generation's payloads,
//      which are in the other slot.
//   2. A rank's payload stays in its slot until the rank's next exchange.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "transport/polling.h"
#include "transport/shm/segment.h"

namespace hororing {

class OneShotExchange {
 public:
  static constexpr size_t kMaxSignature = 504;
  static constexpr size_t kMaxPayload = 16 << 10;
  static constexpr int kMaxRanks = 16;
  // Each rank has two slots in the segment, each with sizes, signature and payload. For a number
  // with a short name they share one cache line.
  static constexpr size_t kSignatureAt = 8;
  static constexpr size_t kSlotBytes = kSignatureAt + kMaxSignature + kMaxPayload;
  static_assert(kSlotBytes % kCacheLine == 0);

  // `spin_ns`: the longest wait. REQUIRES: segment->geometry().exchange_bytes > 0.
  OneShotExchange(std::shared_ptr<ShmSegment> segment, int rank, TimeNs spin_ns);

  // True: all ranks have arrived with this signature; payloads are valid until this rank's next
  // call. False: not so, on any rank. REQUIRES: both sizes are within bounds.
  bool Try(const void* signature, size_t signature_bytes, const void* payload,
           size_t payload_bytes);
  int size() const { return size_; }
  // The payload of the latest Try that returned true; aligned to 8 bytes.
  const std::byte* payload(int rank) const;

 private:
  struct Sizes {
    uint32_t signature, payload;
    size_t payload_at() const { return kSignatureAt + (signature + 7) / 8 * 8; }
  };
  static_assert(sizeof(Sizes) == kSignatureAt);
  std::byte* Slot(int rank, uint32_t generation) const {
    return segment_->exchange_slots(rank) + (generation & 1) * kSlotBytes;
  }
  void Fill(uint32_t generation, const void* signature, Sizes sizes, const void* payload);
  bool IsLate(uint64_t word) const;
  bool TryReplace(uint64_t* word, uint64_t next);
  uint64_t WithoutThisRank(uint64_t word) const;
  bool AwaitOthers(uint32_t generation);
  bool Leave(uint32_t generation);
  bool SignaturesMatch(uint32_t generation) const;

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_;
  const int size_ = segment_->geometry().ranks;
  const uint64_t own_bit_ = uint64_t{1} << rank_;
  const uint64_t all_bits_ = (uint64_t{1} << size_) - 1;  // of all ranks
  const TimeNs limit_ns_;
  std::atomic<uint64_t>& word_ = segment_->exchange_word();
  uint32_t completed_ = 0;  // the generation of the latest success
  // Consecutive failures of exchanges that this rank began, and exchanges skipped since.
  int failed_ = 0, skipped_ = 0;
  Spinner spinner_{1};
};

}  // namespace hororing
