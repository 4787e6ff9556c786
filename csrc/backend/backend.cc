#include "backend/backend.h"

#include "backend/common.h"
#include "collective/segments.h"

namespace hororing {
Members Members::World(int size) {
  Members world;
  for (int rank = 0; rank < size; ++rank) world.ranks.push_back(rank);
  return world;
}

size_t Batch::bytes() const {
  size_t bytes = 0;
  for (const BatchEntry& entry : entries) bytes += entry.bytes();
  return bytes;
}

std::string TraceLabel(const Batch& batch) {
  const size_t count = batch.entries.size();
  return count == 1 ? batch.entries[0].name : std::to_string(count) + " tensors";
}

Status CheckSizes(const Batch& batch, const BatchEntry& entry, size_t ranks, size_t rank) {
  const std::vector<size_t>&to = entry.send_bytes, &from = entry.receive_bytes;
  const bool gathers = batch.kind == Collective::kAllgather;
  const bool fit =
      from.size() == ranks &&
      (gathers ? from[rank] == entry.bytes() : to.size() == ranks && Sum(to) == entry.bytes());
  if (fit) return Status::Ok();
  return Status(Code::kInternal, std::string(Name(batch.kind)) + " of '" + entry.name +
                                     "': the agreed sizes do not fit this rank's tensor");
}

void ReduceAlone(const Batch& batch, TraceSink& trace) {
  StageSpan span(trace, Stage::kReduce, batch);
  for (const BatchEntry& entry : batch.entries) {
    if (entry.elements == 0) continue;
    ReduceMany(entry.reduce, 1, entry.output, &entry.input, 1, entry.elements);
  }
}

}  // namespace hororing
