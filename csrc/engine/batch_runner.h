// BatchRunner: carries out agreed requests: stages PLAN, PACK .. UNPACK (in the backend) and
// COMPLETE.
//
// Loop thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/stats.h"
#include "engine/tensor_table.h"
#include "trace/trace.h"

namespace hororing {

// A request that all ranks have agreed to carry out now.
struct Work {
  TensorEntry* entry = nullptr;
  std::vector<int64_t> rows;  // as in Decision::rows
};

class BatchRunner {
 public:
  struct Options {
    int size = 1;
    int64_t fusion_bytes = 0;
    TimeNs timeout_ns = kForever;  // for every wait on a peer
  };
  BatchRunner(const Options& options, std::vector<std::unique_ptr<Backend>> backends,
              TensorTable& tensors, HandleTable& handles, TraceSink& trace, Stats& stats);

  // Runs `work` in as few batches as the fusion threshold allows and completes the entries as
  // their last tensors are done. An error leaves the world broken; what is not complete then
  // stays in the table, with the stage that it had reached.
  Status Run(std::vector<Work> work);

 private:
  Status Allocate(Work& work);
  Status RunBatch(const Batch& batch, const std::vector<TensorEntry*>& entries);
  void Complete(TensorEntry* entry);

  const Options options_;
  const std::vector<std::unique_ptr<Backend>> backends_;
  TensorTable& tensors_;
  HandleTable& handles_;
  TraceSink& trace_;
  Stats& stats_;
};

// The name under which tensor `index` of a request appears in the timeline.
std::string TensorName(const Request& request, size_t index);

}  // namespace hororing
