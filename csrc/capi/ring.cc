// hr_ring_...: rings of the input pipeline.
#include "pipeline/ring.h"

#include <cstdint>
#include <string>

#include "capi/hororing.h"
#include "capi/process.h"

struct hr_ring {
  hr_ring(void* memory, hororing::Ring::Side taken) : ring(memory, taken), side(taken) {}
  hororing::Ring ring;
  const hororing::Ring::Side side;
  bool reserved = false;
  int64_t held = 0;
};

namespace hororing {
namespace {

Status Invalid(const char* text) { return Status(Code::kInvalidArgument, text); }

TimeNs Deadline(double timeout_s) {
  return timeout_s < 0
             ? kForever
             : After(NowNs(), static_cast<TimeNs>(timeout_s * static_cast<double>(kSecond)));
}

int Ended(const hr_ring& ring, Ring::Wait wait) {
  const bool consumes = ring.side == Ring::Side::kConsumer;
  const std::string other = std::string(consumes ? "producer" : "consumer") + " (process " +
                            std::to_string(ring.ring.other_pid()) + ")";
  switch (wait) {
    case Ring::Wait::kReady: return HR_OK;
    case Ring::Wait::kTimeout: return HR_PENDING;
    case Ring::Wait::kClosed:
      return Remember(Status(Code::kShutDown, "ring: the " + other + " has closed it"));
    case Ring::Wait::kGone: break;
  }
  return Remember(Status(Code::kPeerLost, "ring: the " + other + " has ended without a word"));
}

}  // namespace
}  // namespace hororing

using namespace hororing;

HR_EXPORT int64_t hr_ring_bytes(int64_t slots, int64_t slot_bytes) {
  if (slots <= 0 || slot_bytes <= 0) return 0;
  return static_cast<int64_t>(
      Ring::BytesFor(static_cast<size_t>(slots), static_cast<size_t>(slot_bytes)));
}

HR_EXPORT int hr_ring_format(uintptr_t memory, int64_t bytes, int64_t slots, int64_t slot_bytes) {
  const int64_t needed = hr_ring_bytes(slots, slot_bytes);
  if (memory == 0 || memory % 64 != 0 || needed == 0 || bytes < needed) {
    return Remember(
        Invalid("hr_ring_format: memory is too small or not aligned to 64 bytes, or "
                "the number of slots is not a power of two"));
  }
  Ring::Format(reinterpret_cast<void*>(memory), static_cast<size_t>(slots),
               static_cast<size_t>(slot_bytes));
  return HR_OK;
}

HR_EXPORT hr_ring* hr_ring_open(uintptr_t memory, int64_t bytes, int32_t side, int32_t other_pid) {
  void* const base = reinterpret_cast<void*>(memory);
  if (memory == 0 || bytes < 0 || !Ring::IsRing(base, static_cast<size_t>(bytes)) || side < 0 ||
      side > 1) {
    Remember(Invalid("hr_ring_open: there is no ring in this memory, or side is not 0 or 1"));
    return nullptr;
  }
  auto* const ring = new hr_ring(base, side == 0 ? Ring::Side::kProducer : Ring::Side::kConsumer);
  if (other_pid > 0) ring->ring.Expect(other_pid);
  return ring;
}

HR_EXPORT void hr_ring_close(hr_ring* ring) { delete ring; }

HR_EXPORT int hr_ring_reserve(hr_ring* ring, double timeout_s, uintptr_t* slot) {
  if (ring->side != Ring::Side::kProducer) {
    return Remember(Invalid("hr_ring_reserve: this is the consumer's side"));
  }
  std::byte* at = nullptr;
  const Ring::Wait wait = ring->ring.Reserve(&at, Deadline(timeout_s));
  ring->reserved = wait == Ring::Wait::kReady;
  *slot = reinterpret_cast<uintptr_t>(at);
  return Ended(*ring, wait);
}

HR_EXPORT int hr_ring_publish(hr_ring* ring, int64_t bytes) {
  if (!ring->reserved || bytes < 0 || static_cast<size_t>(bytes) > ring->ring.slot_bytes()) {
    return Remember(Invalid("hr_ring_publish: no slot is reserved, or it is not that large"));
  }
  ring->reserved = false;
  ring->ring.Publish(static_cast<size_t>(bytes));
  return HR_OK;
}

HR_EXPORT int hr_ring_take(hr_ring* ring, double timeout_s, uintptr_t* slot, int64_t* bytes) {
  if (ring->side != Ring::Side::kConsumer) {
    return Remember(Invalid("hr_ring_take: this is the producer's side"));
  }
  std::byte* at = nullptr;
  size_t size = 0;
  const Ring::Wait wait = ring->ring.Take(&at, &size, Deadline(timeout_s));
  ring->held += wait == Ring::Wait::kReady;
  *slot = reinterpret_cast<uintptr_t>(at);
  *bytes = static_cast<int64_t>(size);
  return Ended(*ring, wait);
}

HR_EXPORT int hr_ring_release(hr_ring* ring) {
  if (ring->held == 0) return Remember(Invalid("hr_ring_release: no item is held"));
  --ring->held;
  ring->ring.Release();
  return HR_OK;
}
