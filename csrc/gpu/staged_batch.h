// StagedBatches: batches on a device that go through host memory: without NCCL, if several ranks
// share a device, and for operations that NCCL lacks.
//
// Sums go in pieces through two pinned buffers, so that one piece is copied while another one is
// reduced. Everything else goes at once.
//
//   device   copy 0 | copy 1 |          back 0 | copy 2 |          back 1 | ...
//   host            | reduce 0          | reduce 1          | reduce 2
//
// Unlike NCCL this blocks the loop, until the framework's kernels have produced the inputs and
// while the host reduces. Thread-safety: only for the thread that runs the loop.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "gpu/device.h"
#include "transport/transport.h"

namespace hororing {

class StagedBatches {
 public:
  // `host`: backends of the same ranks, of which the last supports every batch on the host.
  StagedBatches(Transport& transport, std::vector<Backend*> host)
      : transport_(transport), host_(std::move(host)) {}

  // The private stream of `device` already waits for the inputs. The outputs are complete when that
  // stream is done. `timeout` limits every wait for a peer.
  Status Run(const Batch& batch, const std::shared_ptr<Device>& device, TimeNs timeout,
             TraceSink& trace);
  size_t scratch_bytes() const { return buffers_[0].bytes + buffers_[1].bytes; }

 private:
  struct Buffer {
    std::unique_ptr<PinnedMemory> memory;
    size_t bytes = 0;
    std::byte* data() const { return static_cast<std::byte*>(memory->data()); }
  };
  // A part of one tensor, in bytes. Several parts, of different tensors, are sent together.
  struct Slice {
    size_t entry, begin, bytes;
  };
  using Piece = std::vector<Slice>;

  Status RunAllreduce(const Batch& batch, const Device& device, TimeNs timeout, TraceSink& trace);
  Status RunWhole(const Batch& batch, const Device& device, TimeNs timeout, TraceSink& trace);
  Status RunOnHost(const Batch& batch, TimeNs timeout, TraceSink& trace);
  Status Fetch(const Batch& batch, const Piece& piece, const Device& device, Buffer& buffer,
               std::shared_ptr<DeviceEvent>* fetched);
  Status Reserve(const Device& device, size_t bytes, Buffer* buffer);
  Status Synchronize(const DeviceEvent& event);
  static std::vector<Piece> Pieces(const Batch& batch);

  Transport& transport_;
  const std::vector<Backend*> host_;
  Buffer buffers_[2];
};

}  // namespace hororing
