// BatchRunner: carries out agreed requests: stages PLAN, PACK .. UNPACK (in the backend) and
// COMPLETE.
//
// Loop thread only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/fusion_planner.h"
#include "engine/shared.h"
#include "transport/transport.h"

namespace hororing {

// A request that all its ranks have agreed to carry out now.
struct Work {
  TensorEntry* entry = nullptr;
  const std::vector<int64_t>* rows = nullptr;    // as in Decision::Details
  const std::vector<double>* weights = nullptr;  // likewise; null: none
};

// What runs the batches of one process set that this rank is a member of.
struct Communicator {
  std::vector<int> ranks;                // of the job
  std::unique_ptr<Transport> transport;  // null: the engine's own
  std::vector<std::unique_ptr<Backend>> backends;
  int rank = 0;  // of this rank among them

  int size() const { return static_cast<int>(ranks.size()); }
};

class BatchRunner {
 public:
  BatchRunner(Shared& shared, Communicator world);
  // Ends what is left on devices, without the other ranks.
  ~BatchRunner();
  BatchRunner(const BatchRunner&) = delete;
  BatchRunner& operator=(const BatchRunner&) = delete;

  void AddSet(int32_t id, Communicator communicator) {
    communicators_[id] = std::move(communicator);
  }
  // On all its ranks. An error: what was under way there on devices is lost; the others go on.
  Status RemoveSet(int32_t id);

  // What has gone wrong on devices since, if anything has.
  Status LookAtDevices();
  // All ranks end in peace: waits for devices, until `deadline`.
  void Leave(TimeNs deadline);

  // An allreduce batch of all ranks that was carried out.
  struct Ran {
    int64_t bytes;
    TimeNs end;
  };
  // Those since the last call, on rank 0 where it tunes.
  std::vector<Ran> TakeRan() { return std::exchange(ran_, {}); }

  // Runs `work` in as few batches as the fusion threshold allows and completes the entries as
  // their last tensors are done. An error leaves the world broken; what is not complete then
  // stays in the table, with the stage that it had reached.
  Status Run(const std::vector<Work>& work);
  // Of an entry that has no tensors, or none left to do.
  void Complete(TensorEntry* entry);

 private:
  // One tensor of one request, on its way into a batch.
  struct Item {
    TensorEntry* entry;
    size_t index;
    const std::vector<int64_t>* rows;  // of the request
  };
  Status Allocate(const Work& work);
  void Fill(const std::vector<size_t>& items, const Communicator& communicator);
  Status RunBatch(int32_t process_set, Communicator& communicator);
  void Begin();
  void Complete();

  Shared& shared_;
  const bool records_;  // for TakeRan
  std::vector<Ran> ran_;
  std::map<int32_t, Communicator> communicators_;  // by process set
  // Of Run; their memory is used again.
  std::vector<Item> items_;
  std::vector<FusionItem> described_;
  Batch batch_;
  std::vector<TensorEntry*> entries_;
  // Whose last tensors are in the batch: those that will be inactive, their handles, and all
  // others.
  std::vector<TensorEntry*> persistent_, ending_;
  std::vector<int64_t> complete_;
};

// The name under which tensor `index` of a request appears in the timeline.
std::string TensorName(const Request& request, size_t index);

}  // namespace hororing
