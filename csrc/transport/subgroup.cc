#include "transport/subgroup.h"

#include <algorithm>

namespace hororing {
namespace {

int IndexOf(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

Subgroup::Subgroup(Transport& parent, std::vector<int> ranks)
    : parent_(parent), ranks_(std::move(ranks)), rank_(IndexOf(parent.rank(), ranks_)) {}

int Subgroup::RankOf(int parent_rank) const { return IndexOf(parent_rank, ranks_); }

}  // namespace hororing
