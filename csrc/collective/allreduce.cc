// Chooses an allreduce algorithm: a pure function of (world size, layout, reproducible), which are
// equal on all ranks.
//
// The limit of recursive doubling: with alpha seconds per message and beta seconds per byte, it
// takes log2(N) (alpha + S beta), the others 2(N-1) (alpha + S/N beta). The times are equal at
//
//   S = alpha / beta * (2(N-1) - log2 N) / (log2 N - 2(N-1)/N)
//
// which is 8 alpha / beta for 4 ranks, 9 for 8, and grows from there. (For 2 ranks, only the
// arithmetic favours the others: they combine half as much.) alpha / beta is 8 to 25 KB for MPI
// over shared memory, and more over networks, so 64 KiB of partial results is safe everywhere.
// Several hosts measure alpha and beta at the start (collective/algorithm.h), and the caller passes
// the result.

#include "collective/allreduce.h"

namespace hororing {
namespace {

constexpr size_t kRecursiveDoublingBytes = 64 << 10;

}  // namespace

Status Allreduce(Transport& transport, const ReduceBuffer& buffer, const FlatOptions& options,
                 Scratch& scratch, TimeNs deadline, AlgorithmUsed* used) {
  const GatherOptions& gather = options.gather;
  // This excludes recursive doubling's fixed tree, too: whether a tensor is in a small batch is not
  // reproducible.
  if (options.reproducible) {
    *used = AlgorithmUsed::kRankOrder;
    return RankOrderAllreduce(transport, buffer, scratch, deadline, gather);
  }
  const bool small = options.algorithm == Algorithm::kAuto
                         ? buffer.layout.volume().partial <= kRecursiveDoublingBytes
                         : options.algorithm == Algorithm::kRecursiveDoubling;
  Transport& in_order = gather.ring != nullptr ? *gather.ring : transport;
  if (small) {
    *used = AlgorithmUsed::kRecursiveDoubling;
    return RecursiveDoublingAllreduce(in_order, buffer, scratch, deadline);
  }
  // The whole buffer: rank order has one message for all types and costs little more than a ring.
  if (buffer.layout.volume().wide) {
    *used = AlgorithmUsed::kRankOrder;
    return RankOrderAllreduce(transport, buffer, scratch, deadline, gather);
  }
  *used = AlgorithmUsed::kRing;
  return RingAllreduce(in_order, buffer, scratch, deadline, gather.segment_bytes);
}

}  // namespace hororing
