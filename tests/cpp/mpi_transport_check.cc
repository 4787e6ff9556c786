// Rung 3: the transports that MakeWorld makes, under mpirun. Every rank runs every case.
//
//   mpirun -np 3 ./mpi_transport_check                the transport of HORORING's default, "auto"
//   mpirun -np 3 ./mpi_transport_check over_mpi       only the cases with this in their names
//
// CMake defines HORORING_MPI_LIBRARY, the layer for MPI; the program itself is linked to MPI.
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "transport/factory.h"
#include "transport_conformance.h"
#include "world.h"

using namespace hororing;
using namespace hororing_test;

namespace {

Status Make(const std::string& transport, World* world, const std::vector<int>& ranks = {}) {
  WorldOptions options;
  options.launched = true;
  options.transport = transport;
  options.mpi_library_path = HORORING_MPI_LIBRARY;
  options.mpi.ranks = ranks;
  options.spin_ns = 20 * kMicrosecond;
  options.timeout_ns = 60 * kSecond;
  signal(SIGPIPE, SIG_IGN);
  return MakeWorld(options, world);
}

// Runs body(rank) over a fresh world of all processes.
template <typename Body>
void OverWorld(const std::string& transport, Body body) {
  World world;
  const Status made = Make(transport, &world);
  CHECK_OK(made);
  if (!made.ok()) return;
  Watchdog watchdog(world.transport->size(), kWorldLimit);
  Rank rank{*world.transport, watchdog};
  body(rank);
}

// Every process has its own seed; rank 0's counts.
unsigned CommonSeed(Rank& rank) {
  unsigned seed = Seed();
  for (int peer = 1; peer < rank.size(); ++peer) {
    if (rank.rank() == 0) {
      CHECK_OK(rank.transport.Wait(rank.transport.Send(peer, &seed, sizeof seed), Soon()));
    } else if (rank.rank() == peer) {
      CHECK_OK(rank.transport.Wait(rank.transport.Receive(0, &seed, sizeof seed), Soon()));
    }
  }
  return seed;
}

void RunConformance(Rank& rank) {
  const unsigned seed = CommonSeed(rank);
  for (unsigned round = 0; round < 3; ++round) {
    ExchangeRandomMessages(rank, seed + round, 300, 3 << 20);
  }
  ExchangeWithAll(rank, (5 << 20) + 13);
  ExchangeWithAll(rank, 1);
  ExchangeControlBesideData(rank, 20 << 20);
  // 200 MB in total.
  if (rank.size() > 1) {
    ExchangeControl(rank, static_cast<uint64_t>(2000 / (rank.size() * (rank.size() - 1))),
                    100 << 10);
  }
  ExchangeControl(rank, 2000, 24);
  WakeManyTimes(rank, 20000);
}

}  // namespace

TEST(all_ranks_of_one_host_share_memory) {
  World world;
  CHECK_OK(Make("auto", &world));
  const bool alone = world.topology.size == 1;
  CHECK_EQ(std::string(world.transport->name()), std::string(alone ? "inproc" : "shm"));
  CHECK_EQ(world.note, std::string());
  CHECK_EQ(world.topology.local_size, world.topology.size);
  CHECK_EQ(world.topology.cross_size, 1);
  CHECK(world.topology.homogeneous);
  CHECK_EQ(world.transport->rank(), world.topology.rank);
  Watchdog watchdog(world.topology.size, kWorldLimit);
  Rank rank{*world.transport, watchdog};
  Barrier(rank);
  DIR* directory = opendir("/dev/shm");
  const std::string mine = "hororing." + std::to_string(getpid()) + ".";
  while (const dirent* entry = readdir(directory)) {
    CHECK(std::string(entry->d_name).rfind(mine, 0) != 0);
  }
  closedir(directory);
}

TEST(shared_memory_between_processes_conforms) { OverWorld("auto", RunConformance); }
TEST(over_mpi_the_transport_conforms) { OverWorld("mpi", RunConformance); }

TEST(over_mpi_control_messages_may_be_longer_than_one_of_mpi) {
  OverWorld("mpi", [](Rank& rank) { ExchangeControl(rank, 1, (65 << 20) + 5); });
}

TEST(over_mpi_an_idle_sleep_costs_little) {
  OverWorld("mpi", [](Rank& rank) {
    double cpu_seconds = 0;
    SleepIdly(rank, kSecond, &cpu_seconds);
    CHECK(cpu_seconds < 0.1);
  });
}

TEST(over_mpi_worlds_may_follow_one_another) {
  for (int i = 0; i < 30; ++i) {
    OverWorld(i % 2 == 0 ? "mpi" : "auto", [](Rank& rank) { Barrier(rank); });
  }
}

TEST(over_mpi_some_ranks_form_a_world_in_their_own_order) {
  World all;
  CHECK_OK(Make("mpi", &all));
  const int size = all.topology.size, rank_of_all = all.topology.rank;
  std::vector<int> ranks;
  for (int rank = size - 1; rank >= size / 2; --rank) ranks.push_back(rank);
  World some;
  const Status status = Make("mpi", &some, ranks);
  if (rank_of_all < size / 2) {
    CHECK(status.code() == Code::kInvalidArgument);
  } else {
    CHECK_OK(status);
    CHECK_EQ(some.topology.size, static_cast<int>(ranks.size()));
    CHECK_EQ(some.topology.rank, size - 1 - rank_of_all);
    Watchdog watchdog(some.topology.size, kWorldLimit);
    Rank rank{*some.transport, watchdog};
    ExchangeWithAll(rank, 1000);
  }
  World wrong;
  CHECK(Make("mpi", &wrong, {0, size}).code() == Code::kInvalidArgument);
  Watchdog watchdog(size, kWorldLimit);
  Rank rank{*all.transport, watchdog};
  Barrier(rank);
}

