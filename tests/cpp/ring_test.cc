// Ring: order, wrap-around, waits that end; with ranks as threads, and with processes that die.
//
//   RING_ITEMS=10000000 ./ring_test soak
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "pipeline/ring.h"

using namespace hororing;
using hororing_test::Seed;

namespace {

using Wait = Ring::Wait;

// Zeroed memory that a child shares, with a ring.
class Memory {
 public:
  Memory(size_t slots, size_t slot_bytes) : bytes_(Ring::BytesFor(slots, slot_bytes)) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    Ring::Format(base_, slots, slot_bytes);
  }
  ~Memory() { munmap(base_, bytes_); }
  void* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* base_;
};

TimeNs Soon(double seconds = 20) { return NowNs() + SecondsToNs(seconds); }

Wait Put(Ring& ring, uint64_t value, size_t bytes) {
  std::byte* slot = nullptr;
  const Wait wait = ring.Reserve(&slot, Soon());
  if (wait != Wait::kReady) return wait;
  for (size_t at = 0; at + 8 <= bytes; at += 8) std::memcpy(slot + at, &value, 8);
  ring.Publish(bytes);
  return wait;
}

// Sends `items` numbers from a thread to this one, both at a random pace.
void Soak(size_t items, size_t slots, size_t slot_bytes) {
  const Memory memory(slots, slot_bytes);
  std::thread thread([&] {
    Ring producer(memory.base(), Ring::Side::kProducer);
    std::mt19937 random(Seed());
    for (uint64_t i = 0; i < items; ++i) {
      const size_t bytes = 8 * (1 + random() % (slot_bytes / 8));
      if (Put(producer, i, bytes) != Wait::kReady) return;
      if (random() % 4096 == 0) std::this_thread::yield();
    }
  });
  Ring consumer(memory.base(), Ring::Side::kConsumer);
  std::mt19937 random(Seed() + 1), sizes(Seed());
  size_t held = 0, wrong = 0, taken = 0;
  for (; taken < items; ++taken) {
    std::byte* slot = nullptr;
    size_t bytes = 0;
    if (consumer.Take(&slot, &bytes, Soon()) != Wait::kReady) break;
    wrong += bytes != 8 * (1 + sizes() % (slot_bytes / 8));
    sizes.discard(1);
    for (size_t at = 0; at + 8 <= bytes; at += 8) {
      uint64_t value = 0;
      std::memcpy(&value, slot + at, 8);
      wrong += value != taken;
    }
    // Holds up to all slots.
    for (++held; held > 0 && (held == slots || random() % 3 != 0); --held) consumer.Release();
  }
  CHECK_EQ(taken, items);
  CHECK_EQ(wrong, size_t{0});
  std::byte* slot = nullptr;
  size_t bytes = 0;
  thread.join();
  CHECK(consumer.Take(&slot, &bytes, Soon()) == Wait::kClosed);
}

// Runs `body` in a child that then kills itself.
template <typename Body>
pid_t Doomed(Body body) {
  const pid_t pid = fork();
  if (pid == 0) {
    body();
    kill(getpid(), SIGKILL);
  }
  return pid;
}

}  // namespace

TEST(sizes_and_formats) {
  CHECK_EQ(Ring::BytesFor(0, 8), size_t{0});
  CHECK_EQ(Ring::BytesFor(3, 8), size_t{0});
  CHECK_EQ(Ring::BytesFor(4, 0), size_t{0});
  CHECK_EQ(Ring::BytesFor(4, size_t{1} << 60), size_t{0});
  CHECK_EQ(Ring::BytesFor(4, 65) - Ring::BytesFor(2, 65), size_t{2 * 192});
  const Memory memory(4, 65);
  CHECK(Ring::IsRing(memory.base(), memory.bytes()));
  CHECK(!Ring::IsRing(memory.base(), memory.bytes() - 1));
  alignas(64) char zeros[1024] = {};
  CHECK(!Ring::IsRing(zeros, sizeof zeros));
}

TEST(items_come_in_order_whatever_the_pace) {
  for (const size_t slots : {1, 2, 8}) Soak(20000, slots, 64);
}

TEST(soak) {
  const char* const items = std::getenv("RING_ITEMS");
  Soak(items != nullptr ? std::strtoul(items, nullptr, 10) : 200000, 16, 16);
}

