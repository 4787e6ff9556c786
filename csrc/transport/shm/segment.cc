#include "transport/shm/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <utility>

#include "transport/shm/one_shot_exchange.h"

namespace hororing {
namespace {

constexpr size_t kPage = 4096;
constexpr uint64_t kMagic = 0x676e69726f726f68;  // "hororing", little-endian

// The first page. `magic` is the last thing that Create writes.
struct Header {
  std::atomic<uint64_t> magic;
  uint64_t total_bytes;
};
static_assert(sizeof(Header) <= kPage);
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "a lock inside an atomic would be private to one process");

// The least size of a pipe, and the budget for all control pipes.
constexpr size_t kMinPipe = 4 << 10, kControlBudget = 8 << 20;

// Halves `bytes` until `count` times as many fit into the budget, but not below `least`.
size_t Shrunk(size_t bytes, size_t least, size_t count, size_t budget) {
  while (bytes > least && bytes * count > budget) bytes /= 2;
  return bytes;
}

constexpr char kPrefix[] = "hororing.";

// A name that no other job can guess or have left behind.
std::string UniqueName() {
  std::random_device entropy;
  char text[64];
  std::snprintf(text, sizeof text, "/%s%d.%08x%08x", kPrefix, static_cast<int>(getpid()), entropy(),
                entropy());
  return text;
}

// Removes this user's files whose creators were killed before Unlink: no process holds their locks.
void Sweep() {
  DIR* const directory = opendir("/dev/shm");
  while (const dirent* entry = directory != nullptr ? readdir(directory) : nullptr) {
    const std::string name = std::string("/") + entry->d_name;
    if (name.compare(1, sizeof kPrefix - 1, kPrefix) != 0) continue;
    const int fd = shm_open(name.c_str(), O_RDWR | O_NONBLOCK, 0);  // others could make it wait
    struct stat file = {};
    if (fd < 0) continue;  // another user's
    const bool own = fstat(fd, &file) == 0 && file.st_uid == geteuid();
    if (own && flock(fd, LOCK_EX | LOCK_NB) == 0) shm_unlink(name.c_str());
    close(fd);
  }
  if (directory != nullptr) closedir(directory);
}

// A new, locked file. On failure -1, with errno: EAGAIN if another process's Sweep removed it.
int CreateLocked(const std::string& name) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  struct stat file = {};
  if (fd < 0) return fd;
  if (flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &file) == 0 && file.st_nlink > 0) return fd;
  shm_unlink(name.c_str());
  close(fd);
  errno = EAGAIN;
  return -1;
}

// Whole KiB or MiB, rounded up.
std::string SizeText(uint64_t bytes) {
  return bytes < (1 << 20) ? std::to_string((bytes + 1023) >> 10) + " KiB"
                           : std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

Status NoRoom(size_t bytes, int error) {
  struct statvfs volume = {};
  std::string text =
      "shared memory: cannot reserve " + SizeText(bytes) + " in /dev/shm: " + std::strerror(error);
  if (statvfs("/dev/shm", &volume) == 0) {
    text += " (its size is " + SizeText(volume.f_blocks * volume.f_frsize) + ", of which " +
            SizeText(volume.f_bavail * volume.f_frsize) + " are free)";
  }
  return Status(Code::kTransport,
                text +
                    "; enlarge it (docker run --shm-size=1g, or mount -o remount,size=1g "
                    "/dev/shm), remove what others have left in it, or use "
                    "HORORING_TRANSPORT=mpi");
}

Status Failed(const std::string& what, const std::string& name, int error) {
  return Status(Code::kTransport, "shared memory: cannot " + what + " /dev/shm" + name + ": " +
                                      std::strerror(error) +
                                      "; HORORING_TRANSPORT=mpi does not need it");
}

Status NotOurs(const std::string& name, uid_t owner) {
  return Status(Code::kInvalidArgument,
                "shared memory: user " + std::to_string(geteuid()) + " may not use /dev/shm" +
                    name + " of user " + std::to_string(owner) +
                    "; start every rank of a host as the same user, or set HORORING_TRANSPORT=tcp");
}

// Maps the whole segment; null, with errno, on failure.
void* Map(int fd, size_t bytes) {
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
  return base == MAP_FAILED ? nullptr : base;
}

}  // namespace

ShmSegment::Geometry ShmSegment::Geometry::For(int ranks) {
  // Every ordered pair has pipes, so they shrink as the number of ranks grows. The three budgets
  // keep the segment of up to 64 ranks below the 64 MiB of a container's /dev/shm.
  constexpr size_t kDataBudget = 16 << 20, kSlotBudget = 16 << 20;
  const size_t n = static_cast<size_t>(ranks);
  Geometry geometry;
  geometry.ranks = ranks;
  geometry.data_pipe_bytes = Shrunk(256 << 10, kMinPipe, n * n, kDataBudget);
  geometry.control_pipe_bytes = Shrunk(64 << 10, kMinPipe, n * n, kControlBudget);
  geometry.slot_bytes = Shrunk(2 << 20, 64 << 10, n, kSlotBudget);
  if (ranks <= OneShotExchange::kMaxRanks)
    geometry.exchange_bytes = 2 * OneShotExchange::kSlotBytes;
  return geometry;
}

