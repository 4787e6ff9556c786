// Applier: carries out agreements on one rank, batch by batch in their order.
//
// Thread-safety: only for the loop (the holder of Engine::progress_mutex_). Apply runs batches.
//
// Invariants
//   1. Agreements are applied in the order of their sequence; those that do not concern this rank
//      are not sent to it.
//   2. Every rank runs the same batches in the same order. Requests that change which ranks take
//      part in batches keep their place among them.
//   3. A rank that has joined takes part with neutral entries: it contributes values that do not
//      change the result. They live until the agreement is applied.
//   4. After an error nothing more is applied.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/batch_runner.h"
#include "engine/shared.h"
#include "engine/timeline.h"
#include "negotiation/messages.h"
#include "transport/factory.h"

namespace hororing {

class Applier {
 public:
  // `group`: the ranks that get the same agreements as this one. All are borrowed.
  Applier(Shared& shared, World& world, const BackendOptions& options, BatchRunner& runner,
          Timeline& timeline, const std::vector<int>& group);

  // Returns why the loop must end, if it must: an error, or a decision of all ranks.
  Status Apply(const Agreement& agreement);
  // The sequence of the last agreement that was applied.
  uint64_t applied() const { return applied_; }
  // Whether all ranks have agreed to end, and whether they did because a rank left.
  bool end_agreed() const { return end_agreed_; }
  bool rank_left() const { return rank_left_; }

  // Fails a request whose process set was removed before it was reported.
  void FailRemoved(std::unique_ptr<TensorEntry> entry);

 private:
  Status Run();
  Status Carry(const Decision& decision, uint64_t id, TimeNs now);
  Status Agreed(const Decision& decision, uint64_t id, std::optional<Work>* agreed);
  std::vector<int64_t> OwnRows(const Decision& decision) const;
  void ClearReported(uint64_t id);
  Status NeutralEntry(const Request& request, TensorEntry** made);
  Status ToDevice(size_t bytes, ResultBuffer* memory);
  Status Settle(const Work& work);
  void AddSet(int32_t id, const Request& request);
  Status RemoveSet(int32_t id);
  void FailSettled(TensorEntry& entry, const Status& why);
  void Fail(const Decision& decision);
  void TraceNegotiation(const TensorEntry& entry);

  Shared& shared_;
  World& world_;
  const BackendOptions& backend_options_;
  BatchRunner& runner_;
  Timeline& timeline_;
  const std::vector<int>& group_;
  // Of the current agreement.
  std::vector<Work> work_;  // agreed on, and not run yet
  std::vector<std::unique_ptr<TensorEntry>> neutral_entries_;
  std::deque<std::vector<int64_t>> alltoall_rows_;
  TimeNs reported_ns_ = kForever;  // the earliest report of the requests of `work_`
  TimeNs ran_ns_ = 0;              // when batches last ended
  uint64_t applied_ = 0;
  uint64_t sets_added_ = 0;  // equal on all ranks
  bool end_agreed_ = false, rank_left_ = false;
};

}  // namespace hororing
