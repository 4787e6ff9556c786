#include "transport/transport.h"

namespace hororing {

std::string FailureText(const std::string& reason, int blamed, int announcing_rank) {
  constexpr size_t kRoom = 200;
  std::string text = reason;
  if (blamed < 0 || blamed == announcing_rank) {
    text = "rank " + std::to_string(announcing_rank) + " failed: " + reason;
  }
  if (text.size() > kRoom) text.replace(kRoom - 3, std::string::npos, "...");
  return text;
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
