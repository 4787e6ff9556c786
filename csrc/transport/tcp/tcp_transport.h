// TcpTransport: a Transport over TCP sockets, for hosts that MPI does not connect. It needs the
// address at which every rank listens, and a key that the ranks of the job share (handshake.h).
//
//   links.cc          connections: opened, accepted, authenticated, and lost
//   data_plane.cc     Send, Receive, Wait: bare streams, straight from and into the callers' memory
//   control_plane.cc  Post, Poll, Sleep, announcements of failures, Close: frames
//
// A pair of ranks has one connection for each plane. In a small job the lower rank opens both at
// start. In a larger one it does so only within a host and for the control plane, since nothing
// else would show the end of a process there. The others are opened by the rank that first needs
// one; if both do so at once, each sends over its own.
//
// A process that ends closes its connections. The control plane notices a cut network within
// `silent_ns`, because its connections are always read. Data may stay in a socket for as long as
// the receiver computes, which the kernel cannot tell from a cut network.
//
// Everything is polled by one epoll instance, edge-triggered: each is tried until it blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/handshake.h"
#include "transport/tcp/socket.h"
#include "transport/transfers.h"
#include "transport/transport.h"

namespace hororing {

struct TcpOptions {
  std::string key;  // of the job; 32 bytes
  TimeNs spin_ns = 0;
  TimeNs silent_ns = 20 * kSecond;  // a network cut for this long loses the peer
  std::function<void(int peer)> unreachable = [](int) {};  // called for each peer so lost
  TimeNs connect_ns = 30 * kSecond;  // the longest time that making a connection may take
  int eager_ranks = 64;              // up to this size, all connections are made at start
  std::vector<bool> here;            // per rank: is on this host; empty: none is
};

class TcpTransport final : public Transport {
 public:
  // `addresses[r]`: where rank r listens; `listener` is this rank's.
  static Status Make(int rank, std::vector<std::string> addresses, Socket listener,
                     TcpOptions options, std::unique_ptr<Transport>* made);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(addresses_.size()); }
  const char* name() const override { return "tcp"; }

  Request Send(int peer, const void* data, size_t bytes) override;
  Request Receive(int peer, void* data, size_t bytes) override;
  Status Wait(Request request, TimeNs deadline) override;
  bool Done(Request request) override;

  void Post(int peer, std::string message) override { Put(peer, kMessage, message); }
  bool Poll(int* peer, std::string* message) override;
  bool Progress() override;
  void Sleep(TimeNs deadline) override;
  void Wake() override;
  Status CheckPeers() override;
  TimeNs Silence(int peer) override;
  void AnnounceFailure(const Status& why) override;
  bool Flush(TimeNs deadline) override;
  bool Close(TimeNs deadline) override;

  // For Backoff: sleeps until any event may have arrived.
  void SleepUnless(uint32_t seen, TimeNs span_ns);

 private:
  enum Plane { kData, kControl, kPlanes };
  enum Frame : uint8_t { kMessage, kFailure, kClose, kAsk, kAnswer };
  struct Link {
    Socket socket;
    std::optional<Handshake> handshake;  // under way
    size_t portion = 1;                  // this many bytes make a read event
    TimeNs retry_ns = 0;                 // when to connect again; 0: no need
    TimeNs give_up_ns = 0;
    std::string why;  // the last attempt failed
    bool answered = false;
    bool ready() const { return socket && !handshake; }
  };
  // The connections of one plane with one peer. All sends use the same one.
  struct Links {
    Link outgoing, incoming;  // connections made by this rank; by the peer
    Link* sends = nullptr;
    bool begun() const { return outgoing.give_up_ns != 0 || incoming.socket; }
  };
  struct Peer : PeerTransfers {
    Links links[kPlanes];
    bool active = false;             // is in active_
    std::deque<std::string> outbox;  // frames
    size_t out_at = 0;               // bytes of the first frame that are sent
    std::string inbox;               // frames; the last may be incomplete
    size_t in_at = 0;                // bytes of it that are delivered; 0 outside PullControl
    bool lost = false;               // has failed, or ended
    bool closed = false;             // its Close has arrived; nothing follows
    TimeNs asked_ns = 0;
    bool cut = false;
    Status loss;  // a connection was lost; the peer may be alive
    TimeNs lost_ns = 0;
  };
  // An accepted connection whose handshake is not done.
  struct PendingConnection {
    Socket socket;
    Handshake handshake;
    TimeNs since_ns;
  };

  TcpTransport(int rank, std::vector<std::string> addresses, Socket listener, TcpOptions options);
  Peer& PeerOf(int peer) { return peers_[static_cast<size_t>(peer)]; }

  // links.cc
  Status WatchSocket(int fd, uint64_t what, uint32_t events);
  bool Events();  // true if anything moved
  void AcceptAll();
  void AdvanceAccept(std::list<PendingConnection>::iterator pending);
  void AttachToPeer(PendingConnection* pending);
  bool IsEager(int peer, Plane plane) const;
  void EnsureConnection(int peer, Plane plane);
  void StartConnect(int peer, Plane plane);
  void Open(int peer, Plane plane, Link* link);
  void AdvanceLink(int peer, Plane plane, Link* link);
  void Retry();
  void OnConnectionLost(int peer, int error);
  void CheckLostConnections();

  // data_plane.cc
  void Activate(int peer);
  bool MoveData();  // true if anything moved
  bool PushData(int peer);
  bool PullData(int peer);

  // control_plane.cc
  bool AnnouncesTo(int peer);
  void Put(int peer, Frame kind, const std::string& text, bool first = false);
  bool PushControl(int peer);
  bool PullControl(int peer);
  void Deliver(int peer, Frame kind, std::string text);
  void NoteFailure(Status failure);

  const int rank_;
  const std::vector<std::string> addresses_;
  const TcpOptions options_;
  Socket listener_, epoll_, bell_;
  std::vector<Peer> peers_;
  std::list<PendingConnection> pending_;
  std::vector<int> active_;                        // peers with transfers under way
  std::vector<std::pair<int, Plane>> connecting_;  // outgoing links that are not ready
  std::vector<int> losing_;                        // peers that lost a connection and may be alive
  Inbox inbox_;
  bool accepting_ = false;  // other connections may wait to be accepted
  bool accept_failed_ = false;
  bool woken_ = false;  // since the last Sleep
  bool announced_ = false, closing_ = false, failure_shown_ = false;
  Status failure_;          // the first that a peer announced or this rank noticed
  Status broken_;           // what every later Wait returns
  TimeNs last_gap_ns_ = 0;  // the latest gap between data in a wait for it
};

}  // namespace hororing
