// The conformance tests of transports, as functions that each rank of a world runs: in threads
// (transport_test.cc) or under mpirun (mpi_transport_check.cc). Every function leaves the transport
// usable.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/allreduce.h"
#include "world.h"

namespace hororing_test {

using hororing::After;
using hororing::Code;
using hororing::kForever;
using hororing::kMillisecond;
using hororing::kSecond;
using hororing::NowNs;
using hororing::Status;
using hororing::TimeNs;
using hororing::Transport;

inline TimeNs Soon() { return After(NowNs(), 100 * kSecond); }

// Bytes that depend on the message and the position, so that every mix-up is noticed.
inline std::string Content(uint64_t message, size_t bytes) {
  std::string content(bytes, '\0');
  uint64_t state = message * 0x9e3779b97f4a7c15u + 1;
  for (size_t i = 0; i < bytes; i += sizeof state) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(content.data() + i, &state, std::min(sizeof state, bytes - i));
  }
  return content;
}

// Returns when all ranks have entered.
inline void Barrier(Rank& rank) {
  Transport& transport = rank.transport;
  for (int step = 1; step < rank.size(); step *= 2) {
    const char token = 1;
    char got = 0;
    CHECK_OK(SendReceive(transport, (rank.rank() + step) % rank.size(), &token, 1,
                         (rank.rank() - step + rank.size()) % rank.size(), &got, 1, Soon()));
    CHECK_EQ(got, token);
  }
}

// Receives the next control message from any peer.
inline bool PollUntil(Transport& transport, TimeNs deadline, int* peer, std::string* message) {
  while (!transport.Poll(peer, message)) {
    if (NowNs() >= deadline) return false;
    transport.Sleep(std::min(deadline, After(NowNs(), 100 * kMillisecond)));
  }
  return true;
}

// All ranks derive a plan of messages from the seed. Each posts its part in the order of the plan,
// and waits in its own random order.
inline void ExchangeRandomMessages(Rank& rank, unsigned seed, int messages, size_t max_bytes) {
  if (rank.size() == 1) return;
  struct Pending {
    Transport::Request request;
    uint64_t number;
    bool receive;
    std::string buffer;
  };
  rank.Enter("random messages");
  std::mt19937_64 plan(seed), own(seed + 1 + static_cast<unsigned>(rank.rank()));
  std::vector<std::unique_ptr<Pending>> pending;
  const auto wait_for_one = [&] {
    const size_t at = own() % pending.size();
    std::unique_ptr<Pending> one = std::move(pending[at]);
    pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(at));
    CHECK_OK(rank.transport.Wait(one->request, Soon()));
    // After the wait, the sender's buffer is free.
    if (!one->receive) return one->buffer.assign(one->buffer.size(), 'x'), void();
    CHECK(one->buffer == Content(one->number, one->buffer.size()));
  };
  for (int i = 0; i < messages; ++i) {
    const int from = static_cast<int>(plan() % static_cast<unsigned>(rank.size()));
    const int to = static_cast<int>(
        (static_cast<unsigned>(from) + 1 + plan() % static_cast<unsigned>(rank.size() - 1)) %
        static_cast<unsigned>(rank.size()));
    // Sizes of all magnitudes.
    const size_t bytes = plan() % (size_t{1} << (plan() % 24)) % (max_bytes + 1);
    if (from != rank.rank() && to != rank.rank()) continue;
    auto one = std::make_unique<Pending>();
    one->number = static_cast<uint64_t>(i) + 1;
    one->receive = to == rank.rank();
    one->buffer = one->receive ? std::string(bytes, '?') : Content(one->number, bytes);
    one->request = one->receive ? rank.transport.Receive(from, one->buffer.data(), bytes)
                                : rank.transport.Send(to, one->buffer.data(), bytes);
    pending.push_back(std::move(one));
    while (pending.size() > own() % 16) wait_for_one();
  }
  while (!pending.empty()) wait_for_one();
  Barrier(rank);
}

