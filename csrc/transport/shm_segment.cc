#include "transport/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>

namespace hororing {
namespace {

constexpr size_t kHeaderBytes = 4096;
constexpr size_t kPage = 4096;

size_t RoundUpTo(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// A name that no other job can guess or have left behind.
std::string UniqueName() {
  std::random_device entropy;
  char text[64];
  std::snprintf(text, sizeof text, "/hororing.%d.%08x%08x", static_cast<int>(getpid()), entropy(),
                entropy());
  return text;
}

std::string ErrorText(int error) { return std::strerror(error); }

}  // namespace

ShmSegment::Geometry ShmSegment::Geometry::For(int ranks) {
  // Pipes exist per ordered pair: they shrink so that all together stay below 64 MiB.
  Geometry geometry;
  geometry.ranks = ranks;
  const size_t pairs = static_cast<size_t>(ranks) * static_cast<size_t>(ranks);
  geometry.data_pipe_bytes = 256 << 10;
  while (geometry.data_pipe_bytes > (4 << 10) && geometry.data_pipe_bytes * pairs > (32 << 20)) {
    geometry.data_pipe_bytes /= 2;
  }
  geometry.control_pipe_bytes = 64 << 10;
  while (geometry.control_pipe_bytes > (4 << 10) &&
         geometry.control_pipe_bytes * pairs > (16 << 20)) {
    geometry.control_pipe_bytes /= 2;
  }
  geometry.slot_bytes = ranks <= 8 ? (2 << 20) : (1 << 20);
  return geometry;
}

size_t ShmSegment::Geometry::total_bytes() const {
  const size_t n = static_cast<size_t>(ranks);
  return kHeaderBytes + RoundUpTo(n * sizeof(RankState), kPage) +
         RoundUpTo(2 * n * n * sizeof(Pipe), kPage) +
         n * n * (control_pipe_bytes + data_pipe_bytes) + n * slot_bytes;
}

ShmSegment::ShmSegment(const Geometry& geometry, void* base, std::string name)
    : geometry_(geometry), base_(static_cast<std::byte*>(base)), name_(std::move(name)) {}

ShmSegment::~ShmSegment() {
  if (process_shared()) {
    munmap(base_, geometry_.total_bytes());
  } else {
    std::free(base_);
  }
}

std::shared_ptr<ShmSegment> ShmSegment::OnHeap(const Geometry& geometry) {
  void* base = nullptr;
  if (posix_memalign(&base, kPage, geometry.total_bytes()) != 0) return nullptr;
  std::memset(base, 0, geometry.total_bytes());
  return std::shared_ptr<ShmSegment>(new ShmSegment(geometry, base, ""));
}

Status ShmSegment::Create(const Geometry& geometry, std::shared_ptr<ShmSegment>* segment) {
  const std::string name = UniqueName();
  const size_t bytes = geometry.total_bytes();
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (fd < 0) {
    return Status(Code::kTransport, "shared memory: cannot create " + name + " in /dev/shm: " + ErrorText(errno) + "; use HORORING_TRANSPORT=mpi");
  }
  const int reserved = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  void* base = reserved == 0 ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (base == MAP_FAILED) {
    shm_unlink(name.c_str());
    return Status(Code::kTransport, "shared memory: no room for " + std::to_string(bytes >> 20) + " MiB in /dev/shm: " + ErrorText(reserved));
  }
  segment->reset(new ShmSegment(geometry, base, name));
  return Status::Ok();
}
Status ShmSegment::Attach(const std::string& name, const Geometry& geometry, std::shared_ptr<ShmSegment>* segment) {
  const int fd = shm_open(name.c_str(), O_RDWR, 0600);
  if (fd < 0) return Status(Code::kTransport, "shared memory: cannot open " + name + ": " + ErrorText(errno));
  void* base = mmap(nullptr, geometry.total_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (base == MAP_FAILED) return Status(Code::kTransport, "shared memory: cannot map " + name + ": " + ErrorText(errno));
  segment->reset(new ShmSegment(geometry, base, name));
  return Status::Ok();
}
void ShmSegment::Unlink() { if (process_shared() && !unlinked_) shm_unlink(name_.c_str()); unlinked_ = true; }
RankState& ShmSegment::rank_state(int rank) { return reinterpret_cast<RankState*>(base_ + kHeaderBytes)[rank]; }
static size_t PipesAt(const ShmSegment::Geometry& g) { return kHeaderBytes + RoundUpTo(static_cast<size_t>(g.ranks) * sizeof(RankState), kPage); }
Pipe& ShmSegment::control_pipe(int s, int d) { return reinterpret_cast<Pipe*>(base_ + PipesAt(geometry_))[s * geometry_.ranks + d]; }
Pipe& ShmSegment::data_pipe(int s, int d) { return reinterpret_cast<Pipe*>(base_ + PipesAt(geometry_))[geometry_.ranks * geometry_.ranks + s * geometry_.ranks + d]; }
static size_t DataAt(const ShmSegment::Geometry& g) { return PipesAt(g) + RoundUpTo(2 * static_cast<size_t>(g.ranks) * static_cast<size_t>(g.ranks) * sizeof(Pipe), kPage); }
std::byte* ShmSegment::control_pipe_data(int s, int d) { return base_ + DataAt(geometry_) + static_cast<size_t>(s * geometry_.ranks + d) * geometry_.control_pipe_bytes; }
std::byte* ShmSegment::data_pipe_data(int s, int d) { const size_t n = static_cast<size_t>(geometry_.ranks); return base_ + DataAt(geometry_) + n * n * geometry_.control_pipe_bytes + static_cast<size_t>(s * geometry_.ranks + d) * geometry_.data_pipe_bytes; }
std::byte* ShmSegment::slot(int rank) { const size_t n = static_cast<size_t>(geometry_.ranks); return base_ + DataAt(geometry_) + n * n * (geometry_.control_pipe_bytes + geometry_.data_pipe_bytes) + static_cast<size_t>(rank) * geometry_.slot_bytes; }
}  // namespace hororing
