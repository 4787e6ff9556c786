// The messages of the negotiation as plain values. codec.h defines their bytes.
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

// add_process_set: how the set is created.
enum class SetScope : int32_t {
  kPublic = 0,       // by a user; must not duplicate another set
  kInternal = 1,     // by hororing itself; may duplicate a set
  kMembersOnly = 2,  // internal; only its members report it, under a name made of their ranks
};

// The largest number of consecutive cache ids that a message names as one run, and of all ids in
// it, so that a short malformed one cannot make us allocate more than 32 MiB.
constexpr uint64_t kLongestRun = 1 << 16, kMostIds = 1 << 22;

constexpr int32_t kWorldSet = 0;  // the process set of all ranks

// A rank's request under one name. The members of the process set must agree on everything except
// the first dimensions of gathered tensors, the splits of an alltoall and the weight.
struct Request {
  struct Tensor {
    DataType dtype = DataType::kFloat32;
    std::vector<int64_t> shape;
    bool on_device = false;  // ranks need not agree on which one
    bool operator==(const Tensor& other) const {
      return dtype == other.dtype && shape == other.shape && on_device == other.on_device;
    }
  };

  std::string name;
  int32_t process_set = kWorldSet;
  Collective kind = Collective::kAllreduce;
  ReduceOp op = ReduceOp::kSum;  // allreduce, reduce-scatter
  // broadcast: a rank of the job; remove_process_set: the id of the set; add_process_set: scope()
  int32_t root = 0;
  double prescale = 1.0;  // allreduce, reduce-scatter
  double postscale = 1.0;
  std::optional<double> weight;  // of a weighted Average; ranks may have different weights
  std::vector<Tensor> tensors;   // several: a group, all or nothing; none: a barrier, for example
  // Alltoall: rows for each member of the set, in rank order; their sum is the first dimension.
  std::vector<int64_t> splits;
  std::vector<int32_t> ranks;  // add_process_set

  bool operator==(const Request& other) const;
  SetScope scope() const { return static_cast<SetScope>(root); }  // REQUIRES: add_process_set
  bool of_members_alone() const {
    return kind == Collective::kAddProcessSet && scope() == SetScope::kMembersOnly;
  }
  // All tensors of a request are on the host, or all on a device.
  bool on_device() const { return !tensors.empty() && tensors[0].on_device; }
  // "allreduce 'layer1.weight'", "allgather 'x' of process set 2"
  std::string Title() const;
};

// The key of a request: names are scoped by process set.
std::string Key(int32_t process_set, const std::string& name);
// The same, into existing memory.
void SetKey(int32_t process_set, const char* name, std::string* key);
inline std::string Key(const Request& request) { return Key(request.process_set, request.name); }

// The splits of an alltoall, [sender * members + receiver], of these members.
struct Splits {
  std::vector<int> ranks;
  std::vector<int64_t> rows;
};

// In the reason of a rank that leaves because of an exception: the others have lost it.
inline constexpr char kWhileHandling[] = " while handling ";

// From a rank to the coordinator: the requests submitted since the last report.
struct Report {
  uint64_t applied = 0;          // sequence of the last agreement that this rank has applied
  std::vector<uint64_t> cached;  // requests known by their cache id
  std::vector<double> weights;   // of `cached`, up to the last that has a weight
  std::vector<Request> fresh;    // requests in full
  bool leaving = false;          // the rank is shutting down ...
  std::string reason;            // ... and its reason, if it gave one
  // A caller of this rank is blocked, and no answer has come for a while. Such a report has no
  // requests, and is repeated as long as this is the case.
  bool blocked = false;
};

// One item of an agreement. Every rank carries out the decisions of all agreements in the same
// order, which keeps the data plane free of deadlock.
struct Decision {
  enum class Kind : uint8_t {
    kRun = 0,       // carry out the request: `cache_id` if it is cached, else `name`
    kFail = 1,      // complete `name` with `status`, without running it
    kLeave = 2,     // a rank has shut down: fail everything pending with `status`, stop
    kAbort = 3,     // the engine cannot continue: fail everything pending with `status`
    kTimeline = 4,  // switch the timeline
  };
  // Not needed by a kRun of cached requests without weights, which is the usual decision.
  struct Details {
    std::string name;  // kRun of an uncached request, kFail
    Status status;     // kFail, kLeave, kAbort
    // kRun. Allgather: first dimensions, [tensor * members + member]; join: the last rank to join;
    // add_process_set: the set. Alltoall: the sum of all splits, then what each rank to which the
    // agreement is sent receives from each member, [receiver * members + sender].
    std::vector<int64_t> rows;
    // kRun of an alltoall, at the coordinator only: see Coordinator::PartFor.
    std::shared_ptr<const Splits> splits;
    std::vector<double> weights;  // kRun of a weighted average, as in ReduceSpec; else empty
    // kRun of an allreduce or of a new set: the request, for members that have joined and ranks
    // that do not report it, which therefore do not have it.
    std::optional<Request> neutral;
    bool timeline_on = false;  // kTimeline
    bool timeline_cycles = false;
  };

  Decision() = default;
  // One that ends `set`'s request of that name, or the job.
  Decision(Kind ending, Status why, int32_t set = kWorldSet, std::string name = "");

  // Whether it is about cached requests, as usual: it then has their ids, process set and weights.
  bool of_cached() const { return kind == Kind::kRun && details().name.empty(); }
  // Empty if none were set.
  const Details& details() const;
  bool has_details() const { return details_ != nullptr; }
  Details& set_details();  // REQUIRES: no copy of the decision is made while the result is in use
  // If both are kRuns of consecutive cached requests, adds those of `next` and returns true.
  bool Extend(const Decision& next);

  Kind kind = Kind::kRun;
  int32_t process_set = kWorldSet;  // of the request
  uint64_t cache_id = 0;  // kRun: nonzero if the request is, or (with a name) becomes, cached
  uint64_t count = 1;     // kRun: the number of cached requests, from `cache_id` on

 private:
  std::shared_ptr<Details> details_;  // shared with copies, until one of them changes
};

// From the coordinator to every rank.
struct Agreement {
  uint64_t sequence = 0;
  std::vector<Decision> decisions;
  std::vector<uint64_t> evicted;  // cache ids to forget after carrying out the decisions
};

}  // namespace hororing
