// BucketPlan: into which buckets the gradients of a step go, so that the last one is reduced the
// earliest (merged-gradient wait-free backpropagation: S. Shi, X. Chu, B. Li, "MG-WFBP", INFOCOM
// 2019, doi:10.1109/INFOCOM.2019.8737367; their model, an exact algorithm in place of theirs).
//
// Model: tensor i is ready at R[i], in that order; a bucket starts when its last tensor is ready
// and the bucket before it is done; a bucket of M bytes takes T(M), whatever function that is.
// With C[i] = bytes of the first i tensors, the earliest end of the first i tensors is
//
//   F[0] = 0,   F[i] = min over j < i of  max(F[j], R[i-1]) + T(C[i] - C[j])
//
// which is exact because an end never comes earlier when an end before it comes later. The
// published algorithm decides greedily whether to merge a tensor into the next one, and can miss
// the optimum by a third; see docs/scheduling.md.
//
// Pure; knows nothing about clocks, ranks or memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hororing {

struct PlanItem {
  double ready_s = 0;
  int64_t bytes = 0;
  bool starts = false;  // a bucket, in any case: what was before it must not wait for it
};

// Seconds that a bucket of so many bytes takes.
using BucketCost = std::function<double(int64_t bytes)>;

// The ends of the buckets: bucket k holds items[ends[k - 1] .. ends[k]), and the last end is
// items.size(). No bucket is larger than `limit_bytes`, unless it holds a single tensor. Among
// plans that end equally early, later buckets are as large as they can be.
// REQUIRES: ready times do not decrease. Cost: O(items^2) calls of `cost`.
std::vector<size_t> PlanBuckets(const std::vector<PlanItem>& items, const BucketCost& cost,
                                int64_t limit_bytes);

// When the last bucket of a plan is done, in the same model.
double PlanEnd(const std::vector<PlanItem>& items, const std::vector<size_t>& ends,
               const BucketCost& cost);

}  // namespace hororing