// Every rank sends to and receives from all others at once, more than any buffer holds.
inline void ExchangeWithAll(Rank& rank, size_t bytes) {
  rank.Enter("all at once");
  const auto number = [](int from, int to) { return static_cast<uint64_t>(from * 1000 + to); };
  std::vector<std::string> out, in;
  std::vector<Transport::Request> requests;
  for (int peer = 0; peer < rank.size(); ++peer) {
    out.push_back(peer == rank.rank() ? "" : Content(number(rank.rank(), peer), bytes));
    in.push_back(std::string(peer == rank.rank() ? 0 : bytes, '?'));
  }
  for (int peer = 0; peer < rank.size(); ++peer) {
    const size_t at = static_cast<size_t>(peer);
    if (peer == rank.rank()) continue;
    requests.push_back(rank.transport.Send(peer, out[at].data(), bytes));
    requests.push_back(rank.transport.Receive(peer, in[at].data(), bytes));
  }
  for (const Transport::Request& request : requests) {
    CHECK_OK(rank.transport.Wait(request, Soon()));
  }
  for (int peer = 0; peer < rank.size(); ++peer) {
    if (peer == rank.rank()) continue;
    CHECK(in[static_cast<size_t>(peer)] == Content(number(peer, rank.rank()), bytes));
  }
  Barrier(rank);
}

// Every rank posts `count` messages to every other rank before it polls; they arrive in order, and
// none is lost.
inline void ExchangeControl(Rank& rank, uint64_t count, size_t bytes) {
  rank.Enter("control messages");
  const auto number = [](int from, uint64_t i) { return static_cast<uint64_t>(from) << 32 | i; };
  for (uint64_t i = 0; i < count; ++i) {
    for (int peer = 0; peer < rank.size(); ++peer) {
      if (peer != rank.rank()) rank.transport.Post(peer, Content(number(rank.rank(), i), bytes));
    }
  }
  std::vector<uint64_t> received(static_cast<size_t>(rank.size()), 0);
  for (uint64_t left = count * static_cast<uint64_t>(rank.size() - 1); left > 0; --left) {
    int peer = -1;
    std::string message;
    if (!PollUntil(rank.transport, Soon(), &peer, &message)) {
      Fail(__FILE__, __LINE__, std::to_string(left) + " control messages have not arrived");
      break;
    }
    const uint64_t i = received[static_cast<size_t>(peer)]++;
    CHECK(message == Content(number(peer, i), bytes));
  }
  CHECK(rank.transport.Flush(Soon()));
  Barrier(rank);
}

// Control messages of odd sizes, from empty to longer than any pipe, while data is in flight.
inline void ExchangeControlBesideData(Rank& rank, size_t data_bytes) {
  if (rank.size() == 1) return;
  rank.Enter("control during data");
  const std::vector<size_t> sizes = {0, 1, 7, 8, 9, 4096, 65536, 65537, 1 << 20, (5 << 20) + 3};
  const int to = (rank.rank() + 1) % rank.size();
  const int from = (rank.rank() + rank.size() - 1) % rank.size();
  const std::string out = Content(77, data_bytes);
  std::string in(data_bytes, '?');
  const Transport::Request sending = rank.transport.Send(to, out.data(), out.size());
  for (size_t bytes : sizes) rank.transport.Post(to, Content(bytes, bytes));
  const Transport::Request receiving = rank.transport.Receive(from, in.data(), in.size());
  CHECK_OK(rank.transport.Wait(sending, Soon()));
  CHECK_OK(rank.transport.Wait(receiving, Soon()));
  CHECK(in == out);
  for (size_t bytes : sizes) {
    int peer = -1;
    std::string message;
    CHECK(PollUntil(rank.transport, Soon(), &peer, &message));
    CHECK_EQ(peer, from);
    CHECK(message == Content(bytes, bytes));
  }
  CHECK(rank.transport.Flush(Soon()));
  Barrier(rank);
}

