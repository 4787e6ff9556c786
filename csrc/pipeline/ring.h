// Ring: a bounded queue of fixed slots in memory that two processes share, one of which produces
// and one consumes. Without locks; a wait sleeps on a futex, and ends when the other side closes or
// its process ends.
//
//   | header, producer's line, consumer's line | slot 0 | slot 1 | ... | slot S-1 |   S = 2^k
//
// Both sides count what they have done and never go back: item i lies in slot i mod S, the ring is
// empty where published == released and full where published - released == S. The producer alone
// writes `published` (release, after the slot's bytes), the consumer alone `released` (release,
// when it needs the bytes no more); the other side reads them (acquire). (L. Lamport, "Proving the
// correctness of multiprocess programs", 1977, doi:10.1109/TSE.1977.229904.)
//
// The memory is the caller's, and must be zero when it is formatted. Thread-safety: each side is
// one thread of one process; both may be in one process (tests). Close may be called by any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace hororing {

class Ring {
 public:
  enum class Side { kProducer, kConsumer };
  // How a wait ended.
  enum class Wait { kReady, kTimeout, kClosed, kGone };

  // Bytes of memory for a ring; 0 unless `slots` is a power of two and `slot_bytes` positive.
  static size_t BytesFor(size_t slots, size_t slot_bytes);
  // Makes a ring of zeroed memory, aligned to a cache line. REQUIRES: BytesFor(...) bytes of it.
  static void Format(void* memory, size_t slots, size_t slot_bytes);
  // Whether `bytes` of memory hold a ring, complete.
  static bool IsRing(const void* memory, size_t bytes);

  // Takes one side of a formatted ring. The memory must outlive it.
  Ring(void* memory, Side side);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  // Closes.
  ~Ring();

  size_t slot_bytes() const;
  int other_pid() const;  // 0: not known yet
  // Says which process the other side is, before it has taken it: it may end sooner.
  void Expect(int pid);

  // Producer: waits for an empty slot, of slot_bytes(); the same one until Publish.
  Wait Reserve(std::byte** slot, TimeNs deadline);
  // Hands the reserved slot over, with `bytes` in it. REQUIRES: a reserved slot, bytes <= its size.
  void Publish(size_t bytes);

  // Consumer: waits for the next item. It may hold several, as many as there are slots. What was
  // published before the other side closed, or died, is still taken.
  Wait Take(std::byte** slot, size_t* bytes, TimeNs deadline);
  // Gives the oldest item that was taken back. REQUIRES: there is one.
  void Release();

  // The other side's waits end with kClosed (a consumer's, when it has taken all).
  void Close();

 private:
  struct Line;
  struct Header;

  template <typename Ready>
  Wait WaitUntil(Ready ready, TimeNs deadline);
  bool OtherIsGone() const;
  std::byte* Slot(uint64_t item) const;
  static void RingBell(Line& line);

  Header& header_;
  Line& self_;
  Line& other_;
  uint64_t taken_ = 0;  // by this consumer, released or not
};

}  // namespace hororing
