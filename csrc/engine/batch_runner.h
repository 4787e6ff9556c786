// BatchRunner: carries out agreed requests: PLAN, PACK .. UNPACK (in the backend) and COMPLETE.
//
// Thread-safety: only for the holder of Engine::progress_mutex_.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "engine/fusion_planner.h"
#include "engine/shared.h"
#include "transport/transport.h"

namespace hororing {

// A request that all its ranks have agreed to carry out now.
struct Work {
  TensorEntry* entry = nullptr;
  // As in Decision::Details. Alltoall: the sum of all splits, then the rows from each member.
  const std::vector<int64_t>* rows = nullptr;
  const std::vector<double>* weights = nullptr;  // likewise; null: none
};

// Runs the batches of one process set that this rank is a member of.
struct Communicator {
  std::vector<int> ranks;                // members, by their ranks in the job
  std::unique_ptr<Transport> transport;  // null: the engine's own
  std::vector<std::unique_ptr<Backend>> backends;
  int rank = 0;            // this rank's index in `ranks`
  int64_t allreduces = 0;  // batches of the host, of which every n-th is verified

  int size() const { return static_cast<int>(ranks.size()); }
};

class BatchRunner {
 public:
  BatchRunner(Shared& shared, Communicator world);
  ~BatchRunner() { Abort(); }
  BatchRunner(const BatchRunner&) = delete;

  void AddSet(int32_t id, Communicator communicator) {
    communicators_[id] = std::move(communicator);
  }
  // Called on all its ranks. After an error its pending GPU operations are lost, no others.
  Status RemoveSet(int32_t id);

  // Returns the error of a GPU batch that has failed since it was started, if any.
  Status CheckDevices();
  // Aborts pending GPU operations, without the other ranks. Calls NCCL, not the driver, in which
  // other threads may be waiting for the kernels that this ends.
  void Abort();
  void FreeBackends();          // Frees all backends, which can no longer be used.
  void Leave(TimeNs deadline);  // Clean shutdown of all ranks: waits for devices, until `deadline`.

  // Runs `work` in as few batches as the fusion threshold allows and completes the entries as their
  // last tensors are done. An error leaves the world broken; incomplete entries then stay in the
  // table, with their latest stage.
  Status Run(const std::vector<Work>& work);
  // Completes an entry whose tensors are all done, or that has none.
  void Complete(TensorEntry* entry);

 private:
  // One tensor of one request, on its way into a batch.
  struct Item {
    TensorEntry* entry;
    size_t index;
    const std::vector<int64_t>* rows;  // of the request
  };
  Status Allocate(const Work& work);
  int64_t Fill(const std::vector<size_t>& items, const Communicator& communicator);
  Status RunBatch(Communicator& communicator, int64_t bytes);
  // Notes which results are not finite, and what is known of inputs, for `finite_watch`.
  void NoteNonFinite(const Communicator& communicator, const Findings& findings);
  Status Verify(Communicator& communicator, TimeNs deadline);
  void Complete();

  Shared& shared_;
  std::map<int32_t, Communicator> communicators_;  // by process set
  // Scratch of Run; members so that their memory is reused.
  std::vector<Item> items_;
  std::vector<FusionItem> described_;
  Batch batch_;
  std::vector<TensorEntry*> entries_;
  // Entries whose last tensors are in the batch: persistent ones, which become inactive
  // (`complete_` has their handles), and the rest.
  std::vector<TensorEntry*> persistent_, ending_;
  std::vector<int64_t> complete_;
};

// The name under which tensor `index` of a request appears in the timeline.
std::string TensorName(const Request& request, size_t index);

}  // namespace hororing
