// RecentRuns: the order in which runs were agreed upon, for whoever wants to know at last which of
// their requests was agreed upon longest ago.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "negotiation/stretches.h"

namespace hororing {

class RecentRuns {
 public:
  void Add(IdRun run);
  size_t size() const { return runs_.size(); }
  // From the oldest to the latest, each id once; they are forgotten.
  std::vector<IdRun> TakeAll() { return std::exchange(runs_, {}); }

 private:
  std::vector<IdRun> runs_;  // no id is in two
  std::vector<IdRun> rest_;  // of Add; its memory is used again
};

}  // namespace hororing
