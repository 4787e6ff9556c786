// HierarchicalNccl: collectives of tensors on devices, by NCCL within each host and by the host's
// own algorithms between hosts, for networks that NCCL cannot or must not use (ADR 0029). As many
// ranks of each host own slices as every host has. An allreduce:
//
//   PACK      tensors -> fusion buffer, in pieces of one slice per owner         device
//   scatter   the owner of a slice gets the sum of its host                      NCCL, in the host
//   across    the owners of a slice on all hosts allreduce it in pinned memory   host, transport
//   gather    every rank of the host gets all slices                             NCCL, in the host
//   UNPACK    fusion buffer -> tensors                                           device
//
// so that every byte leaves a host as seldom as it can (2(H-1)/H times), from as many ranks as
// there are. The others are parts of it. Broadcast: the root's host has all slices at once, and
// across is a broadcast. Where all hosts have as many ranks, a slice may also consist of blocks,
// one for each rank that has its owner's place on a host. Reduce-scatter: each owner needs but its
// own block of the slice, so across is a reduce-scatter, and nothing is gathered. All-gather: each
// owner has but its own block, so nothing is scattered, and across is an all-gather.
//
//   2 hosts of 2 ranks     slice 0: rank 0 | rank 2     slice 1: rank 1 | rank 3
//
//   device   scatter 0 | scatter 1 |           gather 0 | scatter 2 |           gather 1 | ...
//   host               | across 0              | across 1              | across 2
//
// Numerics: a host's sum is NCCL's, hosts are summed as HostBackend does; the same bits on all
// ranks, since every sum is computed once (and across gives the same bits on all hosts). Factors
// are applied before NCCL sums; where it cannot, by our kernels, and 16-bit floats are float32 up
// to the end. An average is a sum with a factor: NCCL's knows only the ranks of the host.
//
// Unlike plain NCCL this blocks the loop of who owns a slice, until it has come across.
// Thread-safety: loop thread only.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "backend/host_backend.h"
#include "backend/nccl_batch.h"
#include "backend/nccl_communicator.h"
#include "collective/algorithm.h"
#include "collective/allreduce.h"
#include "device/device.h"
#include "transport/subgroup.h"
#include "transport/transport.h"

namespace hororing {

// Where ranks lie: those of a process set by host, ascending.
using RanksOn = std::vector<std::vector<int>>;

class HierarchicalNccl {
 public:
  // Whether NCCL would have something to do within hosts, and the host between them.
  static bool MakesSense(const RanksOn& ranks_on);
  // Ranks are those of `transport`. REQUIRES: MakesSense(ranks_on).
  HierarchicalNccl(Transport& transport, const RanksOn& ranks_on, const WireCost& wire);

  // The ranks of this host, for their communicator.
  Transport& local() { return local_; }
  const RanksOn& ranks_on() const { return ranks_on_; }
  // From the next batch on, alike on all ranks: of what goes across.
  void Tune(const Tuning& tuning) { tuning_ = tuning; }

  struct Gpu {
    NcclCommunicator* communicator;  // of local()
    const Device& device;
    size_t fusion_bytes;  // that the user permits
    bool scales;          // the kernels of all ranks do
  };
  // Whether Run can carry it out, the same on all ranks, which may exchange something.
  Status Accept(const Batch& batch, const Gpu& gpu, TimeNs deadline, bool* accepts);
  // Puts `batch` into the device's private stream. `ready`: when its inputs are there; the stream
  // waits for it already. `timeout` bounds every wait on a peer, and, from then on, on the device.
  // REQUIRES: Accept.
  Status Run(const Batch& batch, const Gpu& gpu,
             const std::vector<std::shared_ptr<const DeviceEvent>>& ready, TimeNs timeout,
             TraceSink& trace);
  size_t scratch_bytes() const;
  // Of slices that went across from this rank, narrower than they are.
  int64_t narrow_bytes() const { return across_backend_ ? across_backend_->narrow_bytes() : 0; }

 private:
  class Walk;  // in hierarchical_nccl_walk.cc
  // This rank among `ranks_on`: its host, and its place there.
  struct Place {
    size_t host, local;
  };
  static Place Find(const RanksOn& ranks_on, int rank);
  // With the average's divisor as a factor, which is then as any other.
  ReduceSpec WithDivisor(ReduceSpec spec) const;
  NcclWay WayOf(const Batch& batch, bool scales) const;
  bool Supports(const Batch& batch, bool scales) const;
  Status Prepare(const Gpu& gpu, TimeNs deadline);

  Transport& transport_;
  const RanksOn ranks_on_;
  const int owners_;        // of slices, on each host: its first ranks
  const bool homogeneous_;  // they are all there are
  const Place own_;
  Subgroup local_;
  // Of a rank that owns slices: those that own the same ones, in the order of the hosts.
  std::optional<Subgroup> across_;
  std::optional<HostBackend> across_backend_;
  Tuning tuning_;
  Scratch scratch_;
  bool prepared_ = false;
  size_t slice_bytes_ = 0;                   // at most; 0: not prepared, or a rank lacks memory
  std::unique_ptr<PinnedMemory> pinned_[2];  // a slice each, of an owner
};

}  // namespace hororing
