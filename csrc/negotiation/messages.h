// What the ranks tell one another while they negotiate. Plain values; their bytes are in
// codec.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/types.h"

namespace hororing {

// The process set of all ranks.
constexpr int32_t kWorldSet = 0;

// What one rank wants done under one name. The members of the process set must agree on everything
// but the first dimensions of tensors to be gathered, and the splits of an alltoall.
struct Request {
  struct Tensor {
    DataType dtype = DataType::kFloat32;
    std::vector<int64_t> shape;
    bool on_device = false;  // which one, ranks need not agree on
    bool operator==(const Tensor& other) const {
      return dtype == other.dtype && shape == other.shape && on_device == other.on_device;
    }
  };

  std::string name;
  int32_t process_set = kWorldSet;
  Collective kind = Collective::kAllreduce;
  ReduceOp op = ReduceOp::kSum;  // allreduce, reduce-scatter
  int32_t root = 0;              // broadcast: a rank of the job; remove_process_set: the set;
                                 // add_process_set: 1 when it is internal
  double prescale = 1.0;         // allreduce, reduce-scatter
  double postscale = 1.0;
  std::vector<Tensor> tensors;  // several: a group, all or nothing; none: barrier and the like
  // Alltoall: rows for each member of the set, in rank order; their sum is the first dimension.
  std::vector<int64_t> splits;
  std::vector<int32_t> ranks;  // add_process_set

  bool operator==(const Request& other) const;
  int64_t bytes() const;  // of all tensors together
  // All tensors of a request lie on the host, or all on a device.
  bool on_device() const { return !tensors.empty() && tensors[0].on_device; }
  // "allreduce 'layer1.weight'", "allgather 'x' of process set 2"
  std::string Title() const;
};

// What a rank knows a request by: names are scoped by process set.
std::string Key(int32_t process_set, const std::string& name);
// The same, into memory that is there.
void SetKey(int32_t process_set, const char* name, std::string* key);
inline std::string Key(const Request& request) { return Key(request.process_set, request.name); }

// From a rank to the coordinator: what has been submitted since the last report.
struct Report {
  uint64_t applied = 0;          // sequence of the last agreement that this rank has applied
  std::vector<uint64_t> cached;  // requests known by their cache id
  std::vector<Request> fresh;    // requests in full
  bool leaving = false;          // the rank is shutting down ...
  std::string reason;            // ... and why, if it said so
  // Nothing new: a caller of this rank is blocked, and nothing has been answered for a while. Said
  // again and again, as long as that is so.
  bool blocked = false;
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
    kTune = 5,      // let requests come together for so long from now on
  };
  // What a kRun of cached requests, which most decisions are, has nothing of.
  struct Details {
    std::string name;  // kRun of an uncached request, kFail
    Status status;     // kFail, kLeave, kAbort
    // kRun. Allgather: first dimensions, [tensor * members + member]; alltoall: splits,
    // [sender * members + receiver]; join: the last rank to join; add_process_set: the set.
    std::vector<int64_t> rows;
    // kRun of an allreduce: what is carried out, for members that have joined and so have no
    // request of their own.
    std::optional<Request> stand_in;
    bool timeline_on = false;  // kTimeline
    bool timeline_cycles = false;
    TimeNs hold_ns = 0;  // kTune
  };

  Decision() = default;
  Decision(Decision&&) = default;
  Decision& operator=(Decision&&) = default;
  Decision(const Decision& other) { *this = other; }
  Decision& operator=(const Decision& other);

  // Empty where none were set.
  const Details& details() const;
  Details& set_details();
  // Makes this one of the requests of `next`, too, where both are kRuns of cached requests whose
  // ids follow one another. False: they are not.
  bool Extend(const Decision& next);

  Kind kind = Kind::kRun;
  int32_t process_set = kWorldSet;  // of the request
  uint64_t cache_id = 0;  // kRun: nonzero if the request is, or (with a name) becomes, cached
  uint64_t count = 1;     // kRun of the cached requests from `cache_id` on, so many

 private:
  std::unique_ptr<Details> details_;
};

// From the coordinator to every rank.
struct Agreement {
  uint64_t sequence = 0;
  std::vector<Decision> decisions;
  std::vector<uint64_t> evicted;  // cache ids to forget once the decisions are carried out
};

}  // namespace hororing
