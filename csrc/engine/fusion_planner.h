// FusionPlanner: groups agreed tensors into batches that share one collective call.
//
// Pure: the result depends only on the arguments, so every rank that holds the same agreement
// computes the same batches. Knows nothing about memory, threads or time.
//
// Invariants
//   1. Every item is in exactly one batch. Within a batch, items that are reduced alike are
//      adjacent, in order, at the place of the first.
//   2. A batch has one (process set, collective, root, kind of memory). Its tensors may have
//      different dtypes, ops and factors, except for reduce-scatters and Adasum.
//   3. A batch has at most `fusion_bytes` bytes, padding included, unless it holds a single larger
//      tensor.
//   4. Batches are ordered by their first items.
//
// Cost: O(items x (keys + different reductions in a batch)).
// See docs/architecture.md, stage PLAN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/reduce.h"

namespace hororing {

// Two tensors may share a batch if their keys are equal.
struct FusionKey {
  Collective kind = Collective::kAllreduce;
  ReduceSpec only;  // reduce-scatter, Adasum: of all tensors
  int root = 0;
  int process_set = 0;
  bool on_device = false;

  bool operator==(const FusionKey& other) const {
    return kind == other.kind && only == other.only && root == other.root &&
           process_set == other.process_set && on_device == other.on_device;
  }
};

struct FusionItem {
  FusionKey key;
  ReduceSpec reduce;
  int64_t bytes = 0;
};

// Batches as lists of indices into `items`. fusion_bytes == 0: every item alone.
std::vector<std::vector<size_t>> PlanFusion(const std::vector<FusionItem>& items,
                                            int64_t fusion_bytes);

}  // namespace hororing
