// SharedProcessSets: the process sets of the job as this rank knows them. The loop changes them;
// callers read them.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "negotiation/process_sets.h"

namespace hororing {

class SharedProcessSets {
 public:
  // Call it before anything else.
  void Reset(int rank, int size) {
    std::lock_guard<std::mutex> lock(mutex_);
    rank_ = rank;
    sets_.emplace(size);
    world_ = sets_->Share(kWorldSet);
  }
  void Add(int32_t id, const std::vector<int32_t>& ranks, bool internal) {
    std::lock_guard<std::mutex> lock(mutex_);
    sets_->Add(id, ranks, internal);
  }
  void Remove(int32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    sets_->Remove(id);
  }
  bool only_world() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return sets_->count() == 1;
  }
  // Null if there is none.
  std::shared_ptr<const ProcessSet> Find(int32_t id) const {
    if (id == kWorldSet) return world_;
    std::lock_guard<std::mutex> lock(mutex_);
    return sets_->Share(id);
  }
  // Whether the set exists and this rank is a member.
  bool Contains(int32_t id) const {
    if (id == kWorldSet) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    const ProcessSet* set = sets_->Find(id);
    return set != nullptr && set->IndexOf(rank_) >= 0;
  }

 private:
  std::shared_ptr<const ProcessSet> world_;  // constant from Reset on
  mutable std::mutex mutex_;
  int rank_ = 0;                     // GUARDED_BY(mutex_)
  std::optional<ProcessSets> sets_;  // GUARDED_BY(mutex_)
};

}  // namespace hororing
