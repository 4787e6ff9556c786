#include "negotiation/pending_runs.h"

#include <algorithm>

namespace hororing {

void PendingRuns::Report(IdRun ids, const ProcessSet& set, const std::vector<size_t>& members,
                         TimeNs now, std::vector<IdRun>* complete) {
  while (ids.count > 0) {
    const size_t place = PieceAt(ids, set, now);
    Piece& piece = pieces_[place];
    for (const size_t member : members) {
      piece.count += piece.reported[member] ? 0 : 1;
      piece.reported[member] = 1;
    }
    ids.first += piece.ids.count;
    ids.count -= piece.ids.count;
    if (piece.count < piece.reported.size()) continue;
    complete->push_back(piece.ids);
    if (place + 1 < pieces_.size()) piece = std::move(pieces_.back());
    pieces_.pop_back();
  }
}

// The place of the piece that begins where `ids` do, and ends no later than they do.
size_t PendingRuns::PieceAt(IdRun ids, const ProcessSet& set, TimeNs now) {
  uint64_t end = ids.end();
  for (size_t place = 0; place < pieces_.size(); ++place) {
    const IdRun there = pieces_[place].ids;
    if (there.first > ids.first) {
      end = std::min(end, there.first);
    } else if (ids.first < there.end()) {
      Narrow(place, {ids.first, std::min(end, there.end()) - ids.first});
      return place;
    }
  }
  Piece fresh;
  fresh.ids = {ids.first, end - ids.first};
  fresh.set = &set;
  fresh.since_ns = now;
  fresh.reported.assign(set.ranks.size(), 0);
  pieces_.push_back(std::move(fresh));
  return pieces_.size() - 1;
}

// The piece at `place` is `ids` of it from now on; what is left on either side are others.
void PendingRuns::Narrow(size_t place, IdRun ids) {
  const IdRun whole = pieces_[place].ids;
  for (const IdRun rest :
       {IdRun{whole.first, ids.first - whole.first}, IdRun{ids.end(), whole.end() - ids.end()}}) {
    if (rest.count == 0) continue;
    Piece other = pieces_[place];
    other.ids = rest;
    pieces_.push_back(std::move(other));
  }
  pieces_[place].ids = ids;
}

}  // namespace hororing