ShmSegment::Geometry ShmSegment::Geometry::OfHost(int ranks, int most) {
  constexpr size_t kNoPipe = kCacheLine, kSlotBudget = 32 << 20;
  const size_t n = static_cast<size_t>(ranks);
  Geometry geometry;
  geometry.ranks = ranks;
  geometry.data_pipe_bytes = kNoPipe;
  geometry.control_pipe_bytes = Shrunk(64 << 10, kMinPipe, n * n, kControlBudget);
  geometry.slot_bytes = Shrunk(8 << 20, 256 << 10, static_cast<size_t>(most), kSlotBudget);
  return geometry;
}

ShmSegment::Layout::Layout(const Geometry& geometry) {
  const size_t n = static_cast<size_t>(geometry.ranks);
  states = kPage;
  pipes = states + RoundUp(n * sizeof(RankState), kPage);
  control_data = pipes + RoundUp(2 * n * n * sizeof(Pipe), kPage);
  data_data = control_data + n * n * geometry.control_pipe_bytes;
  slots = data_data + n * n * geometry.data_pipe_bytes;
  exchange = slots + n * geometry.slot_bytes;
  end =
      exchange +
      (geometry.exchange_bytes > 0 ? RoundUp(kCacheLine + n * geometry.exchange_bytes, kPage) : 0);
}

size_t ShmSegment::Geometry::total_bytes() const { return Layout(*this).end; }

ShmSegment::ShmSegment(const Geometry& geometry, void* base, std::string name)
    : geometry_(geometry),
      layout_(geometry),
      base_(static_cast<std::byte*>(base)),
      name_(std::move(name)) {}

ShmSegment::~ShmSegment() {
  Unlink();
  munmap(base_, layout_.end);
}

// The memory is zero already; constructing the atomics makes it formally correct.
void ShmSegment::Construct() {
  const size_t n = static_cast<size_t>(geometry_.ranks);
  for (size_t rank = 0; rank < n; ++rank) {
    new (base_ + layout_.states + rank * sizeof(RankState)) RankState;
  }
  for (size_t pipe = 0; pipe < 2 * n * n; ++pipe) {
    new (base_ + layout_.pipes + pipe * sizeof(Pipe)) Pipe;
  }
  if (geometry_.exchange_bytes > 0) new (base_ + layout_.exchange) std::atomic<uint64_t>(0);
  Header* const header = new (base_) Header;
  header->total_bytes = layout_.end;
  header->magic = kMagic;
}

std::shared_ptr<ShmSegment> ShmSegment::OnHeap(const Geometry& geometry) {
  // Not from malloc: untouched pages of large worlds cost nothing this way.
  void* const base = Map(-1, geometry.total_bytes());
  if (base == nullptr) throw std::bad_alloc();
  std::shared_ptr<ShmSegment> segment(new ShmSegment(geometry, base, ""));
  segment->Construct();
  return segment;
}

Status ShmSegment::Create(const Geometry& geometry, std::shared_ptr<ShmSegment>* segment) {
  Sweep();
  const size_t bytes = geometry.total_bytes();
  std::string name = UniqueName();
  int fd = CreateLocked(name);
  for (int attempt = 1; fd < 0 && errno == EAGAIN && attempt < 100; ++attempt) {
    fd = CreateLocked(name = UniqueName());
  }
  if (fd < 0) return Failed("create", name, errno);
  int error = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  // EINTR: a signal to the process may interrupt this thread, and then nothing is reserved.
  if (error == 0) {
    do {
      error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    } while (error == EINTR);
  }
  void* const base = error == 0 ? Map(fd, bytes) : nullptr;
  if (error == 0 && base == nullptr) error = errno;
  if (base == nullptr) {
    close(fd);
    shm_unlink(name.c_str());
    return NoRoom(bytes, error);
  }
  segment->reset(new ShmSegment(geometry, base, name));
  (*segment)->owned_fd_ = fd;
  (*segment)->Construct();
  return Status::Ok();
}

Status ShmSegment::Attach(const std::string& name, const Geometry& geometry,
                          std::shared_ptr<ShmSegment>* segment) {
  const size_t bytes = geometry.total_bytes();
  const int fd = shm_open(name.c_str(), O_RDWR, 0600);
  const int opened = fd < 0 ? errno : 0;
  struct stat file = {};
  const int found = fd < 0 ? stat(("/dev/shm" + name).c_str(), &file) : fstat(fd, &file);
  if (opened == EACCES || (found == 0 && file.st_uid != geteuid())) {
    if (fd >= 0) close(fd);
    return NotOurs(name, file.st_uid);
  }
  if (fd < 0) return Failed("open", name, opened);
  const bool fits = found == 0 && file.st_size >= static_cast<off_t>(bytes);
  void* const base = fits ? Map(fd, bytes) : nullptr;
  const int error = errno;
  if (fits && base == nullptr) {
    close(fd);
    return Failed("map", name, error);
  }
  if (fits) segment->reset(new ShmSegment(geometry, base, name));
  const Header* const header = static_cast<const Header*>(base);
  const bool alike = fits && header->magic == kMagic && header->total_bytes == bytes;
  close(fd);
  if (!alike) {
    segment->reset();
    return Status(Code::kTransport,
                  "shared memory: /dev/shm" + name +
                      " is laid out differently; install the same version of hororing for every "
                      "rank");
  }
  return Status::Ok();
}

void ShmSegment::Unlink() {
  if (owned_fd_ < 0) return;
  shm_unlink(name_.c_str());
  close(std::exchange(owned_fd_, -1));
}

Pipe& ShmSegment::data_pipe(int source, int destination) {
  const size_t pairs = Pair(geometry_.ranks, 0);
  return reinterpret_cast<Pipe*>(base_ + layout_.pipes)[pairs + Pair(source, destination)];
}

}  // namespace hororing
