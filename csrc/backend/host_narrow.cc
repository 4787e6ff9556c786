// HostBackend's allreduce of float32 that travels between hosts in 16 bits: the fusion buffer holds
// what travels, which is rounded on its way in, summed in rank order in float32, rounded once more
// and widened on its way out.
//
// Ranks of one host, where there are several, send one another the same: rank order tells no hosts
// apart. Where they share memory, HierarchicalBackend has the batch, unless it must be
// reproducible.
#include <cstring>

#include "backend/common.h"
#include "backend/host_backend.h"

namespace hororing {

Status HostBackend::RunNarrow(const Batch& batch, const std::vector<const BatchEntry*>& entries,
                              WireType type, TimeNs deadline, TraceSink& trace) {
  ReduceBuffer buffer;
  buffer.spec = OnWire(batch.reduce, type);
  const size_t element = ElementSize(buffer.spec.dtype);
  size_t padded = 0;
  for (const BatchEntry* entry : entries) padded += RoundUp(entry->elements * element, kEntryAlign);
  {
    StageSpan span(trace, Stage::kPack, batch);
    std::byte* to = nullptr;
    HORORING_RETURN_IF_ERROR(Fuse(padded, &to));
    buffer.data = to;
    buffer.elements = padded / element;
    for (const BatchEntry* entry : entries) {
      const size_t bytes = entry->elements * element, room = RoundUp(bytes, kEntryAlign);
      Narrow(type, batch.reduce.prescale, to, entry->input, entry->elements);
      std::memset(to + bytes, 0, room - bytes);
      to += room;
    }
    span.End(batch.bytes());
  }
  {
    StageSpan span(trace, Stage::kReduce, batch);
    const FlatOptions options{options_.reproducible, Algorithm::kRing, WayToGather(), 0};
    HORORING_RETURN_IF_ERROR(
        Allreduce(transport_, buffer, options, receive_buffer_, deadline, &way_));
    span.End(batch.bytes());
  }
  StageSpan span(trace, Stage::kUnpack, batch);
  const std::byte* from = static_cast<const std::byte*>(buffer.data);
  for (const BatchEntry* entry : entries) {
    Widen(type, entry->output, from, entry->elements);
    from += RoundUp(entry->elements * element, kEntryAlign);
  }
  span.End(batch.bytes());
  narrow_bytes_ += static_cast<int64_t>(batch.bytes());
  return Status::Ok();
}

}  // namespace hororing
