// TensorTable: what this rank knows of requests. Those between SUBMIT and COMPLETE, by process set
// and name: the caller adds, the engine's thread takes and removes. And by their ids those that
// were agreed upon before, which later reports and agreements name so: every rank applies the same
// definitions and evictions in the same order, since they are part of agreements, and only the
// coordinator decides what is evicted.
//
// An entry whose request has an id rests here when it is complete: the next request of that name is
// the same, mostly, and then costs no memory to be made.
//
// Thread-safety: Add and AddAgain from any thread; everything else from the loop thread. Entries
// that are in flight belong to the loop thread until Remove or Rest.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/types.h"
#include "engine/handle_table.h"
#include "negotiation/id_table.h"
#include "negotiation/messages.h"
#include "schedule/fusion_planner.h"

namespace hororing {

struct TensorEntry {
  Request request;
  std::vector<TensorView> views;  // one per tensor of the request
  int64_t handle = 0;
  TimeNs submitted_ns = 0;  // for the tuner
  // On a device: when each view may be used; empty: now.
  std::vector<std::shared_ptr<const DeviceEvent>> ready;
  bool resting = false;  // not in flight; GUARDED_BY the table's mutex
  SpareHandle next;      // where it rests: of the next request; GUARDED_BY the table's mutex
  size_t place = 0;      // in the table's order, if it is there; GUARDED_BY the table's mutex
  // Loop thread only.
  uint64_t cache_id = 0;  // of `request`; 0: none, as far as is known
  TimeNs reported_ns = 0;
  const char* stage = "NEGOTIATE";  // for error texts: "during REDUCE"
  size_t unfinished = 0;            // tensors of this entry that still have to go through a batch
  // As which the tensor of an allreduce is planned; none: nobody has asked yet.
  std::optional<FusionItem> planned_as;
  std::vector<GatheredTensor> results;        // memory of the core: what is gathered, numbers
  std::shared_ptr<const DeviceEvent> landed;  // on a device: of the batch of its last tensor

  // Takes part for a rank that has joined: nobody submitted it, nobody waits for it.
  bool stands_in() const { return handle == 0; }
};

// "allreduce 'layer1.weight' (REDUCE): text", with the code and rank of `status`.
Status During(const TensorEntry& entry, const Status& status);

// A request that was agreed upon before.
struct KnownRequest {
  Request request;                  // as this rank submitted it
  std::vector<int64_t> rows;        // as in Decision::Details
  TensorEntry* reported = nullptr;  // in flight, and reported by the id
};

// An allreduce of one tensor in host memory, as its caller knows it before there is an entry.
struct OneTensor {
  const char* name;
  int32_t process_set;
  ReduceOp op;
  double prescale, postscale;
  DataType dtype;
  const int64_t* shape;
  size_t dimensions;
  const void* input;
  void* output;
};

class TensorTable {
 public:
  // kDuplicateName while a request of that name is in flight; kInvalidArgument while a join is;
  // the status of Close after it.
  Status Add(std::unique_ptr<TensorEntry> entry);

  // Re-submits tensors whose entries are cached, stopping at the first that has none or has
  // changed. Returns how many, and fills as many `handles`. `ring`: whether the caller is going to
  // wake the loop. If it was true and is false on return, an earlier submitter has already woken
  // the loop for this load, and the caller need not.
  size_t AddAgain(const OneTensor* tensors, size_t count, int64_t* handles, TimeNs now, bool* ring);

  // What was added since the last TakeSubmitted.
  struct Submitted {
    size_t count = 0;
    TimeNs first_ns = 0;  // where there is any: when the first was
  };
  Submitted submitted();
  // Everything added since the last call, in order.
  void TakeSubmitted(std::vector<TensorEntry*>* submitted);
  // Those in flight, by Key(process set, name).
  TensorEntry* Find(const std::string& key);
  std::unique_ptr<TensorEntry> Remove(const std::string& key);
  // These are complete, have no results, and a cache_id. `handles`: for their next requests.
  void Rest(const std::vector<TensorEntry*>& entries, HandleTable* handles);

  // Null: there is none.
  KnownRequest* Known(uint64_t id) { return known_.Find(id); }
  // Of exactly this request, which is in flight; 0: none.
  uint64_t IdOf(const Request& request);
  // A name has at most one id: an older one is forgotten.
  void Define(uint64_t id, const Request& request, const std::vector<int64_t>& rows);
  // Nothing of it rests here then.
  void Forget(uint64_t id);

  // All requests of a process set, of which nothing is known any more.
  std::vector<std::unique_ptr<TensorEntry>> RemoveSet(int32_t process_set);
  // What has reached the first of these stages that any has: "'a', 'b' and 7 more"; empty: none.
  // From other threads REQUIRES: the loop has been given up.
  std::string Titles(std::initializer_list<std::string_view> stages);
  // Whether a join is in flight. Any thread.
  bool joining() const { return joining_.load(std::memory_order_relaxed); }
  // Refuses every later Add with `why`, and hands out all that is left.
  std::vector<std::unique_ptr<TensorEntry>> Close(const Status& why);

 private:
  // All that is known by one key. Not both are missing.
  struct Named {
    std::unique_ptr<TensorEntry> entry;  // in flight, or resting
    uint64_t id = 0;
  };
  // Null: none is.
  static TensorEntry* InFlight(const Named& named) {
    return named.entry == nullptr || named.entry->resting ? nullptr : named.entry.get();
  }

  // All of these: REQUIRES mutex_.
  TensorEntry* FindAgain(const OneTensor& tensor);  // null: none of that name
  bool InOrder(const TensorEntry& entry) const;
  void Going(const TensorEntry& entry);  // is about to be erased

  std::mutex mutex_;
  std::unordered_map<std::string, Named> named_;  // by Key; GUARDED_BY(mutex_)
  std::vector<TensorEntry*> submitted_;           // GUARDED_BY(mutex_)
  TimeNs first_submitted_ns_ = 0;                 // GUARDED_BY(mutex_)
  bool rung_ = false;                             // for what is in submitted_; GUARDED_BY(mutex_)
  std::string key_;                               // of what is looked for; GUARDED_BY(mutex_)
  std::vector<int64_t> next_handles_;  // of Rest; its memory is used again; GUARDED_BY(mutex_)
  // Entries as they were added again, and the place in there of the one that comes next: steps
  // repeat themselves, and then none is looked for by its name. Every entry that is in here is in
  // named_, once. GUARDED_BY(mutex_)
  std::vector<TensorEntry*> order_;
  size_t next_ = 0;
  Status closed_;                     // GUARDED_BY(mutex_)
  std::atomic<bool> joining_{false};  // a join is in named_; written under mutex_
  IdTable<KnownRequest> known_;       // loop thread
};

}  // namespace hororing
