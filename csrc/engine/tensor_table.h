// TensorTable: what this rank knows of requests, one record for each name of a process set: the
// request between SUBMIT and COMPLETE, and what was agreed upon under that name before, with the id
// by which later reports and agreements name it. Every rank applies the same definitions and
// evictions in the same order, since they are part of agreements, and only the coordinator decides
// what is evicted.
//
// A request with an id is persistent, as MPI calls it: when it is complete it stays here, inactive,
// and may be started again, by its id or by a submission of the same.
//
// Thread-safety: Submit, Start and StartNext from any thread; everything else from the loop thread.
// Entries that are active belong to the loop thread until Remove or Deactivate.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
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
#include "engine/fusion_planner.h"
#include "engine/handle_table.h"
#include "negotiation/id_table.h"
#include "negotiation/messages.h"

namespace hororing {

// A persistent request of one tensor in host memory, which is to be started again.
struct Restart {
  uint64_t id = 0;
  std::optional<double> weight;
};

struct TensorEntry {
  Request request;
  std::vector<TensorView> views;  // one per tensor of the request
  int64_t handle = 0;
  TimeNs submitted_ns = 0;  // of the first that the loop takes with it
  // On a device: when each view may be used; empty: now.
  std::vector<std::shared_ptr<const DeviceEvent>> ready;
  bool active = false;  // in flight; GUARDED_BY the table's mutex
  // Loop thread only.
  uint64_t cache_id = 0;  // of `request`; 0: none, as far as is known
  TimeNs reported_ns = 0;
  const char* stage = "NEGOTIATE";  // for error texts: "during REDUCE"
  size_t unfinished = 0;            // tensors of this entry that still have to go through a batch
  // As which the tensor of an allreduce is planned; none: nobody has asked yet.
  std::optional<FusionItem> planned_as;
  std::vector<GatheredTensor> results;            // memory of the core: what is gathered, numbers
  std::shared_ptr<const DeviceEvent> done_event;  // on a device: of the batch of its last tensor

  // Takes part for a rank that has joined: nobody submitted it, nobody waits for it.
  bool stands_in() const { return handle == 0; }
};

// "allreduce 'layer1.weight' (REDUCE): text", with the code and rank of `status`.
Status During(const TensorEntry& entry, const Status& status);

// All that is known under one key.
struct RequestRecord {
  std::unique_ptr<TensorEntry> entry;  // active; or inactive, of this id; GUARDED_BY the mutex
  // What was agreed upon; id 0: nothing. Constant while there is an id.
  uint64_t id = 0;
  Request agreed;                   // as this rank submitted it
  std::vector<int64_t> rows;        // as in Decision::Details
  TensorEntry* reported = nullptr;  // active, and reported by the id; loop thread
};

class TensorTable {
 public:
  explicit TensorTable(HandleTable* handles);

  // Takes `*entry`; or only what is new of it, where the record has an inactive one that is the
  // same. It has a `handle` then. `id`: for Start, where there is one already; else 0.
  // kDuplicateName while a request of that name is active; kInvalidArgument while a join is;
  // the status of Close after it.
  Status Submit(std::unique_ptr<TensorEntry>* entry, int64_t* handle, uint64_t* id);
  // Starts persistent requests of one tensor in host memory, which is now, in place, at
  // `addresses`, up to the first that must be submitted: it is active, has no valid id, no memory,
  // or a weight and had none, or the reverse. Returns how many; each has a handle.
  size_t Start(const Restart* restarts, const uintptr_t* addresses, size_t count, int64_t* handles);

  // Starts the persistent request that has the id after the last one, if `same` says that it is
  // what the caller wants: steps repeat themselves.
  bool StartNext(const std::function<bool(const Request&)>& same, const void* input, void* output,
                 std::optional<double> weight, int64_t* handle);

  // What was added since the last TakeSubmitted.
  struct Submitted {
    size_t count = 0;
    TimeNs first_ns = 0;  // where there is any: when the first was
  };
  Submitted submitted();
  // Everything added since the last call, in order.
  void TakeSubmitted(std::vector<TensorEntry*>* submitted);
  // Those that are active, by Key(process set, name).
  TensorEntry* Find(const std::string& key);
  std::unique_ptr<TensorEntry> Remove(const std::string& key);
  // These are complete, have no results, and a cache_id.
  void Deactivate(const std::vector<TensorEntry*>& entries);

  // Null: there is none.
  RequestRecord* Known(uint64_t id) {
    RequestRecord** const found = known_.Find(id);
    return found == nullptr ? nullptr : *found;
  }
  // Of exactly this request, which is active; 0: none.
  uint64_t IdOf(const Request& request);
  // A name has at most one id: an older one is forgotten.
  void Define(uint64_t id, const Request& request, const std::vector<int64_t>& rows);
  // An inactive request is forgotten with its id.
  void Forget(uint64_t id);

  // All requests of a process set, of which nothing is known any more.
  std::vector<std::unique_ptr<TensorEntry>> RemoveSet(int32_t process_set);
  // What has reached the first of these stages that any has: "'a', 'b' and 7 more"; empty: none.
  // From other threads REQUIRES: the loop has been abandoned.
  std::string Titles(std::initializer_list<std::string_view> stages);
  // Whether a join is in flight. Any thread.
  bool joining() const { return joining_.load(std::memory_order_relaxed); }
  // Refuses every later request with `why`, and hands out all that are active.
  std::vector<std::unique_ptr<TensorEntry>> Close(const Status& why);

 private:
  // Null: none is.
  static TensorEntry* Active(const RequestRecord& record) {
    return record.entry != nullptr && record.entry->active ? record.entry.get() : nullptr;
  }
  // Both: REQUIRES mutex_.
  TensorEntry* Inactive(uint64_t id);
  void Activate(TensorEntry* entry);

  HandleTable* const handles_;
  const uint64_t first_id_;  // what callers have as ids counts from here, as no other table's does
  std::mutex mutex_;
  std::unordered_map<std::string, RequestRecord> records_;  // by Key; GUARDED_BY(mutex_)
  std::vector<TensorEntry*> submitted_;                     // GUARDED_BY(mutex_)
  std::string key_;                   // of what is looked for; GUARDED_BY(mutex_)
  uint64_t next_id_ = 0;              // most likely of the next request; GUARDED_BY(mutex_)
  Status closed_;                     // GUARDED_BY(mutex_)
  std::atomic<bool> joining_{false};  // a join is active; written under mutex_
  IdTable<RequestRecord*> known_;     // the loop thread changes it, under mutex_
};

}  // namespace hororing
