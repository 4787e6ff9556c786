// Arenas: memory of one rank that the others see; on the heap and in shared-memory objects.
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/arena.h"
#include "transport/factory.h"
#include "transport/shm_transport.h"

using namespace hororing;
using hororing_test::Seed;

namespace {

constexpr size_t kHuge = 2 << 20;

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Ranks on the heap; their arenas hold `arena_bytes` each.
std::vector<std::shared_ptr<Arena>> HeapArenas(int ranks, size_t arena_bytes) {
  std::vector<std::shared_ptr<Arena>> arenas;
  for (const auto& transport : MakeInprocWorld(ranks, kMicrosecond, arena_bytes)) {
    arenas.push_back(transport->arena());
  }
  return arenas;
}

bool AllEqual(const void* memory, size_t bytes, unsigned char value) {
  const auto* at = static_cast<const unsigned char*>(memory);
  return std::all_of(at, at + bytes, [&](unsigned char each) { return each == value; });
}

}  // namespace

TEST(random_allocations_are_zeroed_aligned_and_apart) {
  std::mt19937 random(Seed());
  const std::shared_ptr<Arena> arena = HeapArenas(2, 32 << 20)[1];
  std::map<unsigned char*, std::pair<size_t, unsigned char>> held;
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    if (random() % 5 < 2 && !held.empty()) {
      auto victim = held.begin();
      std::advance(victim, static_cast<long>(random() % held.size()));
      CHECK(AllEqual(victim->first, victim->second.first, victim->second.second));
      arena->Free(victim->first);
      held.erase(victim);
      continue;
    }
    const size_t bytes = 1 + random() % (random() % 4 == 0 ? 3 * kHuge : 20000);
    void* memory = nullptr;
    if (!arena->Allocate(bytes, &memory).ok()) {
      ++refused;
      continue;
    }
    CHECK_EQ(reinterpret_cast<uintptr_t>(memory) % (bytes >= kHuge ? kHuge : 4096), 0u);
    CHECK(AllEqual(memory, bytes, 0));
    const auto filling = static_cast<unsigned char>(1 + random() % 255);
    std::memset(memory, filling, bytes);
    held[static_cast<unsigned char*>(memory)] = {bytes, filling};
  }
  CHECK(refused > 0);
  for (const auto& [memory, content] : held) {
    CHECK(AllEqual(memory, content.first, content.second));
    arena->Free(memory);
  }
  void* all = nullptr;  // what was freed has become one range again
  CHECK_OK(arena->Allocate(32 << 20, &all));
}

TEST(a_full_arena_is_an_error_with_the_numbers_and_the_knob) {
  const std::shared_ptr<Arena> arena = HeapArenas(2, 5 << 20)[0];  // of which 4 MiB are used
  void *first = nullptr, *second = nullptr;
  CHECK_OK(arena->Allocate(3 << 20, &first));
  const Status full = arena->Allocate((1 << 20) + 1, &second);
  CHECK(full.code() == Code::kTransport);
  CHECK(Contains(full.message(), "no room for 2 MiB in the arena of rank 0 (3 MiB of 4 MiB"));
  CHECK(Contains(full.message(), "HORORING_ARENA_BYTES"));
  CHECK(!arena->Allocate(SIZE_MAX, &second).ok());
  CHECK_OK(arena->Allocate(1 << 20, &second));
}

TEST(offsets_are_of_what_lies_inside_as_a_whole) {
  const std::vector<std::shared_ptr<Arena>> arenas = HeapArenas(2, 4 << 20);
  void *first = nullptr, *second = nullptr;
  CHECK_OK(arenas[0]->Allocate(4 << 20, &first));
  CHECK_OK(arenas[1]->Allocate(100, &second));
  const char* const begin = static_cast<const char*>(first);
  CHECK_EQ(arenas[0]->OffsetOf(begin, 1), 0u);
  CHECK_EQ(arenas[0]->OffsetOf(begin + 1000, (4 << 20) - 1000), 1000u);
  CHECK(arenas[0]->OffsetOf(begin + 1000, (4 << 20) - 999) == Arena::kElsewhere);
  CHECK(arenas[0]->OffsetOf(begin - 1, 10) == Arena::kElsewhere);
  CHECK(arenas[0]->OffsetOf(begin + (4 << 20), 0) == Arena::kElsewhere);
  CHECK(arenas[0]->OffsetOf(begin, SIZE_MAX) == Arena::kElsewhere);
  CHECK(arenas[0]->OffsetOf(second, 100) == Arena::kElsewhere);
  CHECK(arenas[1]->OffsetOf(second, 100) != Arena::kElsewhere);
}

