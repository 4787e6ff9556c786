// Validate: do the requests that all ranks made under one name fit together?
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "negotiation/messages.h"

namespace hororing {

// Ok, or kMismatch with a text that names the tensor and lists the differing values grouped by
// rank, whatever the order in which the reports arrived:
//   allreduce 'layer3.weight' (NEGOTIATE): shapes differ: ranks 0,1,3: [256, 128]; rank 2:
//   [256, 64]. Every rank must pass ...
// `requests[r]` is rank r's; all have the same name.
Status Validate(const std::vector<const Request*>& requests);

// "rank 2", "ranks 0,1,3", "ranks 0-2,5".
std::string RanksText(const std::vector<int>& ranks);

// "float32 [4]: ranks 0,1; float64 [4]: rank 2" with the groups in order of their lowest rank.
std::string GroupedByRank(int size, const std::function<std::string(int rank)>& value);

}  // namespace hororing
