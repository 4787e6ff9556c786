#include "backend/backend.h"

#include "backend/common.h"

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

void ReduceAlone(const Batch& batch, TraceSink& trace) {
  StageSpan span(trace, Stage::kReduce, batch);
  for (const BatchEntry& entry : batch.entries) {
    if (entry.elements == 0) continue;
    ReduceMany(entry.reduce, 1, entry.output, &entry.input, 1, entry.elements);
  }
}

}  // namespace hororing