// Wakes from another thread are never lost, even between two sleeps. On a busy machine there are
// fewer than `wakes`, because each that is awaited may take several time slices.
inline void WakeManyTimes(Rank& rank, int wakes) {
  rank.Enter("wakes");
  const TimeNs end = After(NowNs(), 15 * kSecond);
  std::atomic<int> last{wakes}, made{0}, seen{0};
  std::thread waker([&] {
    std::mt19937 random(Seed());
    for (int i = 1; i <= last; ++i) {
      if (NowNs() >= end) last = i;
      made = i;
      rank.transport.Wake();
      if (random() % 8 != 0) continue;
      while (seen.load() < i) std::this_thread::yield();
    }
  });
  while (seen < last) {
    seen = made.load();
    if (seen < last) rank.transport.Sleep(kForever);
  }
  waker.join();
  Barrier(rank);
}

// Sleep ends at its deadline, and costs no processor time meanwhile.
inline void SleepIdly(Rank& rank, TimeNs span, double* cpu_seconds) {
  rank.Enter("idle");
  Barrier(rank);
  const auto cpu_now = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  };
  const double cpu_before = cpu_now();
  const TimeNs begin = NowNs(), end = begin + span;
  while (NowNs() < end) rank.transport.Sleep(end);
  *cpu_seconds = cpu_now() - cpu_before;
  CHECK(NowNs() - begin >= span);
  Barrier(rank);
}

// Waits that never end: all ranks wait in the same way, and none gets its message.
struct EndlessWait {
  const char* name;
  Status (*wait)(Rank& rank);
};

inline int Next(const Rank& rank) { return (rank.rank() + 1) % rank.size(); }

inline Status ReceiveNothing(Rank& rank) {
  char byte = 0;
  return rank.transport.Wait(rank.transport.Receive(Next(rank), &byte, 1), kForever);
}

inline const std::string& Much() {
  static const std::string much((kFew ? 16 : 32) << 20, 'm');  // more than the sockets' buffers
  return much;
}

inline const EndlessWait kEndlessWaits[] = {
    {"receive", ReceiveNothing},
    {"send",
     [](Rank& rank) {
       const std::string& much = Much();
       return rank.transport.Wait(rank.transport.Send(Next(rank), much.data(), much.size()),
                                  kForever);
     }},
    {"exchange",  // of three ranks: each sends to a rank that sends to the third one
     [](Rank& rank) {
       const std::string& much = Much();
       std::string in(much.size(), '-');
       return SendReceive(rank.transport, Next(rank), much.data(), much.size(), Next(rank),
                          in.data(), in.size(), kForever);
     }},
    {"ring",
     [](Rank& rank) {
       if (rank.rank() == 0) return ReceiveNothing(rank);
       std::vector<float> data(Much().size() / sizeof(float), 1.0f);
       hororing::Scratch scratch;
       return hororing::RingAllreduce(rank.transport, {data.data(), data.size(), {}}, scratch,
                                      kForever);
     }},
    {"sleep",
     [](Rank& rank) {
       while (rank.transport.CheckPeers().ok()) rank.transport.Sleep(kForever);
       return rank.transport.CheckPeers();
     }},
    {"the end of the world",
     [](Rank& rank) {
       if (rank.rank() != 0) rank.transport.Close(kForever);
       while (rank.transport.CheckPeers().ok()) rank.transport.Sleep(kForever);
       return rank.transport.CheckPeers();
     }},
};

// Another thread ends the wait; later waits end at once, and callers may use their buffers again.
// `stay` returns when all ranks have called it, because the end of a rank is another failure.
inline void EndByRevoke(Rank& rank, const EndlessWait& endless, const std::function<void()>& stay) {
  // Without the revocation, these waits never end. A sanitizer on a busy machine needs seconds for
  // the buffers.
  constexpr TimeNs kAtOnce = 60 * kSecond;
  rank.Enter(endless.name);
  Barrier(rank);
  const Status why(Code::kStalled, "the job goes on without this rank", rank.rank());
  TimeNs begin = 0;
  std::thread revoker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    begin = NowNs();
    rank.transport.Revoke(why);
    rank.transport.Revoke(Status(Code::kInternal, "too late"));
  });
  const Status status = endless.wait(rank);
  revoker.join();
  CHECK(status.code() == why.code());
  CHECK_EQ(status.message(), why.message());
  CHECK_EQ(status.rank(), rank.rank());
  for (const EndlessWait& each : kEndlessWaits) CHECK_EQ(each.wait(rank).message(), why.message());
  CHECK(NowNs() - begin < kAtOnce);
  stay();
}

