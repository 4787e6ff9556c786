// An allreduce in rank order: the same bits whatever is fused; one rounding for 16-bit floats.
//
// Reduce-scatter in place (reduce_scatter.cc), then all-gather around a ring (allgather.cc):
//
//                rank 0          rank 1          rank 2
//   begin        a0 b0 c0        a1 b1 c1        a2 b2 c2
//   scatter      a  b0 c0        a1 b  c1        a2 b2 c        chunk r complete on rank r
//   gather       a  b  c         a  b  c         a  b  c
//
// Cost per rank: N-1 messages at once, N-1 in turn; 2(N-1)/N * S bytes each way, S combined.

#include <vector>

#include "collective/allreduce.h"
#include "collective/segments.h"

namespace hororing {
Status RankOrderAllreduce(Transport& transport, const ReduceBuffer& buffer, Scratch& scratch,
                          TimeNs deadline, const GatherOptions& options) {
  const std::vector<Span> chunks = buffer.layout.Parts(transport.size());
  ScatterBuffer scatter;
  scatter.input = buffer.data;
  for (const Span& chunk : chunks) scatter.parts.push_back(chunk.size);
  scatter.result = buffer.data + chunks[static_cast<size_t>(transport.rank())].begin;
  scatter.layout = buffer.layout;
  HORORING_RETURN_IF_ERROR(
      RankOrderReduceScatter(transport, scatter, scratch, deadline, options.segment_bytes));
  return GatherChunks(transport, buffer.data, chunks, options, deadline);
}

}  // namespace hororing
