// PendingRuns: runs that some members of their process set have reported, and not yet all. Members
// need not report the same runs: what they have in common shows piece by piece, for what it costs
// to count a piece, however many requests are in it.
//
// Pure: time is an argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "negotiation/process_sets.h"
#include "negotiation/stretches.h"

namespace hororing {

class PendingRuns {
 public:
  // What the same members have reported.
  struct Piece {
    IdRun ids;
    const ProcessSet* set = nullptr;
    TimeNs since_ns = 0;  // the first report
    size_t count = 0;     // of members that have
    std::vector<char> reported;
  };

  // These members, by their places in `set`, report `ids`. What all members have reported now is no
  // longer pending, and appended to `complete`, in order.
  void Report(IdRun ids, const ProcessSet& set, const std::vector<size_t>& members, TimeNs now,
              std::vector<IdRun>* complete);
  bool empty() const { return pieces_.empty(); }
  size_t size() const { return pieces_.size(); }
  // Nothing is pending any more.
  std::vector<Piece> TakeAll() { return std::exchange(pieces_, {}); }

 private:
  size_t PieceAt(IdRun ids, const ProcessSet& set, TimeNs now);
  void Narrow(size_t place, IdRun ids);

  std::vector<Piece> pieces_;  // no id is in two
};

}  // namespace hororing
