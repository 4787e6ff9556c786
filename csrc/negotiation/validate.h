// Validate: checks that the requests of all ranks under one name agree.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "negotiation/messages.h"

namespace hororing {

// Ok, or kMismatch with a text that names the tensor and lists the differing values grouped by
// rank, independent of the order in which the reports arrived:
//   allreduce 'layer3.weight': shapes differ: ranks 0,1,3: [256, 128]; rank 2:
//   [256, 64]. Every rank must pass ...
// The status blames the first rank that differs from the first of `ranks`.
// `requests[i]` is that of rank `ranks[i]`; all have the same name and process set.
Status Validate(const std::vector<const Request*>& requests, const std::vector<int>& ranks);

// Sets the weight of each contribution to a weighted average and their sum, as in ReduceSpec.
// `weights`: those of the members; the results are relative to the largest, so that no sum is
// infinite. kInvalidArgument if one is negative or not finite.
Status Weigh(const Request& request, const std::vector<int>& members, std::vector<double>* weights);

// "rank 2", "ranks 0,1,3", "ranks 0-2,5".
std::string RanksText(const std::vector<int>& ranks);

// "ranks 0,1: float32 [4]; rank 2: float64 [4]" with the groups in order of their first rank.
// `value(i)` is the value of rank `ranks[i]`.
std::string GroupedByRank(const std::vector<int>& ranks,
                          const std::function<std::string(size_t i)>& value);

}  // namespace hororing
