// ProcessSets: which ranks belong to which process set. A plain value: the coordinator has one, and
// every rank has one; all change alike, by agreements.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "negotiation/messages.h"

namespace hororing {

struct ProcessSet {
  std::vector<int> ranks;  // of the job, ascending
  bool internal = false;   // a layer's own: users may add the same ranks

  int size() const { return static_cast<int>(ranks.size()); }
  // The place of `rank` among them, or -1.
  int IndexOf(int rank) const;
};

class ProcessSets {
 public:
  // With kWorldSet of ranks 0 .. size-1.
  explicit ProcessSets(int size);

  // kInvalidArgument with a reason when no such set can be added: ranks that the job does not have
  // or that occur twice, or, unless it is internal, a set that is there already.
  Status Check(const std::vector<int32_t>& ranks, bool internal) const;
  // The lowest free id.
  int32_t NextId() const;
  // REQUIRES: Check(ranks, internal).ok().
  void Add(int32_t id, const std::vector<int32_t>& ranks, bool internal);
  void Remove(int32_t id) { sets_.erase(id); }
  // Null when there is none; valid until Remove.
  const ProcessSet* Find(int32_t id) const;
  // The same, for those who need it longer.
  std::shared_ptr<const ProcessSet> Share(int32_t id) const;
  size_t count() const { return sets_.size(); }

 private:
  const int size_;
  std::map<int32_t, std::shared_ptr<const ProcessSet>> sets_;
};

}  // namespace hororing
