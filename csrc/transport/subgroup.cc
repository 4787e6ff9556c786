#include "transport/subgroup.h"

#include <algorithm>

namespace hororing {
namespace {

int PlaceOf(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

Subgroup::Subgroup(Transport& parent, std::vector<int> ranks)
    : parent_(parent), ranks_(std::move(ranks)), rank_(PlaceOf(parent.rank(), ranks_)) {}

}  // namespace hororing