TEST(full_and_empty_rings_time_out) {
  const Memory memory(2, 8);
  Ring producer(memory.base(), Ring::Side::kProducer),
      consumer(memory.base(), Ring::Side::kConsumer);
  std::byte *slot = nullptr, *again = nullptr;
  size_t bytes = 0;
  CHECK(consumer.Take(&slot, &bytes, Soon(0.01)) == Wait::kTimeout);
  CHECK(producer.Reserve(&slot, Soon()) == Wait::kReady);
  CHECK(producer.Reserve(&again, Soon()) == Wait::kReady);
  CHECK(slot == again);
  producer.Publish(0);
  CHECK(Put(producer, 1, 8) == Wait::kReady);
  CHECK(producer.Reserve(&slot, NowNs()) == Wait::kTimeout);
  CHECK(consumer.Take(&slot, &bytes, Soon()) == Wait::kReady);
  CHECK_EQ(bytes, size_t{0});
  CHECK(consumer.Take(&slot, &bytes, Soon()) == Wait::kReady);
  CHECK_EQ(bytes, size_t{8});
  CHECK(producer.Reserve(&slot, NowNs()) == Wait::kTimeout);  // taken is not released
  consumer.Release();
  CHECK(producer.Reserve(&slot, NowNs()) == Wait::kReady);
}

TEST(closing_ends_waits_but_not_what_was_published) {
  const Memory memory(4, 8), other(1, 8);
  auto producer = std::make_unique<Ring>(memory.base(), Ring::Side::kProducer);
  auto consumer = std::make_unique<Ring>(memory.base(), Ring::Side::kConsumer);
  std::byte* slot = nullptr;
  size_t bytes = 0;
  for (uint64_t i = 0; i < 3; ++i) CHECK(Put(*producer, i, 8) == Wait::kReady);
  producer.reset();
  for (uint64_t i = 0; i < 3; ++i) CHECK(consumer->Take(&slot, &bytes, Soon()) == Wait::kReady);
  CHECK(consumer->Take(&slot, &bytes, Soon()) == Wait::kClosed);

  producer = std::make_unique<Ring>(other.base(), Ring::Side::kProducer);
  consumer = std::make_unique<Ring>(other.base(), Ring::Side::kConsumer);
  CHECK(Put(*producer, 0, 8) == Wait::kReady);
  std::thread closer([&] { consumer.reset(); });
  CHECK(producer->Reserve(&slot, Soon()) == Wait::kClosed);
  closer.join();

  // One's own wait, by another thread.
  const Memory mine(1, 8);
  Ring waits(mine.base(), Ring::Side::kConsumer);
  std::thread self([&] { waits.Close(); });
  CHECK(waits.Take(&slot, &bytes, Soon()) == Wait::kClosed);
  self.join();
}

TEST(a_dead_producer_ends_the_wait_after_its_last_item) {
  const Memory memory(4, 8);
  Ring consumer(memory.base(), Ring::Side::kConsumer);
  const pid_t pid = Doomed([&] {
    Ring producer(memory.base(), Ring::Side::kProducer);
    for (uint64_t i = 0; i < 6; ++i) Put(producer, i, 8);
    kill(getpid(), SIGKILL);  // without closing
  });
  std::byte* slot = nullptr;
  size_t bytes = 0;
  for (int i = 0; i < 6; ++i) {
    CHECK(consumer.Take(&slot, &bytes, Soon()) == Wait::kReady);
    consumer.Release();
  }
  CHECK(consumer.Take(&slot, &bytes, Soon()) == Wait::kGone);
  CHECK_EQ(consumer.other_pid(), static_cast<int>(pid));
  waitpid(pid, nullptr, 0);
  CHECK(consumer.Take(&slot, &bytes, Soon()) == Wait::kGone);
}

TEST(a_dead_consumer_ends_the_wait_for_room) {
  const Memory memory(2, 8);
  Ring producer(memory.base(), Ring::Side::kProducer);
  const pid_t pid = Doomed([&] {
    Ring consumer(memory.base(), Ring::Side::kConsumer);
    std::byte* slot = nullptr;
    size_t bytes = 0;
    consumer.Take(&slot, &bytes, Soon());
    kill(getpid(), SIGKILL);
  });
  Wait wait = Wait::kReady;
  for (uint64_t i = 0; i < 3 && wait == Wait::kReady; ++i) wait = Put(producer, i, 8);
  CHECK(wait == Wait::kGone);
  waitpid(pid, nullptr, 0);
}

TEST(a_process_that_dies_before_it_takes_its_side_is_noticed) {
  const Memory memory(2, 8);
  Ring consumer(memory.base(), Ring::Side::kConsumer);
  const pid_t pid = Doomed([] {});
  consumer.Expect(pid);
  std::byte* slot = nullptr;
  size_t bytes = 0;
  CHECK(consumer.Take(&slot, &bytes, Soon()) == Wait::kGone);
  waitpid(pid, nullptr, 0);
}
