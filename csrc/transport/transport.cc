#include "transport/transport.h"

#include <utility>

#include "base/text.h"

namespace hororing {
void Transport::Revoke(const Status& why) {
  std::call_once(revoking_, [&] {
    revocation_ = why;
    revoked_.store(true, std::memory_order_release);
  });
  Wake();
}

TimeNs Transport::NoteCheck(TimeNs now) {
  // A running process never takes this long between two checks.
  constexpr TimeNs kStopped = 2 * kSecond;
  const TimeNs gap = now - std::exchange(checked_ns_, now);
  if (gap == now || gap <= kStopped) return 0;
  stopped_until_ns_ = now;
  return gap;
}

Status Announced(const Status& why, int announcing_rank) {
  constexpr size_t kRoom = 200;
  const int blamed = why.rank() < 0 ? announcing_rank : why.rank();
  std::string text = why.message();
  if (blamed == announcing_rank) {
    text = "rank " + std::to_string(announcing_rank) + " failed: " + text;
  }
  if (text.size() > kRoom) text = std::string(Shortened(text, kRoom - 3)) + "...";
  const bool of_engine = why.code() == Code::kStalled || why.code() == Code::kTransport ||
                         why.code() == Code::kInternal;
  return Status(of_engine ? why.code() : Code::kPeerLost, text, blamed);
}

Status SendReceive(Transport& transport, int to, const void* data, size_t bytes, int from,
                   void* buffer, size_t buffer_bytes, TimeNs deadline) {
  const Transport::Request sending = transport.Send(to, data, bytes);
  const Transport::Request receiving = transport.Receive(from, buffer, buffer_bytes);
  const Status received = transport.Wait(receiving, deadline);
  const Status sent = transport.Wait(sending, deadline);
  return received.ok() ? sent : received;
}

}  // namespace hororing
