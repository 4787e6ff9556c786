// What the ranks tell one another while they negotiate. Plain values; their bytes are in
// codec.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"

namespace hororing {

// What one rank wants done under one name. Ranks must agree on everything but the first
// dimension of tensors to be gathered.
struct Request {
  struct Tensor {
    DataType dtype = DataType::kFloat32;
    std::vector<int64_t> shape;
    bool operator==(const Tensor& other) const {
      return dtype == other.dtype && shape == other.shape;
    }
  };

  std::string name;
  Collective kind = Collective::kAllreduce;
  ReduceOp op = ReduceOp::kSum;  // allreduce
  int32_t root = 0;              // broadcast
  double prescale = 1.0;         // allreduce
  double postscale = 1.0;
  std::vector<Tensor> tensors;  // several: a group, all or nothing; none: barrier

  bool operator==(const Request& other) const;
  int64_t bytes() const;  // of all tensors together
};

// From a rank to the coordinator: what has been submitted since the last report.
struct Report {
  uint64_t applied = 0;          // sequence of the last agreement that this rank has applied
  std::vector<uint64_t> cached;  // requests known by their cache id
  std::vector<Request> fresh;    // requests in full
  bool leaving = false;          // the rank is shutting down ...
  std::string reason;            // ... and why, if it said so
};

// One item of an agreement. Every rank carries out the decisions of all agreements in the same
// order: that order is what keeps the data plane free of deadlock.
struct Decision {
  enum class Kind : uint8_t {
    kRun = 0,       // carry out the request: `cache_id` if it is cached, else `name`
    kFail = 1,      // complete `name` with `status`, without running it
    kLeave = 2,     // a rank has shut down: fail everything pending with `status`, stop
    kAbort = 3,     // the engine cannot go on: fail everything pending with `status`
    kTimeline = 4,  // switch the timeline
  };
  Kind kind = Kind::kRun;
  std::string name;       // kRun of an uncached request, kFail
  uint64_t cache_id = 0;  // kRun: nonzero if the request is, or (with a name) becomes, cached
  Status status;          // kFail, kLeave, kAbort
  // kRun of an allgather, unless cached: first dimensions, [tensor * ranks + rank].
  std::vector<int64_t> rows;
  bool timeline_on = false;  // kTimeline
  bool timeline_cycles = false;
};

// From the coordinator to every rank.
struct Agreement {
  uint64_t sequence = 0;
  std::vector<Decision> decisions;
  std::vector<uint64_t> evicted;  // cache ids to forget once the decisions are carried out
};

}  // namespace hororing
