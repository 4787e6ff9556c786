#include "transport/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <string>
#include <utility>

namespace hororing {
namespace {

constexpr size_t kPage = 4096, kHugePage = 2 << 20;

size_t RoundUpTo(size_t unit, size_t bytes) { return (bytes + unit - 1) / unit * unit; }

std::string InMiB(size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

// Whether /dev/shm has room for as much, and for others.
Status CheckVolume(size_t bytes) {
  struct statvfs volume = {};
  if (statvfs("/dev/shm", &volume) != 0) return Status::Ok();
  const size_t size = volume.f_blocks * volume.f_frsize, left = volume.f_bavail * volume.f_frsize;
  if (size == 0 || (left >= bytes && left - bytes >= size / 2)) return Status::Ok();
  return Status(Code::kTransport, "shared memory: " + InMiB(bytes) + " would leave less than " +
                                      "half of /dev/shm free (its size is " + InMiB(size) +
                                      ", of which " + InMiB(left) + " are free); enlarge it");
}

}  // namespace

// The kernel writes zeros: where it finds no page it fails, where we would get a SIGBUS.
bool ReservePages(void* memory, size_t bytes) {
  const int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  if (zeros < 0) return false;
  size_t done = 0;
  while (done < bytes) {
    const ssize_t some = read(zeros, static_cast<char*>(memory) + done, bytes - done);
    if (some < 0 && errno == EINTR) continue;
    if (some <= 0) break;
    done += static_cast<size_t>(some);
  }
  close(zeros);
  return done == bytes;
}

Arena::Arena(std::shared_ptr<ShmSegment> segment, int rank)
    : segment_(std::move(segment)),
      rank_(rank),
      begin_(reinterpret_cast<uintptr_t>(segment_->arena(rank))),
      bytes_(segment_->arena_bytes()) {
  if (bytes_ > 0) free_[0] = bytes_;
}

Status Arena::Allocate(size_t bytes, void** memory) {
  for (int rank = 0; rank < segment_->geometry().ranks; ++rank) {
    if (segment_->rank_state(rank).maps_arenas.load() != 0) continue;
    return Status(Code::kTransport,
                  "shared memory: rank " + std::to_string(rank) +
                      " has no arenas: HORORING_ARENA_BYTES is 0 on rank 0, or the address space "
                      "is limited (ulimit -v)",
                  rank);
  }
  if (bytes <= bytes_ && segment_->process_shared()) HORORING_RETURN_IF_ERROR(CheckVolume(bytes));
  size_t offset = 0;
  HORORING_RETURN_IF_ERROR(Take(bytes, &offset));
  bytes = RoundUpTo(kPage, bytes);
  void* const begin = reinterpret_cast<void*>(begin_ + offset);
  const size_t huge = bytes / kHugePage * kHugePage;
  if (huge > 0) madvise(begin, huge, MADV_HUGEPAGE);  // advice: may be refused
  if (!ReservePages(begin, bytes)) {
    Free(begin);
    return Status(Code::kTransport,
                  "shared memory: /dev/shm has no room for " + InMiB(bytes) + "; enlarge it");
  }
  *memory = begin;
  return Status::Ok();
}

Status Arena::Take(size_t wanted, size_t* begin) {
  const size_t unit = wanted >= kHugePage ? kHugePage : kPage;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [offset, room] : free_) {
    const size_t at = offset, before = RoundUpTo(unit, at) - at;
    if (before >= room || room - before < wanted) continue;  // and so no overflow below
    const size_t bytes = RoundUpTo(kPage, wanted), after = room - before - bytes;
    free_.erase(at);
    if (before > 0) free_[at] = before;
    if (after > 0) free_[at + before + bytes] = after;
    used_[at + before] = bytes;
    *begin = at + before;
    return Status::Ok();
  }
  return Status(Code::kTransport, "shared memory: no room for " + InMiB(wanted) +
                                      " in the arena of rank " + std::to_string(rank_) + " (" +
                                      InMiB(Used()) + " of " + InMiB(bytes_) +
                                      " in use; HORORING_ARENA_BYTES sets the limit)");
}

size_t Arena::Used() const {
  size_t used = 0;
  for (const auto& each : used_) used += each.second;
  return used;
}

size_t Arena::used_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Used();
}

void Arena::Free(void* memory) {
  const size_t offset = reinterpret_cast<uintptr_t>(memory) - begin_;
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(offset);
    if (found == used_.end()) return;
    bytes = found->second;
    used_.erase(found);
  }
  // A hole in the object, for all who map it. Until it is there nobody may have the range.
  madvise(memory, bytes, MADV_REMOVE);
  std::lock_guard<std::mutex> lock(mutex_);
  auto at = free_.emplace(offset, bytes).first;
  if (at != free_.begin()) {
    const auto previous = std::prev(at);
    if (previous->first + previous->second == at->first) {
      previous->second += at->second;
      free_.erase(at);
      at = previous;
    }
  }
  const auto next = std::next(at);
  if (next != free_.end() && at->first + at->second == next->first) {
    at->second += next->second;
    free_.erase(next);
  }
}

}  // namespace hororing
