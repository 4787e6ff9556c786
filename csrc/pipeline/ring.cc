#include "pipeline/ring.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <new>

#include "base/process.h"

namespace hororing {
namespace {

constexpr size_t kCacheLine = 64;
constexpr uint64_t kMagic = 0x676e69722e72726f;  // "orr.ring", little-endian
constexpr uint32_t kOpen = 1, kClosed = 2;
constexpr int kSpins = 200;
// How often a wait looks whether the other process still is.
constexpr TimeNs kLook = 50 * kMillisecond;

size_t RoundUp(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }
// A line in front of each slot holds the number of bytes in it.
size_t Stride(size_t slot_bytes) { return kCacheLine + RoundUp(slot_bytes); }

}  // namespace

// What one side writes, but for `bell`, and for `pid` and `start_time` by Expect.
struct alignas(kCacheLine) Ring::Line {
  std::atomic<uint64_t> moved{0};     // items published, or released
  std::atomic<uint32_t> bell{0};      // rung by the other side when it has moved; a futex word
  std::atomic<uint32_t> sleeping{0};  // this side is in, or about to enter, futex_wait
  std::atomic<uint32_t> state{0};
  std::atomic<int32_t> pid{0};
  std::atomic<int64_t> start_time{0};
};

struct Ring::Header {
  std::atomic<uint64_t> magic{0};
  uint64_t slots = 0;
  uint64_t slot_bytes = 0;
  Line producer, consumer;
};

size_t Ring::BytesFor(size_t slots, size_t slot_bytes) {
  const bool power_of_two = slots != 0 && (slots & (slots - 1)) == 0;
  if (!power_of_two || slot_bytes == 0) return 0;
  if (slot_bytes > (size_t{1} << 46) || slots > (size_t{1} << 16)) return 0;
  return sizeof(Header) + slots * Stride(slot_bytes);
}

void Ring::Format(void* memory, size_t slots, size_t slot_bytes) {
  Header* const header = new (memory) Header;
  header->slots = slots;
  header->slot_bytes = slot_bytes;
  header->magic.store(kMagic, std::memory_order_release);
}

bool Ring::IsRing(const void* memory, size_t bytes) {
  const auto* header = static_cast<const Header*>(memory);
  return bytes >= sizeof(Header) && header->magic.load(std::memory_order_acquire) == kMagic &&
         bytes >= BytesFor(header->slots, header->slot_bytes);
}

Ring::Ring(void* memory, Side side)
    : header_(*static_cast<Header*>(memory)),
      self_(side == Side::kProducer ? header_.producer : header_.consumer),
      other_(side == Side::kProducer ? header_.consumer : header_.producer) {
  taken_ = self_.moved.load(std::memory_order_relaxed);
  const ProcessIdentity self = ThisProcess();
  self_.start_time = self.start_time;
  self_.pid = self.pid;
  self_.state = kOpen;
}

Ring::~Ring() { Close(); }

size_t Ring::slot_bytes() const { return header_.slot_bytes; }

int Ring::other_pid() const { return other_.pid.load(); }

void Ring::Expect(int pid) {
  // Both write the same. Without a start time that of another process would do as well, were it not
  // that the one who expects it has not waited for it yet, so that its number is not free.
  other_.pid = pid;
}

std::byte* Ring::Slot(uint64_t item) const {
  auto* const slots = reinterpret_cast<std::byte*>(&header_) + sizeof(Header);
  return slots + (item & (header_.slots - 1)) * Stride(header_.slot_bytes);
}

void Ring::RingBell(Line& line) {
  // Sequentially consistent here and in WaitUntil: either the sleeper sees the new count, or we see
  // that it sleeps.
  line.bell.fetch_add(1);
  if (line.sleeping.load() == 0) return;
  syscall(SYS_futex, &line.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Ring::OtherIsGone() const {
  const int pid = other_.pid.load();
  if (pid == 0) return false;
  const int64_t start_time = other_.start_time.load();
  return start_time != 0 ? IsGone({pid, start_time}) : !IsRunning(pid);
}

template <typename Ready>
Ring::Wait Ring::WaitUntil(Ready ready, TimeNs deadline) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (ready()) return Wait::kReady;
  }
  TimeNs next_look = NowNs() + kLook;
  for (;;) {
    const uint32_t seen = self_.bell.load();
    if (ready()) return Wait::kReady;
    const TimeNs now = NowNs();
    const bool closed = other_.state.load() == kClosed || self_.state.load() == kClosed;
    const bool gone = now >= next_look && OtherIsGone();
    if (closed || gone) {  // what it did before counts
      return ready() ? Wait::kReady : closed ? Wait::kClosed : Wait::kGone;
    }
    if (now >= deadline) return Wait::kTimeout;
    if (now >= next_look) next_look = now + kLook;
    const TimeNs span = std::min(next_look, deadline) - now;
    self_.sleeping.store(1);
    if (self_.bell.load() == seen) {
      const timespec relative{static_cast<time_t>(span / kSecond),
                              static_cast<long>(span % kSecond)};
      syscall(SYS_futex, &self_.bell, FUTEX_WAIT, seen, &relative, nullptr, 0);
    }
    self_.sleeping.store(0);
  }
}

Ring::Wait Ring::Reserve(std::byte** slot, TimeNs deadline) {
  const uint64_t next = self_.moved.load(std::memory_order_relaxed);
  // A consumer that has closed needs nothing more, also where there is room.
  if (other_.state.load() == kClosed) return Wait::kClosed;
  const Wait wait =
      WaitUntil([&] { return next - other_.moved.load(std::memory_order_acquire) < header_.slots; },
                deadline);
  if (wait == Wait::kReady) *slot = Slot(next) + kCacheLine;
  return wait;
}

void Ring::Publish(size_t bytes) {
  const uint64_t item = self_.moved.load(std::memory_order_relaxed);
  assert(bytes <= header_.slot_bytes);
  *reinterpret_cast<uint64_t*>(Slot(item)) = bytes;
  self_.moved.store(item + 1, std::memory_order_release);
  RingBell(other_);
}

Ring::Wait Ring::Take(std::byte** slot, size_t* bytes, TimeNs deadline) {
  const Wait wait =
      WaitUntil([&] { return other_.moved.load(std::memory_order_acquire) != taken_; }, deadline);
  if (wait != Wait::kReady) return wait;
  std::byte* const line = Slot(taken_++);
  *bytes = *reinterpret_cast<const uint64_t*>(line);
  *slot = line + kCacheLine;
  return wait;
}

void Ring::Release() {
  const uint64_t released = self_.moved.load(std::memory_order_relaxed);
  assert(released < taken_);
  self_.moved.store(released + 1, std::memory_order_release);
  RingBell(other_);
}

void Ring::Close() {
  self_.state = kClosed;
  RingBell(other_);
  RingBell(self_);  // a thread of ours may wait
}

}  // namespace hororing
