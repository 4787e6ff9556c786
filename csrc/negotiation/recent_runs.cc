#include "negotiation/recent_runs.h"

#include <algorithm>

namespace hororing {

void RecentRuns::Add(IdRun run) {
  rest_.clear();
  for (const IdRun& older : runs_) {
    const uint64_t before = std::min(older.end(), run.first);
    const uint64_t after = std::max(older.first, run.end());
    if (older.first < before) rest_.push_back({older.first, before - older.first});
    if (after < older.end()) rest_.push_back({after, older.end() - after});
  }
  rest_.push_back(run);
  runs_.swap(rest_);
}

}  // namespace hororing
