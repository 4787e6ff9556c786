// Allreduce by recursive doubling: in round k every rank exchanges its result so far with the rank
// whose number differs in bit k. log2(N) rounds suffice. The fastest one for small buffers.
//
//   N = 4      rank 0    rank 1    rank 2    rank 3
//   round 0    01        01        23        23         partner = rank XOR 1
//   round 1    0123      0123      0123      0123       partner = rank XOR 2
//
// Any N: let P be the largest power of two that is at most N, and E = N - P. The first 2E ranks
// form pairs (2i, 2i+1); the odd rank hands its data to the even one, waits, and receives the
// result. In the rounds, the even rank of pair i has number i, and rank r >= 2E has number r - E:
//
//   number(r) = r / 2     for r < 2E, even       rank(i) = 2i       for i < E
//             = r - E     for r >= 2E                    = i + E    for i >= E
//
// A number stands for neighbouring ranks, and the side with the lower numbers is always the first
// operand. So the result is one fixed tree over the ranks in order, bitwise the same on all ranks.
// 16-bit floats and integer averages are sent as wide partial results (base/reduce.h) and rounded
// once, at the end.
//
// Cost per rank: log2(P) messages (+ 2 if N is not a power of two), S log2(P) bytes sent and
// combined, where S counts partial results.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66,
// doi:10.1177/1094342005051521.

#include <string>

#include "collective/allreduce.h"

namespace hororing {
namespace {

constexpr size_t kAlign = 64;

Status SendTo(Transport& transport, int peer, const void* data, size_t bytes, TimeNs deadline) {
  return transport.Wait(transport.Send(peer, data, bytes), deadline);
}
Status ReceiveFrom(Transport& transport, int peer, void* data, size_t bytes, TimeNs deadline) {
  return transport.Wait(transport.Receive(peer, data, bytes), deadline);
}

}  // namespace

Status RecursiveDoublingAllreduce(Transport& transport, const ReduceBuffer& buffer,
                                  Scratch& scratch, TimeNs deadline) {
  const int size = transport.size(), rank = transport.rank();
  const Layout& layout = buffer.layout;
  if (size == 1 || layout.bytes() == 0) {
    ReduceAlone(layout, buffer.data, buffer.data);
    return Status::Ok();
  }
  const Span all{0, layout.bytes()};
  const size_t bytes = layout.volume().partial;
  const size_t room = RoundUp(bytes, kAlign);
  std::byte* sum = static_cast<std::byte*>(scratch.Reserve(2 * room));
  if (sum == nullptr) {
    return Status(Code::kInternal,
                  "recursive doubling allreduce: no memory for partial results of " +
                      std::to_string(2 * room) + " bytes");
  }
  std::byte* other = sum + room;

  int power = 1;
  while (power <= size / 2) power *= 2;
  const int extra = size - power;
  const bool paired = rank < 2 * extra;

  StartPartial(layout, all, sum, buffer.data);
  if (paired && rank % 2 == 1) {
    HORORING_RETURN_IF_ERROR(SendTo(transport, rank - 1, sum, bytes, deadline));
    // The even rank has already rounded the result.
    return ReceiveFrom(transport, rank - 1, buffer.data, all.size, deadline);
  }
  if (paired) {
    HORORING_RETURN_IF_ERROR(ReceiveFrom(transport, rank + 1, other, bytes, deadline));
    CombinePartials(layout, all, sum, sum, other);
  }
  const int number = paired ? rank / 2 : rank - extra;
  for (int bit = 1; bit < power; bit *= 2) {
    const int partner_number = number ^ bit;
    const int partner = partner_number < extra ? 2 * partner_number : partner_number + extra;
    HORORING_RETURN_IF_ERROR(
        SendReceive(transport, partner, sum, bytes, partner, other, bytes, deadline));
    const bool first = partner_number > number;
    CombinePartials(layout, all, sum, first ? sum : other, first ? other : sum);
  }
  FinishPartial(layout, all, size, buffer.data, sum);
  if (!paired) return Status::Ok();
  return SendTo(transport, rank + 1, buffer.data, all.size, deadline);
}

}  // namespace hororing
