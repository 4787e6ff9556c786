// Backend: runs one agreed batch on one kind of memory. It does not know the meaning of names,
// negotiation or the engine, which adds tensor names to errors.
//
// Thread-safety: only for the thread that runs the loop (the holder of Engine::progress_mutex_).
// All ranks run the same batches in the same order. Only the batch decides which backend runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "collective/algorithm.h"
#include "kernels/reduce.h"

namespace hororing {

class DeviceEvent;
class TraceSink;

// One tensor of a batch.
struct BatchEntry {
  const void* input = nullptr;
  void* output = nullptr;  // allreduce, broadcast: as large as the input, may equal it
  size_t elements = 0;     // in this rank's input
  ReduceSpec reduce;       // without a reduction only `dtype` is meaningful
  std::string name;  // for the timeline, and for errors of a device; otherwise it may be empty
  // Allgather, alltoall: bytes received from each rank, in rank order; `output` holds their sum.
  std::vector<size_t> receive_bytes;
  // Alltoall: bytes sent to each rank, in rank order, contiguous in `input`; `output` is elsewhere.
  std::vector<size_t> send_bytes;
  // Reduce-scatter: elements of each rank's part of the input, in rank order; `output` holds this
  // rank's part of the result and does not overlap `input`.
  std::vector<size_t> parts;
  // On a device: the event after which `input` is complete and `output` may be written.
  std::shared_ptr<const DeviceEvent> ready;

  size_t bytes() const { return elements * ElementSize(reduce.dtype); }
};

// What is not finite in the sums of a batch.
struct Findings {
  struct Part {
    const void* output;  // of its entry
    int rank;            // of the set: whose input has these elements
    NonFinite elements;
  };
  std::vector<Part> inputs;  // that this rank has read; each is read once, on some rank
  bool any = false;          // whether a result is not finite; the same on all ranks
};

// Invariant: all entries share collective, root (broadcast) and kind of memory. Those of
// reduce-scatters and of Adasum share their reduce spec, too. Specs were checked with the requests.
struct Batch {
  Collective kind = Collective::kAllreduce;
  int root = 0;
  bool on_device = false;  // where the tensors are, on every rank
  std::vector<BatchEntry> entries;
  Findings* findings = nullptr;  // of an allreduce, if somebody asks

  size_t bytes() const;  // of this rank's inputs
  // Reduce-scatter, Adasum: the spec of all entries. REQUIRES: there are entries.
  const ReduceSpec& reduce() const { return entries.front().reduce; }
  bool is_adasum() const {
    return kind == Collective::kAllreduce && reduce().op == ReduceOp::kAdasum;
  }
};

// The ranks of a transport that run batches together: the members of one process set.
struct Members {
  std::vector<int> ranks;    // ascending
  int set = 0;               // 0: all ranks
  uint64_t incarnation = 0;  // distinguishes this set from an earlier one with the same id

  static Members World(int size);
};

// The number of a set's first block, for counts in shared memory; 2^40 for each incarnation.
inline uint64_t FirstBlock(const Members& members) { return members.incarnation << 40; }

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;  // "host", "shm_direct", "hierarchical", "cuda"
  virtual bool Supports(const Batch& batch) const = 0;
  // Whether Run fills Batch::findings. Otherwise the caller looks at the tensors.
  virtual bool LooksAt(const Batch& /*batch*/) const { return false; }
  // Whether it runs batches on a device.
  virtual bool on_device() const { return false; }
  // Blocks until this rank's outputs are complete; on a device, until the kernels that compute them
  // are in a stream. `deadline` limits every wait for a peer.
  virtual Status Run(const Batch& batch, TimeNs deadline, TraceSink& trace) = 0;
  // Bytes of scratch memory held now (fusion buffer, receive buffers).
  size_t scratch_bytes() const { return scratch_bytes_; }
  // The algorithm of the latest Run.
  virtual AlgorithmUsed algorithm_used() const { return AlgorithmUsed::kNotCounted; }

  // On a device: when the outputs of the last Run are complete.
  virtual std::shared_ptr<const DeviceEvent> done() const { return nullptr; }
  // Returns the first error in the streams since the last call, if any. Called occasionally.
  virtual Status Poll() { return Status::Ok(); }
  // Called when all ranks shut down normally, before the transport does. Waits for the streams
  // until `deadline`. An error means that work in the streams is lost.
  virtual Status Leave(TimeNs /*deadline*/) { return Status::Ok(); }
  // Called in all other cases, or if Leave failed: aborts the work in the streams, without the
  // other ranks. Nothing runs afterwards.
  virtual void Abort() {}

 protected:
  size_t scratch_bytes_ = 0;
};

}  // namespace hororing