TEST(without_arenas_on_all_ranks_nobody_allocates_and_the_rank_is_named) {
  void* memory = nullptr;
  CHECK(MakeInprocWorld(1, kMicrosecond, 4 << 20)[0]->arena() == nullptr);
  for (const auto& arena : HeapArenas(2, 0)) {
    CHECK(Contains(arena->Allocate(1, &memory).message(), "rank 0 has no arenas"));
  }
  ShmSegment::Geometry geometry = ShmSegment::Geometry::For(2);
  geometry.arena_bytes = 4 << 20;
  const std::shared_ptr<ShmSegment> segment = ShmSegment::OnHeap(geometry);
  const ShmTransport one(segment, 0, 0), other(segment, 1, 0);
  CHECK_OK(one.arena()->Allocate(1, &memory));
  segment->rank_state(1).maps_arenas = 0;
  const Status refused = one.arena()->Allocate(1, &memory);
  CHECK_EQ(refused.rank(), 1);
  CHECK(Contains(refused.message(), "ulimit -v"));
}

TEST(an_arena_outlives_the_world) {
  const std::shared_ptr<Arena> arena = HeapArenas(2, 4 << 20)[1];  // their transports are gone
  void* memory = nullptr;
  CHECK_OK(arena->Allocate(1000, &memory));
  std::memset(memory, 7, 1000);
  CHECK(AllEqual(memory, 1000, 7));
}

TEST(threads_allocate_and_free_at_the_same_time) {
  const std::shared_ptr<Arena> arena = HeapArenas(2, 16 << 20)[0];
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      std::mt19937 random(Seed() + t);
      for (int i = 0; i < 100; ++i) {
        const size_t bytes = 1 + random() % 50000;
        void* memory = nullptr;
        CHECK_OK(arena->Allocate(bytes, &memory));
        CHECK(AllEqual(memory, bytes, 0));
        std::memset(memory, static_cast<int>(t + 1), bytes);
        CHECK(AllEqual(memory, bytes, static_cast<unsigned char>(t + 1)));
        arena->Free(memory);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(an_object_grows_by_what_is_allocated_and_shrinks_again) {
  ShmSegment::Geometry geometry = ShmSegment::Geometry::For(2);
  geometry.arena_bytes = size_t{8} << 30;
  std::shared_ptr<ShmSegment> segment, attached;
  CHECK_OK(ShmSegment::Create(geometry, &segment));
  CHECK_OK(ShmSegment::Attach(segment->name(), ShmSegment::Geometry::For(2), &attached));
  CHECK_EQ(attached->arena_bytes(), geometry.arena_bytes);  // the creator's counts
  const ShmTransport one(segment, 0, 0), other(attached, 1, 0);
  const auto pages_in_bytes = [&] {
    struct stat file = {};
    CHECK_EQ(stat(("/dev/shm" + segment->name()).c_str(), &file), 0);
    return static_cast<size_t>(file.st_blocks) * 512;
  };
  const size_t before = pages_in_bytes();
  CHECK(before < geometry.total_bytes() + 100000);
  void *first = nullptr, *second = nullptr;
  CHECK_OK(one.arena()->Allocate(5 << 20, &first));
  CHECK_OK(other.arena()->Allocate(123, &second));
  CHECK(pages_in_bytes() >= before + (5 << 20) + 4096);
  CHECK(pages_in_bytes() <= before + (6 << 20) + 4096);
  // Each rank sees what the other writes.
  static_cast<char*>(second)[100] = 'x';
  const uint64_t offset = other.arena()->OffsetOf(second, 123);
  CHECK(segment->arena(1)[offset + 100] == std::byte{'x'});
  one.arena()->Free(first);
  CHECK_EQ(pages_in_bytes(), before + 4096);
  CHECK_OK(one.arena()->Allocate(5 << 20, &first));
  CHECK(AllEqual(first, 5 << 20, 0));
  one.arena()->Free(first);
  other.arena()->Free(second);
  CHECK_EQ(pages_in_bytes(), before);
}

// In a child with a small /dev/shm of its own; 77 where that is not permitted.
static int FillSmallVolume() {
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("small", "/dev/shm", "tmpfs", 0, "size=16m") != 0) {
    return 77;
  }
  ShmSegment::Geometry geometry = ShmSegment::Geometry::For(2);
  geometry.arena_bytes = 1 << 30;
  std::shared_ptr<ShmSegment> segment;
  if (!ShmSegment::Create(geometry, &segment).ok()) return 1;
  const ShmTransport one(segment, 0, 0), other(segment, 1, 0);
  std::vector<void*> held;
  Status refused;
  for (void* memory = nullptr; refused.ok(); held.push_back(memory)) {
    refused = one.arena()->Allocate(1 << 20, &memory);
    if (held.size() > 16) return 2;
  }
  if (held.size() < 3) return 3;
  if (!Contains(refused.message(), "less than half of /dev/shm free (its size is 16 MiB")) return 4;
  // Where others fill it up in that very moment: no signal, and nothing is kept.
  if (ReservePages(segment->arena(1), 64 << 20)) return 5;
  madvise(segment->arena(1), 64 << 20, MADV_REMOVE);
  void* memory = nullptr;
  one.arena()->Free(held[0]);
  return one.arena()->Allocate(1 << 20, &memory).ok() ? 0 : 6;
}

TEST(a_full_dev_shm_is_an_error_and_no_signal) {
  const pid_t pid = fork();
  if (pid == 0) _exit(FillSmallVolume());
  int status = 0;
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) return;  // no right to mount here
  CHECK_EQ(WEXITSTATUS(status), 0);
}
