// Rung 2: the transport over TCP, with ranks as threads that connect over 127.0.0.1.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/sha256.h"
#include "check.h"
#include "transport/bootstrap.h"
#include "transport/factory.h"
#include "transport/tcp/tcp_transport.h"
#include "transport_conformance.h"
#include "world.h"

using namespace hororing;
using namespace hororing_test;

namespace {

constexpr int kWorldSizes[] = {1, 2, 3, 5, 8};
// All connections at the start, or each one when it is needed.
constexpr int kEager[] = {64, 0};

struct Places {
  std::vector<Socket> listeners;
  std::vector<std::string> addresses;
};

Places Listeners(int size, const std::string& host = "127.0.0.1") {
  Places places;
  places.listeners.resize(static_cast<size_t>(size));
  places.addresses.resize(static_cast<size_t>(size));
  for (size_t rank = 0; rank < places.listeners.size(); ++rank) {
    CHECK_OK(Listen(host, &places.listeners[rank], &places.addresses[rank]));
  }
  return places;
}

TcpOptions Options(int eager_ranks = 64) {
  TcpOptions options;
  options.key = std::string(32, 'k');
  options.spin_ns = kDefaultSpin;
  options.eager_ranks = eager_ranks;
  return options;
}

std::vector<std::unique_ptr<Transport>> MakeTcpWorld(Places places, const TcpOptions& options) {
  std::vector<std::unique_ptr<Transport>> world(places.listeners.size());
  for (size_t rank = 0; rank < world.size(); ++rank) {
    CHECK_OK(TcpTransport::Make(static_cast<int>(rank), places.addresses,
                                std::move(places.listeners[rank]), options, &world[rank]));
  }
  return world;
}

std::vector<std::unique_ptr<Transport>> MakeTcpWorld(int size, int eager_ranks) {
  return MakeTcpWorld(Listeners(size), Options(eager_ranks));
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Ranks that see a failure stay until all have seen it: the end of a rank is another failure.
void StayUntil(std::atomic<int>* seen, int all) {
  ++*seen;
  while (*seen < all) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// A connection from outside the job.
Socket Intruder(const std::string& address) {
  Socket made;
  CHECK_OK(Connect(address, &made));
  return made;
}

std::string Hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

}  // namespace

// Shares texts among the ranks of a job, as the callers of init do: all get the answer at once.
class Board {
 public:
  explicit Board(int size) : texts_(static_cast<size_t>(size)) {}
  std::vector<std::string> Share(int rank, const std::string& mine) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    texts_[static_cast<size_t>(rank)] = mine;
    if (++given_ == static_cast<int>(texts_.size())) {
      given_ = 0;
      ++round_;
      answer_ = texts_;
      complete_.notify_all();
    }
    complete_.wait(lock, [&] { return round_ > round; });
    return answer_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable complete_;
  std::vector<std::string> texts_, answer_;
  int given_ = 0, round_ = 0;
};

constexpr TimeNs kHour = 3600 * kSecond;

// Makes a world without MPI. Returns the status of each rank.
std::vector<Status> MakeWorlds(int size, const std::vector<std::string>& wishes,
                               std::vector<World>* worlds) {
  Board board(size);
  std::vector<Status> made(static_cast<size_t>(size));
  *worlds = std::vector<World>(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank, at = static_cast<size_t>(rank)] {
      OutOfBandBootstrap bootstrap(rank, size);
      std::thread caller([&] {
        for (std::string mine; bootstrap.AwaitExchange(kHour, &mine);) {
          bootstrap.Exchanged(Status::Ok(), board.Share(rank, mine));
        }
      });
      WorldOptions options;
      options.launched = true;
      options.bootstrap = &bootstrap;
      options.transport = wishes[at % wishes.size()];
      options.timeout_ns = 60 * kSecond;
      options.spin_ns = kDefaultSpin;
      made[at] = MakeWorld(options, &(*worlds)[at]);
      bootstrap.Close();
      caller.join();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

// The examples of FIPS 180-4, and of RFC 4231.
TEST(sha256_and_hmac_give_the_published_digests) {
  CHECK_EQ(Hex(Sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(Hex(Sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(Hex(Sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(Hex(HmacSha256(std::string(20, '\x0b'), "Hi There")),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(Hex(HmacSha256(std::string(131, '\xaa'),
                          "Test Using Larger Than Block-Size Key - Hash Key First")),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(random_messages_between_random_pairs_arrive_intact_over_tcp) {
  for (int eager : kEager) {
    for (int size : kWorldSizes) {
      RunWorld(MakeTcpWorld(size, eager), [&](Rank& rank) {
        ExchangeRandomMessages(rank, Seed(), hororing_test::kFew ? 100 : 400, 600 << 10);
        CHECK(rank.transport.Close(Soon()));
      });
    }
  }
}

TEST(both_planes_carry_more_than_any_buffer_between_two_ranks_over_tcp) {
  constexpr size_t kLarge = (hororing_test::kFew ? 8 : 20) << 20;
  for (int eager : kEager) {
    RunWorld(MakeTcpWorld(3, eager), [&](Rank& rank) {
      ExchangeWithAll(rank, kLarge + 13);
      ExchangeWithAll(rank, 1);
      ExchangeControlBesideData(rank, kLarge);
      ExchangeControl(rank, hororing_test::kFew ? 100 : 300, 100 << 10);
      ExchangeControl(rank, hororing_test::kFew ? 500 : 2000, 24);
      CHECK(rank.transport.Close(Soon()));
    });
  }
}

TEST(wakes_are_not_lost_and_a_sleeper_costs_no_processor_time_over_tcp) {
  RunWorld(MakeTcpWorld(3, 64), [&](Rank& rank) {
    WakeManyTimes(rank, 5000);
    double cpu_seconds = 0;
    SleepIdly(rank, 300 * kMillisecond, &cpu_seconds);
    CHECK(cpu_seconds < 0.1);
    CHECK(rank.transport.Close(Soon()));
  });
}

TEST(a_world_over_tcp_can_be_reached_by_ipv6) {
  Socket probe;
  std::string address;
  if (!Listen("::1", &probe, &address).ok()) return;  // this machine has no IPv6
  CHECK(Contains(address, "[::1]:"));
  RunWorld(MakeTcpWorld(Listeners(2, "::1"), Options()), [&](Rank& rank) {
    ExchangeWithAll(rank, 100);
    CHECK(rank.transport.Close(Soon()));
  });
}

// The others wait for another rank, or do not wait at all.
TEST(the_end_of_a_rank_without_close_is_told_to_all_that_are_connected) {
  for (bool wait : {true, false}) {
    std::atomic<int> ready{0}, seen{0};
    RunWorld(MakeTcpWorld(3, 64), [&](Rank& rank) {
      Barrier(rank);
      StayUntil(&ready, 3);
      if (rank.rank() == 1) return;
      Status status;
      if (wait) {
        char byte = 0;
        status =
            rank.transport.Wait(rank.transport.Receive(rank.rank() == 0 ? 2 : 1, &byte, 1), Soon());
      } else {
        while (rank.transport.CheckPeers().ok()) rank.transport.Sleep(After(NowNs(), kSecond));
        status = rank.transport.CheckPeers();
      }
      CHECK(status.code() == Code::kPeerLost);
      CHECK_EQ(status.rank(), 1);
      CHECK_EQ(status.message(), "rank 1 died");
      StayUntil(&seen, 2);
    });
  }
}

TEST(any_thread_can_end_every_kind_of_wait_over_tcp) {
  for (const EndlessWait& each : kEndlessWaits) {
    std::atomic<int> ended{0};
    RunWorld(MakeTcpWorld(3, 64),
             [&](Rank& rank) { EndByRevoke(rank, each, [&] { StayUntil(&ended, 3); }); });
  }
}

// Its announcement still reaches them.
TEST(a_rank_that_leaves_a_collective_tells_the_others_why) {
  std::atomic<int> ended{0};
  RunWorld(MakeTcpWorld(3, 64), [&](Rank& rank) {
    Barrier(rank);
    std::thread revoker;
    if (rank.rank() == 1) {
      revoker = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        rank.transport.Revoke({Code::kPeerLost, "its script broke", 1});
      });
    }
    std::vector<float> data(8 << 20, 1.0f);
    Scratch scratch;
    const Status status =
        rank.rank() == 2
            ? ReceiveNothing(rank)
            : RingAllreduce(rank.transport, {data.data(), data.size(), {}}, scratch, Soon());
    if (rank.rank() == 1) {
      revoker.join();
      rank.transport.AnnounceFailure(status);
      CHECK(rank.transport.Flush(Soon()));
    }
    CHECK_EQ(status.message(),
             rank.rank() == 1 ? "its script broke" : "rank 1 failed: its script broke");
    StayUntil(&ended, 3);
  });
}

TEST(an_announced_failure_reaches_ranks_that_had_no_connection) {
  for (int eager : kEager) {
    std::atomic<int> seen{0};
    RunWorld(MakeTcpWorld(4, eager), [&](Rank& rank) {
      if (rank.rank() == 2) {
        rank.transport.AnnounceFailure(Status(Code::kPeerLost, "out of memory", 2));
        CHECK(rank.transport.Flush(Soon()));
        return StayUntil(&seen, 4);
      }
      char byte = 0;
      const Status status =
          rank.transport.Wait(rank.transport.Receive((rank.rank() + 1) % 4, &byte, 1), Soon());
      CHECK_EQ(status.message(), "rank 2 failed: out of memory");
      CHECK_EQ(status.rank(), 2);
      rank.transport.AnnounceFailure(status);  // as an engine does
      // It need not complete: some ranks do not receive any more.
      (void)rank.transport.Flush(After(NowNs(), kSecond));
      StayUntil(&seen, 4);
    });
  }
}

// Two ranks have connected to each other at the same time, and one of them has closed its side.
TEST(what_one_connection_has_brought_counts_although_the_other_has_ended) {
  Places places = Listeners(2);
  std::unique_ptr<Transport> world;
  CHECK_OK(
      TcpTransport::Make(0, places.addresses, std::move(places.listeners[0]), Options(0), &world));
  char out = 'o', in = '-';
  const Transport::Request sending = world->Send(1, &out, 1);
  Socket taken = Intruder(places.addresses[0]), made;
  Handshake connecting = Handshake::Connecting(Options().key, {1, 0, 0});
  Handshake accepting = Handshake::Accepting(Options().key, 1);
  Handshake::State one = Handshake::State::kUnderWay, other = one;
  for (const TimeNs end = Soon(); NowNs() < end;) {
    world->Progress();
    if (!made) made = Accept(places.listeners[1].fd());
    if (made && one == Handshake::State::kUnderWay) one = accepting.Advance(made.fd());
    if (other == Handshake::State::kUnderWay) other = connecting.Advance(taken.fd());
    if (one == Handshake::State::kDone && other == Handshake::State::kDone) break;
  }
  CHECK_OK(world->Wait(sending, Soon()));
  for (int look = 0; look < 100; ++look) world->Progress();  // ends the handshake
  CHECK_EQ(SendSome(taken.fd(), "x", 1), 1);
  made = Socket();
  CHECK_OK(world->Wait(world->Receive(1, &in, 1), Soon()));
  CHECK_EQ(in, 'x');
  CHECK_OK(world->CheckPeers());
}

// Rank 0 does not connect to every rank, only to those of its host, which nobody else would miss.
TEST(a_failure_spreads_among_many_ranks_by_few_connections) {
  constexpr int kRanks = 16;
  Places places = Listeners(kRanks);
  TcpOptions options = Options(0);
  options.here.resize(kRanks);
  options.here[0] = options.here[1] = options.here[3] = true;
  std::unique_ptr<Transport> world;
  CHECK_OK(
      TcpTransport::Make(0, places.addresses, std::move(places.listeners[0]), options, &world));
  std::vector<Socket> called;
  const auto calls = [&] {
    const TimeNs end = After(NowNs(), 200 * kMillisecond);
    while (NowNs() < end) world->Progress();
    std::vector<int> ranks;
    for (int rank = 1; rank < kRanks; ++rank) {
      while (Socket call = Accept(places.listeners[static_cast<size_t>(rank)].fd())) {
        called.push_back(std::move(call));
        ranks.push_back(rank);
      }
    }
    return ranks;
  };
  CHECK(calls() == (std::vector<int>{1, 3}));
  world->AnnounceFailure(Status(Code::kPeerLost, "out of memory", 0));
  CHECK(calls() == (std::vector<int>{2, 4, 8}));
}

TEST(a_wait_over_tcp_ends_at_its_deadline_and_names_the_silent_rank) {
  RunWorld(MakeTcpWorld(2, 64), [&](Rank& rank) {
    Barrier(rank);
    if (rank.rank() == 0) {
      char byte = 0;
      const Status status =
          rank.transport.Wait(rank.transport.Receive(1, &byte, 1), After(NowNs(), kSecond / 5));
      CHECK(status.code() == Code::kTransport);
      CHECK_EQ(status.rank(), 1);
      // The failure is permanent.
      CHECK(!rank.transport.Wait(rank.transport.Send(1, &byte, 1), Soon()).ok());
      rank.transport.Post(1, "done");
      CHECK(rank.transport.Close(Soon()));
    } else {
      int peer = -1;
      std::string message;
      CHECK(PollUntil(rank.transport, Soon(), &peer, &message));
      CHECK(rank.transport.Close(Soon()));
    }
  });
}

// No socket listens at the first address. The kernel refuses the second at once.
TEST(a_rank_that_cannot_be_reached_is_an_error_that_names_its_address) {
  for (const std::string address : {"", "255.255.255.255:4711"}) {
    Places places = Listeners(2);
    places.listeners[1] = Socket();
    if (!address.empty()) places.addresses[1] = address;
    TcpOptions options = Options();
    options.silent_ns = 100 * kMillisecond;  // and a second in which its host may answer
    std::vector<int> unreachable;
    options.unreachable = [&](int peer) { unreachable.push_back(peer); };
    std::unique_ptr<Transport> alone;
    CHECK_OK(
        TcpTransport::Make(0, places.addresses, std::move(places.listeners[0]), options, &alone));
    char byte = 0;
    const Status status = alone->Wait(alone->Receive(1, &byte, 1), After(NowNs(), 20 * kSecond));
    CHECK(status.code() == Code::kPeerLost);
    CHECK(Contains(status.message(), places.addresses[1]));
    CHECK(Contains(status.message(), address.empty() ? "Connection refused" : "unreachable"));
    CHECK(!unreachable.empty() && unreachable[0] == 1);
  }
}

// A single lost probe must not break a connection.
TEST(a_silent_connection_is_probed_several_times_before_it_breaks) {
  const auto value = [](const Socket& socket, int option) {
    int found = 0;
    socklen_t bytes = sizeof found;
    CHECK_EQ(getsockopt(socket.fd(), IPPROTO_TCP, option, &found, &bytes), 0);
    return found;
  };
  Places places = Listeners(1);
  const Socket socket = Intruder(places.addresses[0]);
  const TimeNs limit = Options().silent_ns;
  CHECK_OK(BreakWhenSilent(socket.fd(), limit));
  CHECK_EQ(value(socket, TCP_USER_TIMEOUT), limit / kMillisecond);
  const int idle = value(socket, TCP_KEEPIDLE), interval = value(socket, TCP_KEEPINTVL);
  CHECK(idle + 4 * interval <= limit / kSecond);
}

// Rank 0 of two, in a process that may open no more files, and raise its limit to `most`.
Status WithoutFiles(rlim_t most) {
  Places places = Listeners(2);
  TcpOptions options = Options(0);
  options.connect_ns = 200 * kMillisecond;
  std::unique_ptr<Transport> world;
  CHECK_OK(
      TcpTransport::Make(0, places.addresses, std::move(places.listeners[0]), options, &world));
  rlimit before;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {3, most};
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  char byte = 0;
  const Status status = world->Wait(world->Send(1, &byte, 1), After(NowNs(), kSecond));
  rlimit after;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &after), 0);
  CHECK_EQ(after.rlim_cur, most);
  return status;
}

TEST(a_process_that_needs_more_file_descriptors_raises_its_limit_or_says_what_it_lacks) {
  const auto in_child = [](rlim_t most, const char* wanted) {
    const pid_t child = fork();
    if (child == 0) _exit(Contains(WithoutFiles(most).message(), wanted) ? 0 : 1);
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  };
  rlimit limit;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  in_child(limit.rlim_max, "; its process may be stopped");
  in_child(3, "cannot make a socket: Too many open files");
}

TEST(a_process_without_free_file_descriptors_accepts_peers_later) {
  Places places = Listeners(2);
  const std::vector<std::string> addresses = places.addresses;
  std::unique_ptr<Transport> world;
  CHECK_OK(TcpTransport::Make(0, addresses, std::move(places.listeners[0]), Options(0), &world));
  const Socket peer = Intruder(addresses[0]);
  rlimit before;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {3, before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const Status status = world->CheckPeers();
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK_OK(status);
  Handshake handshake = Handshake::Connecting(Options().key, {1, 0, 1});
  Handshake::State state = Handshake::State::kUnderWay;
  for (const TimeNs end = Soon(); state == Handshake::State::kUnderWay && NowNs() < end;) {
    CHECK_OK(world->CheckPeers());
    state = handshake.Advance(peer.fd());
  }
  CHECK(state == Handshake::State::kDone);
}

TEST(to_ask_who_is_silent_makes_no_connections) {
  std::vector<std::unique_ptr<Transport>> world = MakeTcpWorld(2, 0);
  for (int look = 0; look < 3; ++look) {
    CHECK_EQ(world[0]->Silence(1), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(a_rank_that_was_stopped_itself_does_not_count_the_silence_of_others_over_tcp) {
  std::vector<std::unique_ptr<Transport>> world = MakeTcpWorld(2, 64);
  CHECK_OK(world[0]->CheckPeers());
  CHECK_EQ(world[0]->Silence(1), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(2200));
  CHECK_OK(world[0]->CheckPeers());
  CHECK(world[0]->Silence(1) < 2 * kSecond);
}

TEST(time_in_which_a_rank_is_stopped_does_not_count_against_its_connections) {
  Places places = Listeners(2);
  const std::vector<std::string> addresses = places.addresses;
  TcpOptions options = Options();
  options.connect_ns = kSecond;
  std::vector<std::unique_ptr<Transport>> world(2);
  CHECK_OK(TcpTransport::Make(0, addresses, std::move(places.listeners[0]), options, &world[0]));
  CHECK_OK(world[0]->CheckPeers());
  std::this_thread::sleep_for(std::chrono::milliseconds(2200));
  CHECK_OK(world[0]->CheckPeers());
  CHECK_OK(TcpTransport::Make(1, addresses, std::move(places.listeners[1]), options, &world[1]));
  RunWorld(std::move(world), [&](Rank& rank) {
    ExchangeWithAll(rank, 100);
    CHECK(rank.transport.Close(Soon()));
  });
}

TEST(a_rank_that_was_stopped_while_it_waited_has_its_whole_limit_again_over_tcp) {
  RunWorld(MakeTcpWorld(2, 64), GoOnAfterAStop);
  RunWorld(MakeTcpWorld(2, 64), WaitWhileDataMoves);
}

// A killed rank may leave workers of its DataLoader.
TEST(a_forked_child_does_not_keep_the_end_of_its_parent_from_the_others) {
  std::vector<std::unique_ptr<Transport>> world = MakeTcpWorld(2, 64);
  int peer = -1;
  std::string message;
  world[1]->Post(0, "connected");
  for (const TimeNs end = Soon(); !world[0]->Poll(&peer, &message) && NowNs() < end;) {
    world[1]->Progress();
  }
  CHECK_EQ(message, "connected");
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  world[1].reset();
  const TimeNs end = After(NowNs(), 10 * kSecond);
  while (world[0]->CheckPeers().ok() && NowNs() < end) world[0]->Progress();
  CHECK_EQ(world[0]->CheckPeers().message(), "rank 1 died");
  kill(child, SIGKILL);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
}

// Garbage, silence, half a handshake, another job's key, and more connections than are accepted.
TEST(strangers_do_not_disturb_a_world) {
  Places places = Listeners(2);
  const std::vector<std::string> addresses = places.addresses;
  std::vector<Socket> intruders;
  for (int i = 0; i < 300; ++i) intruders.push_back(Intruder(addresses[0]));
  std::vector<std::unique_ptr<Transport>> world = MakeTcpWorld(std::move(places), Options());
  std::thread attacker([&] {
    std::mt19937 random(Seed());
    const TimeNs end = NowNs() + 400 * kMillisecond;
    while (NowNs() < end) {
      Socket intruder = Intruder(addresses[random() % 2]);
      const std::string garbage = Content(random(), random() % 200);
      const TimeNs patience = NowNs() + kMillisecond;
      while (NowNs() < patience && SendSome(intruder.fd(), garbage.data(), garbage.size()) == 0) {
      }
      Handshake other = Handshake::Connecting(std::string(32, 'x'), {1, 0, 1});
      Socket second = Intruder(addresses[0]);
      while (NowNs() < patience && other.Advance(second.fd()) == Handshake::State::kUnderWay) {
      }
      if (intruders.size() < 600) intruders.push_back(std::move(intruder));
    }
  });
  RunWorld(std::move(world), [&](Rank& rank) {
    for (int i = 0; i < 20; ++i) ExchangeWithAll(rank, 1 << 20);
    CHECK(rank.transport.Close(Soon()));
  });
  attacker.join();
}

// They come before the first connection of a peer, which queues behind them, and while data moves.
TEST(ten_thousand_half_open_connections_do_not_keep_peers_from_one_another) {
  rlimit before;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit most = {before.rlim_max, before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &most), 0);
  const size_t count = std::min<size_t>(10'000, before.rlim_max - 500);
  Places places = Listeners(2);
  const std::vector<std::string> addresses = places.addresses;
  std::vector<Socket> intruders;
  while (intruders.size() < count / 2)
    intruders.push_back(Intruder(addresses[intruders.size() % 2]));
  RunWorld(MakeTcpWorld(std::move(places), Options(0)), [&](Rank& rank) {
    for (int i = 0; i < 20; ++i) {
      for (size_t each = 0; rank.rank() == 1 && each < count / 40; ++each) {
        intruders.push_back(Intruder(addresses[each % 2]));
      }
      ExchangeWithAll(rank, 100 << 10);
    }
    CHECK(rank.transport.Close(Soon()));
  });
  intruders.clear();
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(a_recorded_handshake_is_of_no_use_later) {
  const std::string key(32, 'k');
  std::string recorded(16 + sizeof(Hello) + 32, '\0');
  int fds[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
  const Socket spy(fds[0]), peer(fds[1]);
  const std::string question = "HRT1" + std::string(16, 'n');
  CHECK_EQ(SendSome(spy.fd(), question.data(), question.size()), 20);
  Handshake connecting = Handshake::Connecting(key, {1, 0, 0});
  CHECK(connecting.Advance(peer.fd()) == Handshake::State::kUnderWay);
  CHECK_EQ(ReceiveSome(spy.fd(), recorded.data(), recorded.size()),
           static_cast<ptrdiff_t>(recorded.size()));
  CHECK_EQ(SendSome(spy.fd(), recorded.data(), recorded.size()),
           static_cast<ptrdiff_t>(recorded.size()));
  Handshake accepting = Handshake::Accepting(key, 0);
  CHECK(accepting.Advance(peer.fd()) == Handshake::State::kFailed);
}

TEST(a_handshake_with_another_key_or_for_another_rank_fails_on_both_sides) {
  const auto meet = [](Handshake one, Handshake other) {
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    Socket first(fds[0]), second(fds[1]);
    std::vector<Handshake::State> states(2, Handshake::State::kUnderWay);
    for (int i = 0; i < 10; ++i) {
      if (states[0] == Handshake::State::kUnderWay) states[0] = one.Advance(first.fd());
      if (states[0] == Handshake::State::kFailed) first = Socket();
      if (states[1] == Handshake::State::kUnderWay) states[1] = other.Advance(second.fd());
      if (states[1] == Handshake::State::kFailed) second = Socket();
    }
    return states;
  };
  const std::string key(32, 'k'), wrong(32, 'w');
  const std::vector<Handshake::State> good(2, Handshake::State::kDone);
  const std::vector<Handshake::State> bad(2, Handshake::State::kFailed);
  CHECK(meet(Handshake::Connecting(key, {1, 0, 0}), Handshake::Accepting(key, 0)) == good);
  CHECK(meet(Handshake::Connecting(wrong, {1, 0, 0}), Handshake::Accepting(key, 0)) == bad);
  CHECK(meet(Handshake::Connecting(key, {1, 2, 0}), Handshake::Accepting(key, 0)) == bad);
  // A stranger that only repeats the other side's messages.
  CHECK(meet(Handshake::Accepting(key, 1), Handshake::Accepting(key, 0)) != good);
}

TEST(ranks_that_mpi_did_not_start_get_shared_memory_or_tcp) {
  for (const std::string wish : {"auto", "shm", "tcp"}) {
    std::vector<World> worlds;
    std::vector<std::unique_ptr<Transport>> transports;
    for (const Status& status : MakeWorlds(3, {wish}, &worlds)) CHECK_OK(status);
    for (World& world : worlds) {
      CHECK_EQ(world.topology.local_size, 3);
      CHECK_EQ(std::string(world.transport->name()), wish == "tcp" ? "tcp" : "shm");
      transports.push_back(std::move(world.transport));
    }
    RunWorld(std::move(transports), [&](Rank& rank) {
      ExchangeWithAll(rank, 1 << 20);
      CHECK(rank.transport.Close(Soon()));
    });
  }
}

TEST(ranks_that_want_different_transports_or_mpi_without_it_are_told_so) {
  std::vector<World> worlds;
  for (const Status& status : MakeWorlds(2, {"shm", "tcp"}, &worlds)) {
    CHECK(status.code() == Code::kMismatch);
    CHECK(Contains(status.message(), "rank 0: shm; rank 1: tcp"));
  }
  for (const Status& status : MakeWorlds(2, {"mpi"}, &worlds)) {
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(Contains(status.message(), "MPI did not start this job"));
  }
}

TEST(a_bootstrap_that_nobody_answers_ends_at_its_deadline_or_with_the_callers_error) {
  OutOfBandBootstrap bootstrap(0, 2), left(0, 2);
  std::vector<std::string> texts;
  CHECK(bootstrap.Share("mine", After(NowNs(), 50 * kMillisecond), &texts).code() ==
        Code::kTransport);
  std::thread caller([&] {
    std::string mine;
    CHECK(!left.AwaitExchange(kMillisecond, &mine) || mine == "mine");
    CHECK(left.AwaitExchange(kHour, &mine));
    left.Exchanged(Status(Code::kTransport, "rank 1 has left"), {});
  });
  CHECK_EQ(left.Share("mine", Soon(), &texts).message(), "rank 1 has left");
  caller.join();
  CHECK_EQ(left.Share("again", Soon(), &texts).message(), "rank 1 has left");
}
