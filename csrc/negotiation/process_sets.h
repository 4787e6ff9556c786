// ProcessSets: which ranks belong to which process set, on every rank, changed by agreements alike.
//
// Thread-safety: one thread at a time (the loop), except for Share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "negotiation/messages.h"

namespace hororing {

struct ProcessSet {
  std::vector<int> ranks;  // of the job, ascending
  bool internal = false;   // created by hororing itself: users may add the same ranks

  int size() const { return static_cast<int>(ranks.size()); }
  // The index of `rank` among them, or -1.
  int IndexOf(int rank) const {
    // Usually the set has all ranks.
    if (rank >= 0 && rank < size() && ranks[static_cast<size_t>(rank)] == rank) return rank;
    return Search(rank);
  }
  int Search(int rank) const;
};

// Some of the members of a process set, by their indices in it.
class MemberSet {
 public:
  void Clear(size_t size) {
    added_.assign(size, 0);
    count_ = 0;
  }
  bool Has(size_t index) const { return added_[index] != 0; }
  void Add(size_t index) { count_ += std::exchange(added_[index], 1) == 0 ? 1 : 0; }
  size_t size() const { return added_.size(); }  // of the process set
  size_t count() const { return count_; }        // that were added
  bool all() const { return count_ == size(); }

 private:
  std::vector<char> added_;
  size_t count_ = 0;
};

class ProcessSets {
 public:
  explicit ProcessSets(int size);  // Has kWorldSet, of ranks 0 .. size-1.

  // kInvalidArgument with a reason if the set cannot be added: a rank is not in the job or occurs
  // twice, or the set already exists and is not internal.
  Status Check(const std::vector<int32_t>& ranks, bool internal) const;
  int32_t NextId() const;  // The lowest free id.
  // REQUIRES: Check(ranks, internal).ok().
  void Add(int32_t id, const std::vector<int32_t>& ranks, bool internal);
  void Remove(int32_t id);
  const ProcessSet* Find(int32_t id) const;  // Null if there is none; valid until Remove.
  // The same from any thread, and for as long as it is needed.
  std::shared_ptr<const ProcessSet> Share(int32_t id) const;
  // Whether `rank` is a member of an existing set.
  bool Contains(int32_t id, int rank) const {
    if (id == kWorldSet) return true;
    const ProcessSet* const set = Find(id);
    return set != nullptr && set->IndexOf(rank) >= 0;
  }
  bool only_world() const { return sets_.size() == 1; }

 private:
  const int size_;
  std::shared_ptr<const ProcessSet> world_;  // constant
  mutable std::mutex mutex_;                 // held during changes, and for Share
  std::map<int32_t, std::shared_ptr<const ProcessSet>> sets_;
};

}  // namespace hororing
