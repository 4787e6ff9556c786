// TensorTable: requests between SUBMIT and COMPLETE, by process set and name. The caller adds, the
// engine's thread takes and removes.
//
// Thread-safety: Add from any thread; everything else from the loop thread. Entries that
// Find returns belong to the loop thread until Remove.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/types.h"
#include "engine/handle_table.h"
#include "negotiation/messages.h"

namespace hororing {

struct TensorEntry {
  Request request;
  std::vector<TensorView> views;  // one per tensor of the request
  int64_t handle = 0;
  TimeNs submitted_ns = 0;
  std::shared_ptr<const DeviceEvent> ready;  // on a device: when the views may be used
  // Loop thread only.
  TimeNs reported_ns = 0;
  const char* stage = "NEGOTIATE";  // for error texts: "during REDUCE"
  size_t unfinished = 0;            // tensors of this entry that still have to go through a batch
  std::vector<GatheredTensor> results;        // memory of the core: what is gathered, numbers
  std::shared_ptr<const DeviceEvent> landed;  // on a device: of the batch of its last tensor

  // Takes part for a rank that has joined: nobody submitted it, nobody waits for it.
  bool stands_in() const { return handle == 0; }
};

// "allreduce 'layer1.weight' (REDUCE): text", with the code and rank of `status`.
Status During(const TensorEntry& entry, const Status& status);

class TensorTable {
 public:
  // kDuplicateName while a request of that name is in flight; kInvalidArgument while a join is;
  // the status of Close after it.
  Status Add(std::unique_ptr<TensorEntry> entry);

  // Everything added since the last call, in order.
  std::vector<TensorEntry*> TakeSubmitted();
  // By Key(process set, name).
  TensorEntry* Find(const std::string& key);
  std::unique_ptr<TensorEntry> Remove(const std::string& key);
  // All requests of a process set.
  std::vector<std::unique_ptr<TensorEntry>> RemoveSet(int32_t process_set);
  // Refuses every later Add with `why`, and hands out all that is left.
  std::vector<std::unique_ptr<TensorEntry>> Close(const Status& why);
  bool empty() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<TensorEntry>> entries_;  // GUARDED_BY(mutex_)
  std::vector<TensorEntry*> submitted_;                                    // GUARDED_BY(mutex_)
  Status closed_;                                                          // GUARDED_BY(mutex_)
  bool joining_ = false;  // a join is in entries_; GUARDED_BY(mutex_)
};

}  // namespace hororing
