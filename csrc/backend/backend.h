// Backend: runs one agreed batch on one kind of memory. Knows nothing of names' meaning,
// negotiation or the engine; errors are completed with tensor names by the engine.
//
// Thread-safety: loop thread only. Every rank of the world runs the same batches in the same
// order; which backend runs a batch is a pure function of the batch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/reduce.h"
#include "base/status.h"
#include "base/types.h"
#include "collective/algorithm.h"

namespace hororing {

class DeviceEvent;
class TraceSink;

// One tensor of a batch.
struct BatchEntry {
  const void* input = nullptr;
  void* output = nullptr;  // allreduce, broadcast: as large as the input, may equal it
  size_t elements = 0;     // of this rank's input
  std::string name;        // for the timeline, and for what fails on a device; else it may be empty
  // Allgather, alltoall: bytes that come from each rank, in rank order; `output` holds their sum.
  std::vector<size_t> receive_bytes;
  // Alltoall: bytes that go to each rank, in rank order, back to back in `input`, which does not
  // overlap `output`.
  std::vector<size_t> send_bytes;
  // Reduce-scatter: elements of each rank's part of the input, in rank order; `output` holds this
  // rank's part of the result and does not overlap `input`.
  std::vector<size_t> parts;
  // On a device: when `input` is there and `output` may be written.
  std::shared_ptr<const DeviceEvent> ready;
};

// Invariant: all entries share collective, reduce spec (allreduce, reduce-scatter), root
// (broadcast) and kind of memory.
struct Batch {
  Collective kind = Collective::kAllreduce;
  ReduceSpec reduce;  // allreduce, reduce-scatter; for the others only `dtype` is meaningful
  int root = 0;
  bool on_device = false;  // where the tensors lie, on every rank
  std::vector<BatchEntry> entries;

  size_t bytes() const;  // of this rank's inputs
};

// Which ranks of a transport run batches together: those of one process set.
struct Members {
  std::vector<int> ranks;   // ascending
  int set = 0;              // 0: all ranks
  uint64_t generation = 0;  // tells the set from earlier ones of that number

  static Members World(int size);
};

// The number of the first block in a set's life, for the backends that count blocks in shared
// memory. Above it there is room for 2^40 more.
inline uint64_t FirstBlock(const Members& members) { return members.generation << 40; }

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;  // "host", "shm_direct"
  virtual bool Supports(const Batch& batch) const = 0;
  // Whether its batches are those on a device.
  virtual bool on_device() const { return false; }
  // Blocks until this rank's outputs are complete; on a device, until what computes them has been
  // put into a stream. `deadline` bounds every wait on a peer.
  virtual Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) = 0;
  // Bytes of scratch memory held at the moment (fusion buffer, receive buffers).
  virtual size_t scratch_bytes() const = 0;
  // That the latest Run took.
  virtual AllreduceWay way() const { return AllreduceWay::kNotCounted; }

  // On a device: when the outputs of the last Run are complete.
  virtual std::shared_ptr<const DeviceEvent> done() const { return nullptr; }
  // What has gone wrong in the streams since, if anything has. Now and then.
  virtual Status Look() { return Status::Ok(); }
  // When all ranks end in peace, before the transport does: waits for the streams until `deadline`.
  // An error: in vain, and what is under way there is lost.
  virtual Status Leave(TimeNs /*deadline*/) { return Status::Ok(); }
  // Otherwise, or if that was in vain: ends what is under way in the streams, without the other
  // ranks. Nothing is run afterwards.
  virtual void BreakOff() {}
};

}  // namespace hororing