// Rank 1 sends for longer than the limit, then no more; rank 2, if any, is not needed.
inline void WaitWhileDataMoves(Rank& rank) {
  constexpr TimeNs kLimit = 400 * kMillisecond;
  constexpr size_t kParts = 8;
  rank.Enter("slow");
  rank.transport.SetWaitLimits({kForever, nullptr, kLimit});
  Barrier(rank);
  std::array<char, kParts + 1> bytes{};
  if (rank.rank() == 1) {
    for (size_t i = 0; i < kParts; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      CHECK_OK(rank.transport.Wait(rank.transport.Send(0, &bytes[i], 1), Soon()));
    }
  } else if (rank.rank() == 0) {
    std::array<Transport::Request, kParts + 1> receives;
    for (size_t i = 0; i <= kParts; ++i) receives[i] = rank.transport.Receive(1, &bytes[i], 1);
    CHECK_OK(rank.transport.Wait(receives[kParts - 1], After(NowNs(), kLimit)));
    for (size_t i = 0; i + 1 < kParts; ++i) CHECK_OK(rank.transport.Wait(receives[i], Soon()));
    const TimeNs begin = NowNs();
    const Status status = rank.transport.Wait(receives[kParts], After(begin, kLimit));
    CHECK(status.code() == Code::kTransport);
    CHECK_EQ(status.message().find("e-"), std::string::npos);  // not "for 6.34e-06 s"
    CHECK(NowNs() - begin < 20 * kLimit);
    rank.transport.Post(1, "done");
    CHECK(rank.transport.Flush(Soon()));
  }
  int peer = -1;
  std::string message;
  if (rank.rank() == 1) CHECK(PollUntil(rank.transport, Soon(), &peer, &message));
}

// Rank 0's thread is stopped in a wait for longer than the limit, as if its process were stopped.
inline void GoOnAfterAStop(Rank& rank) {
  constexpr TimeNs kLimit = kSecond;
  rank.Enter("stopped");
  rank.transport.SetWaitLimits({kForever, nullptr, kLimit});
  Barrier(rank);
  char byte = 'x';
  if (rank.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3000));
    CHECK_OK(rank.transport.Wait(rank.transport.Send(0, &byte, 1), Soon()));
  } else if (rank.rank() == 0) {
    struct sigaction stop = {}, before = {};
    stop.sa_handler = [](int) {
      for (const TimeNs end = NowNs() + 2600 * kMillisecond; NowNs() < end;) usleep(1000);
    };
    stop.sa_flags = SA_RESTART;
    CHECK_EQ(sigaction(SIGUSR2, &stop, &before), 0);
    std::thread stopper([self = pthread_self()] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      pthread_kill(self, SIGUSR2);
    });
    CHECK_OK(rank.transport.Wait(rank.transport.Receive(1, &byte, 1), After(NowNs(), kLimit)));
    // Later waits keep their deadlines.
    const TimeNs begin = NowNs();
    CHECK(!rank.transport.Wait(rank.transport.Receive(1, &byte, 1), After(begin, kLimit)).ok());
    CHECK(NowNs() - begin < 10 * kLimit);
    stopper.join();
    CHECK_EQ(sigaction(SIGUSR2, &before, nullptr), 0);
    rank.transport.Post(1, "done");
    CHECK(rank.transport.Flush(Soon()));
  }
  int peer = -1;
  std::string message;
  if (rank.rank() == 1) CHECK(PollUntil(rank.transport, Soon(), &peer, &message));
}

}  // namespace hororing_test
