// ReadyQueue: decisions on their way into an agreement, in the order in which they became ready.
//
// All of them go at once: ranks let requests come together before they report them, and every rank
// cuts the agreement into batches at the same threshold. Only while the tuner tries a lower one,
// which this rank alone knows, an agreement ends where a batch would.
//
// Sans-IO, as the coordinator that owns it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "negotiation/messages.h"
#include "schedule/step_watch.h"
#include "schedule/tuner.h"

namespace hororing {

class ReadyQueue {
 public:
  // Nothing is tuned without options.
  explicit ReadyQueue(const std::optional<Tuner::Options>& tune) {
    if (!tune) return;
    most_bytes_ = tune->initial.fusion_bytes;
    tuner_.emplace(*tune);
  }

  // `bytes`: of its tensors; they count where something is tuned.
  void Push(Decision decision, int64_t bytes = 0);
  // What goes into the next agreement; empty: nothing.
  std::vector<Decision> Take();
  bool empty() const { return ready_.empty(); }

  bool tunes() const { return tuner_.has_value(); }
  // The tuner learns from what this rank submits and carries out: allreduces among all ranks. What
  // other ranks must know of the next setting is pushed, ahead of the step that tries it.
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
  int64_t most_bytes_ = 0;  // of a batch, as all ranks know
  std::optional<Tuner> tuner_;
  StepWatch watch_;
};

}  // namespace hororing
