// OneShotExchange: one-shot exchange through shared memory for small allreduces; no coordinator.
// Each rank of the segment brings a signature and a payload. If all ranks come at the same time
// with the same signature, each sees all payloads.
//
// The rank that comes first waits for the others, for some microseconds. The whole state is one
// word,
//
//   | generation : 32 | left : 16 | present : 16 |
//
// which only changes as a whole, so that all ranks agree on whether they have met: the last one
// that comes increments the generation, and no rank can leave after that.
//
//   left     the ranks that stopped waiting. A rank that comes after them does not wait at all.
//
// Thread-safety: one thread of a rank at a time. Try blocks for the time limit at most.
//
// Invariants
//   1. A rank's slot of one parity is not written while a peer reads it: the generation changes
//      when all are there, who have then read the payloads of the generation before, in the other
//      slot.
//   2. A rank's payload stays in its slot until the rank comes again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "transport/polling.h"
#include "transport/shm_segment.h"

namespace hororing {

class OneShotExchange {
 public:
  static constexpr size_t kMaxSignature = 504;
  static constexpr size_t kMaxPayload = 16 << 10;
  static constexpr int kMaxRanks = 16;
  // Each rank has two slots in the segment: sizes, signature, payload; of a number with a short
  // name they share one cache line.
  static constexpr size_t kSignatureAt = 8;
  static constexpr size_t kSlotBytes = kSignatureAt + kMaxSignature + kMaxPayload;
  static_assert(kSlotBytes % kCacheLine == 0);

  // `spin_ns`: the longest wait. REQUIRES: segment->geometry().exchange_bytes > 0.
  OneShotExchange(std::shared_ptr<ShmSegment> segment, int rank, TimeNs spin_ns);

  // True: all ranks have come with this signature; their payloads are there until this rank comes
  // again. False: they have not, and no rank believes that they have. REQUIRES: both sizes are
  // within bounds.
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
  std::byte* Slot(int rank, uint32_t generation) const;
  void Fill(uint32_t generation, const void* signature, Sizes sizes, const void* payload);
  bool IsLate(uint64_t word) const;
  bool Change(uint64_t* word, uint64_t next);
  uint64_t WithoutMe(uint64_t word) const;
  bool OthersCome(uint32_t generation);
  bool Leave(uint32_t generation);
  bool Alike(uint32_t generation) const;

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_;
  const int size_;
  const uint64_t me_;   // this rank's bit
  const uint64_t all_;  // the bits of all ranks
  const TimeNs limit_ns_;
  std::atomic<uint64_t>& word_;
  uint32_t met_ = 0;  // the generation of the latest success
  // Consecutive failed meetings at which this rank arrived first, and meetings skipped since.
  int failed_ = 0, skipped_ = 0;
  Spinner spinner_{1};
};

}  // namespace hororing
