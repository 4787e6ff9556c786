// ReadyQueue: decisions that wait for the next agreement, in the order in which they became ready.
//
// All of them are sent at once: ranks collect requests before they report them, and every rank cuts
// the agreement into batches at the same threshold. While the tuner tries a lower threshold, which
// only this rank knows, an agreement ends where a batch would end.
//
// Sans-IO, like the coordinator that owns it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "negotiation/messages.h"
#include "negotiation/step_watch.h"
#include "negotiation/tuner.h"

namespace hororing {

class ReadyQueue {
 public:
  // Without options nothing is tuned.
  explicit ReadyQueue(const std::optional<Tuner::Options>& tune) {
    if (!tune) return;
    max_bytes_ = tune->initial.fusion_bytes;
    tuner_.emplace(*tune);
  }

  // `bytes`: of its tensors; used only by the tuner.
  void Push(Decision decision, int64_t bytes = 0);
  // Removes and returns the decisions for the next agreement; may be empty.
  std::vector<Decision> Take();
  bool empty() const { return ready_.empty(); }

  // The tuner learns from the allreduces among all ranks that this rank submits and carries out. It
  // queues the next setting for the other ranks, ahead of the step that tries it.
  void Submitted(const Request& request, uint64_t id, TimeNs when);  // id 0: it is not cached
  void Ran(int64_t bytes, TimeNs end) { watch_.Ran(bytes, end); }
  Tuner* tuner() { return tuner_ ? &*tuner_ : nullptr; }  // null: nothing is tuned

 private:
  struct Item {
    Decision decision;
    int64_t bytes;
  };
  size_t CountToTake() const;

  std::vector<Item> ready_;
  int64_t max_bytes_ = 0;  // of a batch, known to all ranks
  std::optional<Tuner> tuner_;
  StepWatch watch_;
};

}  // namespace hororing
