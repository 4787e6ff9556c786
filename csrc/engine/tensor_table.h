// TensorTable: this rank's requests. It has one record for each name of a process set: the request
// between SUBMIT and COMPLETE, and the last agreed request of that name with its cache id, by which
// later reports and agreements refer to it. All ranks apply the same definitions and evictions in
// the same order, because agreements contain them. Only the coordinator decides what is evicted.
//
// A request with a cache id is persistent, as in MPI: once complete, it stays here, inactive, and
// may be started again, by its id or by submitting the same request.
//
// Callers see another id (hr_request.id): the cache id plus a number that differs between tables,
// so that an id of an earlier engine is never valid.
//
// Thread-safety: Submit and Start from any thread; everything else only for the holder of
// Engine::progress_mutex_ ("the loop" below). It owns active entries until Remove or Deactivate.
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

#include "engine/fusion_planner.h"
#include "engine/handle_table.h"
#include "negotiation/messages.h"

namespace hororing {

// A persistent request of one tensor in host memory that is to be started again.
struct Restart {
  uint64_t id = 0;
  std::optional<double> weight;
};

struct TensorEntry {
  Request request;
  std::vector<TensorView> views;  // one per tensor of the request
  int64_t handle = 0;
  TimeNs submitted_ns = 0;  // when the first request of the same report was submitted
  // On a device: the event after which each view may be used; empty: now.
  std::vector<std::shared_ptr<const DeviceEvent>> ready;
  bool active = false;  // in flight; GUARDED_BY the table's mutex
  // Only for the loop.
  uint64_t cache_id = 0;  // of `request`; 0: none is known
  TimeNs reported_ns = 0;
  const char* stage = "NEGOTIATE";  // for error texts: "during REDUCE"
  size_t unfinished = 0;            // tensors of this entry that no batch has reduced yet
  // Cached fusion descriptor of a single-tensor allreduce. Empty until first planned.
  std::optional<FusionItem> planned_as;
  std::vector<ResultBuffer> results;              // gathered tensors, or numbers such as row counts
  std::shared_ptr<const DeviceEvent> done_event;  // on a device: of the batch of its last tensor

  // Takes part for a joined rank: no caller has submitted it or waits for it.
  bool neutral() const { return handle == 0; }
};

// "allreduce 'layer1.weight' (REDUCE): text", with the code and rank of `status`.
Status WithStage(const TensorEntry& entry, const Status& status);

// Everything known under one key.
struct RequestRecord {
  std::unique_ptr<TensorEntry> entry;  // active, or inactive with this id; GUARDED_BY the mutex
  // The agreed request and its cache id (0: none). Constant while it has an id.
  uint64_t id = 0;
  Request agreed;                   // as this rank submitted it
  std::vector<int64_t> rows;        // as in Work
  TensorEntry* reported = nullptr;  // active, and reported by its id; only for the loop
  int64_t in_step = 0;              // in which it was last reported, if it reduces; for the loop
};

class TensorTable {
 public:
  explicit TensorTable(HandleTable* handles);

  // Takes `*entry`, or only its views and events if the record has an inactive entry for the same
  // request. Sets `handle`, and `id`: the caller's id for Start, 0: none yet. kDuplicateName while
  // a request of that name is active; kInvalidArgument during a join; after Close, its status.
  Status Submit(std::unique_ptr<TensorEntry>* entry, int64_t* handle, uint64_t* id);
  // Starts persistent requests of one tensor in host memory, which is now at `addresses`, in place.
  // Stops at the first that must be submitted: it is active, has no valid id or no memory, or has
  // gained or lost a weight. Returns the number started; each has a handle.
  size_t Start(const Restart* restarts, const uintptr_t* addresses, size_t count, int64_t* handles);

  // The requests added since the last TakeSubmitted.
  struct Submitted {
    size_t count = 0;
    TimeNs first_ns = 0;  // when the first of them was submitted
  };
  Submitted submitted();
  // Everything added since the last call, in order.
  void TakeSubmitted(std::vector<TensorEntry*>* submitted);
  // Active entries, by Key(process set, name). Null if there is none.
  TensorEntry* Find(const std::string& key);
  std::unique_ptr<TensorEntry> Remove(const std::string& key);
  // REQUIRES: they are complete, have a cache id, and have no results.
  void Deactivate(const std::vector<TensorEntry*>& entries);

  // The record with this cache id. Null: there is none.
  RequestRecord* FindRecord(uint64_t id) {
    const auto found = known_.find(id);
    return found == known_.end() ? nullptr : found->second;
  }
  uint64_t IdOf(const Request& request);  // The cache id of exactly this active request; 0: none.
  // Gives a request its cache id. A name has at most one; an older one is forgotten.
  void Define(uint64_t id, const Request& request, const std::vector<int64_t>& rows);
  void Forget(uint64_t id);  // Forgets a cache id, and its request if inactive.

  // Forgets a process set. Returns its active requests.
  std::vector<std::unique_ptr<TensorEntry>> RemoveSet(int32_t process_set);
  // Names the active requests in the first of these stages that has any: "'a', 'b' and 7 more";
  // empty if there are none. On other threads REQUIRES: the loop has been abandoned.
  std::string Titles(std::initializer_list<std::string_view> stages);
  // Whether a join is in flight. Any thread.
  bool joining() const { return joining_.load(std::memory_order_relaxed); }
  // Rejects every later request with `why`. Returns all active entries.
  std::vector<std::unique_ptr<TensorEntry>> Close(const Status& why);

 private:
  // Null: no entry is active.
  static TensorEntry* Active(const RequestRecord& record) {
    return record.entry != nullptr && record.entry->active ? record.entry.get() : nullptr;
  }
  // Both: REQUIRES mutex_.
  TensorEntry* Inactive(uint64_t id);
  void Activate(TensorEntry* entry);

  HandleTable* const handles_;
  const uint64_t first_id_;  // added to cache ids for callers; unique per table
  std::mutex mutex_;
  std::unordered_map<std::string, RequestRecord> records_;  // by Key; GUARDED_BY(mutex_)
  std::vector<TensorEntry*> submitted_;                     // GUARDED_BY(mutex_)
  std::string key_;                                     // scratch for look-ups; GUARDED_BY(mutex_)
  Status closed_;                                       // GUARDED_BY(mutex_)
  std::atomic<bool> joining_{false};                    // a join is active; written under mutex_
  std::unordered_map<uint64_t, RequestRecord*> known_;  // by cache id; changed under mutex_
};

}  // namespace hororing
