// Meeting: where the ranks that map one segment come together without a word to anybody else. Each
// brings a subject and a part; when all are there with the same subject, each sees all parts.
//
// Who comes first waits for the others, for some microseconds: whoever is there is about to be
// met, or will be heard of in another way. All is in one word,
//
//   | generation : 32 | left : 16 | present : 16 |
//
// which only changes as a whole, so that all ranks agree on whether they have met: the last one
// that comes turns the generation over, and nobody can leave after that.
//
//   left     those that did not wait any longer. Who comes after them does not wait at all.
//
// Thread-safety: one thread of a rank at a time. Come never blocks for longer than the patience.
//
// Invariants
//   1. A rank's room of one parity is written while no peer reads it: a generation turns over when
//      all are there, who have then read what the generation before brought, in the other room.
//   2. What a rank has brought stays in its room until it comes again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "transport/shm_segment.h"

namespace hororing {

class Meeting {
 public:
  static constexpr size_t kMostSubject = 480;
  static constexpr size_t kMostPart = 16 << 10;
  static constexpr int kMostRanks = 16;
  // Of a rank, in the segment: two of them. Sizes, subject, part.
  static constexpr size_t kSubjectAt = kCacheLine / 2;
  static constexpr size_t kRoomBytes = kSubjectAt + kMostSubject + kMostPart;

  // `spin_ns`: nobody waits longer. REQUIRES: segment->geometry().meeting_bytes > 0.
  Meeting(std::shared_ptr<ShmSegment> segment, int rank, TimeNs spin_ns);

  // True: all ranks have come with this subject; their parts are there until this rank comes again.
  // False: they have not, and no rank believes that they have. REQUIRES: both sizes within bounds.
  bool Come(const void* subject, size_t subject_bytes, const void* part, size_t part_bytes);
  int size() const { return size_; }
  // Of the latest Come that was true; at an address that is a multiple of 8.
  const std::byte* part(int rank) const;

 private:
  struct Sizes {
    uint32_t subject, part;
    size_t part_at() const { return kSubjectAt + (subject + 7) / 8 * 8; }
  };
  std::byte* Room(int rank, uint32_t generation) const;
  void Bring(uint32_t generation, const void* subject, Sizes sizes, const void* part);
  bool IsLate(uint64_t word) const;
  bool Change(uint64_t* word, uint64_t next);
  uint64_t WithoutMe(uint64_t word) const;
  bool IsAwaited(uint32_t generation);
  bool Leave(uint32_t generation);
  bool Alike(uint32_t generation) const;

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_;
  const int size_;
  const uint64_t me_;   // this rank's bit
  const uint64_t all_;  // the bits of all ranks
  const TimeNs patience_ns_;
  std::atomic<uint64_t>& word_;
  uint32_t met_ = 0;  // the generation of the latest meeting
  // Of those that this rank was the first at: how many in a row came to nothing, and how many it
  // has passed by since.
  int in_vain_ = 0, passed_by_ = 0;
  bool shares_core_ = false;  // somebody else ran when this rank last offered its core
};

}  // namespace hororing
