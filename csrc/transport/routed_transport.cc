#include "transport/routed_transport.h"

#include "transport/polling.h"

namespace hororing {
RoutedTransport::RoutedTransport(std::unique_ptr<Transport> wire, ShmTransport& local,
                                 const std::vector<int>& ranks, TimeNs spin_ns)
    : wire_(std::move(wire)),
      local_(local),
      ranks_(ranks),
      local_rank_of_(static_cast<size_t>(wire_->size()), -1),
      spin_ns_(spin_ns) {
  for (size_t local_rank = 0; local_rank < ranks.size(); ++local_rank) {
    local_rank_of_[static_cast<size_t>(ranks[local_rank])] = static_cast<int>(local_rank);
  }
}

// A neighbour may need the rest of a message before it can take part in the awaited transfer.
Status RoutedTransport::Wait(Request request, TimeNs deadline) {
  Backoff backoff(spin_ns_, kLongestDataSleep);
  while (!MoveLocal() && !wire_->Done(request) && wire_->CheckPeers().ok()) {
    if (!backoff.Pause(local_, local_.Epoch(), false, deadline)) break;
  }
  return wire_->Wait(request, deadline);
}

bool RoutedTransport::Done(Request request) {
  MoveLocal();
  return wire_->Done(request);
}

void RoutedTransport::Post(int peer, std::string message) {
  const int local_rank = local_rank_of_[static_cast<size_t>(peer)];
  if (local_rank >= 0) {
    local_.Post(local_rank, std::move(message));
  } else {
    wire_->Post(peer, std::move(message));
  }
}

// Takes what has arrived; true if there is anything.
bool RoutedTransport::Fetch() {
  int peer = 0;
  std::string message;
  while (local_.Poll(&peer, &message)) {
    inbox_.emplace_back(ranks_[static_cast<size_t>(peer)], std::move(message));
  }
  while (wire_->Poll(&peer, &message)) inbox_.emplace_back(peer, std::move(message));
  return !inbox_.empty();
}

bool RoutedTransport::Poll(int* peer, std::string* message) {
  if (inbox_.empty()) Fetch();
  return inbox_.Take(peer, message);
}

bool RoutedTransport::Progress() {
  MoveLocal();
  return wire_->Progress();
}

void RoutedTransport::Sleep(TimeNs deadline) {
  Backoff backoff(spin_ns_, kLongestIdleSleep);
  for (;;) {
    const uint32_t epoch = local_.Epoch();
    const bool moved = Progress();
    if (Fetch() || epoch != last_sleep_epoch_ || revoked()) {
      last_sleep_epoch_ = epoch;
      return;
    }
    if (!backoff.Pause(local_, epoch, moved, deadline)) return;
  }
}

void RoutedTransport::Revoke(const Status& why) {
  wire_->Revoke(why);
  local_.Revoke(why);
  Transport::Revoke(why);
}

Status RoutedTransport::CheckPeers() {
  MoveLocal();
  return wire_->CheckPeers();
}

bool RoutedTransport::Flush(TimeNs deadline) {
  const bool sent = wire_->Flush(deadline);
  return local_.Flush(deadline) && sent;
}

}  // namespace hororing