TEST(over_mpi_different_wishes_are_an_error_on_every_rank) {
  World all;
  CHECK_OK(Make("mpi", &all));
  World other;
  if (all.topology.size > 1) {
    const Status status = Make(all.topology.rank == 0 ? "shm" : "auto", &other);
    CHECK(status.code() == Code::kMismatch);
    CHECK(status.message().find("rank 0: shm; rank 1: auto") != std::string::npos);
  }
  CHECK(Make("smoke", &other).message().find("choose auto, shm, tcp or mpi") != std::string::npos);
}

TEST(over_mpi_a_deadline_names_the_rank_and_frees_the_buffers) {
  World all;
  CHECK_OK(Make("mpi", &all));
  {
    World world;
    CHECK_OK(Make("mpi", &world));
    Transport& transport = *world.transport;
    const std::string late(1 << 20, 'z');
    if (world.topology.rank == 0 && world.topology.size > 1) {
      std::string buffer(1 << 20, '-');
      const Transport::Request receiving = transport.Receive(1, buffer.data(), buffer.size());
      const Transport::Request sending = transport.Send(1, late.data(), late.size());
      const Status status = transport.Wait(receiving, After(NowNs(), 50 * kMillisecond));
      CHECK(status.code() == Code::kTransport);
      CHECK_EQ(status.rank(), 1);
      CHECK(status.message().find("no progress from rank(s) 1") != std::string::npos);
      CHECK_EQ(transport.Wait(sending, kForever).message(), status.message());
      transport.Post(1, "gave up");
      CHECK(transport.Flush(Soon()));
      for (int i = 0; i < 50; ++i) transport.Sleep(After(NowNs(), kMillisecond));
      CHECK(buffer == std::string(1 << 20, '-'));
    } else if (world.topology.rank == 1) {
      int peer = -1;
      std::string message;
      CHECK(PollUntil(transport, Soon(), &peer, &message));
      const Transport::Request sending = transport.Send(0, late.data(), late.size());
      (void)transport.Wait(sending, After(NowNs(), 100 * kMillisecond)).ok();
    }
  }
  // Leftovers of the last world must not disturb this one.
  Watchdog watchdog(all.topology.size, kWorldLimit);
  Rank rank{*all.transport, watchdog};
  Barrier(rank);
  ExchangeWithAll(rank, 1 << 20);
}

TEST(over_mpi_any_thread_can_end_every_kind_of_wait) {
  for (const char* transport : {"mpi", "auto"}) {
    World all;
    CHECK_OK(Make("mpi", &all));
    Watchdog watchdog(all.topology.size, kWorldLimit);
    Rank rank{*all.transport, watchdog};
    for (const EndlessWait& each : kEndlessWaits) {
      if (rank.size() < 3) break;
      OverWorld(transport,
                [&](Rank& revoked) { EndByRevoke(revoked, each, [&] { Barrier(rank); }); });
    }
  }
}

TEST(over_mpi_a_rank_that_was_stopped_while_it_waited_has_its_whole_limit_again) {
  World all;
  CHECK_OK(Make("mpi", &all));
  if (all.topology.size > 1) OverWorld("mpi", GoOnAfterAStop);
  if (all.topology.size > 1) OverWorld("mpi", WaitWhileDataMoves);
  Watchdog watchdog(all.topology.size, kWorldLimit);
  Rank rank{*all.transport, watchdog};
  Barrier(rank);
}

TEST(over_mpi_an_announced_failure_ends_every_wait_with_the_reason) {
  World all, world;
  CHECK_OK(Make("mpi", &all));
  CHECK_OK(Make("mpi", &world));
  Transport& transport = *world.transport;
  Watchdog watchdog(world.topology.size, kWorldLimit);
  Rank rank{*all.transport, watchdog};
  Barrier(rank);  // a failure may reach a rank that still makes its world
  watchdog.Enter(world.topology.rank, "failing");
  const int last = world.topology.size - 1;
  if (last == 0) return;
  if (world.topology.rank == last) {
    transport.AnnounceFailure({Code::kPeerLost, "the disk is full"});
    CHECK(transport.Flush(Soon()));
    return;
  }
  const std::string expected = "rank " + std::to_string(last) + " failed: the disk is full";
  char byte = 0;
  if (world.topology.rank % 2 == 0) {
    const int peer = world.topology.rank == 0 ? last : 0;
    const Status status = transport.Wait(transport.Receive(peer, &byte, 1), kForever);
    CHECK(status.code() == Code::kPeerLost);
    CHECK_EQ(status.rank(), last);
    CHECK_EQ(status.message(), expected);
  } else {
    while (transport.CheckPeers().ok()) transport.Sleep(kForever);
    CHECK_EQ(transport.CheckPeers().message(), expected);
  }
}

// Last, because MPI does not work afterwards.
TEST(over_mpi_the_end) {
  MpiInfo info;
  CHECK_OK(DescribeMpi(HORORING_MPI_LIBRARY, &info));
  CHECK(info.library.find('\0') == std::string::npos);
  CHECK(!info.library.empty());
  CHECK(info.initialized);
  CHECK_EQ(info.thread_level, std::string("multiple"));
  FinalizeMpi();
  CHECK_OK(DescribeMpi(HORORING_MPI_LIBRARY, &info));
  if (!info.initialized) return;
  // A rank that has lost another must not wait for it in MPI_Finalize. Here all are alive, and
  // mpirun requires MPI_Finalize.
  using Finalize = int (*)();
  const auto finalize = reinterpret_cast<Finalize>(dlsym(RTLD_DEFAULT, "MPI_Finalize"));
  CHECK(finalize != nullptr);
  if (finalize != nullptr) finalize();
}
