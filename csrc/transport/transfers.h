// A transport's record of the data transfers with a peer, and of the messages that have arrived.
// Transfers in one direction complete in the order in which they were posted, so a request is the
// number of its transfer.
//
// Thread-safety: the transport's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "transport/transport.h"

namespace hororing {

struct Transfers {
  // A transfer that a caller waits for: the part that is not under way.
  struct Transfer {
    std::byte* data;
    size_t left;
  };
  std::deque<Transfer> open;
  uint64_t posted = 0, done = 0;

  void FinishFirst() {
    open.pop_front();
    ++done;
  }
};

struct PeerTransfers {
  Transfers sends, receives;

  // `broken`: nothing is transferred any more.
  Transport::Request PostSend(int peer, const void* data, size_t bytes, bool broken) {
    // A Transfer is used in both directions; that of a send is only read.
    return Post(sends, peer, 0, const_cast<void*>(data), bytes, broken);
  }
  Transport::Request PostReceive(int peer, void* data, size_t bytes, bool broken) {
    return Post(receives, peer, 1, data, bytes, broken);
  }
  // After a failure: callers may use their memory again.
  void Drop() {
    sends.open.clear();
    receives.open.clear();
  }

 private:
  static Transport::Request Post(Transfers& transfers, int peer, uint64_t direction, void* data,
                                 size_t bytes, bool broken) {
    if (!broken) transfers.open.push_back({static_cast<std::byte*>(data), bytes});
    return {++transfers.posted << 17 | static_cast<uint64_t>(peer) << 1 | direction};
  }
};

// A request as such a number.
struct PostedTransfer {
  template <typename Peers>  // by rank
  PostedTransfer(Transport::Request request, const Peers& peers)
      : peer(static_cast<int>(request.slot >> 1 & 0xffff)),
        number(request.slot >> 17),
        transfers((request.slot & 1) != 0 ? peers[static_cast<size_t>(peer)].receives
                                          : peers[static_cast<size_t>(peer)].sends) {}
  bool done() const { return transfers.done >= number; }

  const int peer;
  const uint64_t number;
  const Transfers& transfers;
};

// Complete control messages, and their senders.
struct Inbox : std::deque<std::pair<int, std::string>> {
  // False if there is none.
  bool Take(int* peer, std::string* message) {
    if (empty()) return false;
    *peer = front().first;
    *message = std::move(front().second);
    pop_front();
    return true;
  }
};

}  // namespace hororing
