// Rung 2: the shared-memory transport, with ranks as threads and as forked processes; worlds,
// topologies, and errors at the start.
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "faulty_transport.h"
#include "transport/factory.h"
#include "transport/shm/segment.h"
#include "transport/shm/shm_transport.h"
#include "transport_conformance.h"
#include "world.h"

using namespace hororing;
using namespace hororing_test;

namespace {

// This program replaces sched_yield: the number of calls so far, and the duration of each; if it is
// negative, the kernel's sched_yield runs.
std::atomic<int> core_offers{0};
std::atomic<TimeNs> offer_taken_ns{-1};

}  // namespace

extern "C" int sched_yield() noexcept {
  ++core_offers;
  const TimeNs taken = offer_taken_ns;
  if (taken < 0) return static_cast<int>(syscall(SYS_sched_yield));
  for (const TimeNs until = NowNs() + taken; NowNs() < until;) {
  }
  return 0;
}

namespace {

const std::vector<int> kWorldSizes = hororing_test::AllOrFew<int>({1, 2, 3, 5, 8}, {2, 5});

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The names in /dev/shm of one creator, because tests may run in parallel.
std::vector<std::string> LeftInShm(int creator) {
  std::vector<std::string> names;
  const std::string prefix = "hororing." + std::to_string(creator) + ".";
  if (DIR* directory = opendir("/dev/shm")) {
    while (const dirent* entry = readdir(directory)) {
      if (std::string(entry->d_name).rfind(prefix, 0) == 0) names.push_back(entry->d_name);
    }
    closedir(directory);
  }
  return names;
}

// Forks a process per rank, which attaches to the segment of the test. `body` returns the exit code
// of its rank. A rank that hangs dies of SIGALRM.
std::vector<pid_t> ForkWorld(const std::string& name, const ShmSegment::Geometry& geometry,
                             int (*body)(ShmTransport&)) {
  std::vector<pid_t> pids;
  for (int rank = 0; rank < geometry.ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      int code = 100;
      {
        std::shared_ptr<ShmSegment> segment;
        if (ShmSegment::Attach(name, geometry, &segment).ok()) {
          ShmTransport transport(segment, rank, 20 * kMicrosecond);
          code = body(transport);
        }
      }
      _exit(code);
    }
    pids.push_back(pid);
  }
  return pids;
}

int ExitCode(pid_t pid) {
  int status = 0;
  if (waitpid(pid, &status, 0) != pid) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

// A barrier: returns when all ranks have attached and arrived.
bool Meet(ShmTransport& transport) {
  for (int step = 1; step < transport.size(); step *= 2) {
    const int size = transport.size();
    char token = 1, got = 0;
    if (!SendReceive(transport, (transport.rank() + step) % size, &token, 1,
                     (transport.rank() - step + size) % size, &got, 1, Soon())
             .ok()) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST(random_messages_between_random_pairs_arrive_intact) {
  for (int size : kWorldSizes) {
    for (unsigned round = 0; round < (hororing_test::kFew ? 1 : 3); ++round) {
      RunWorld(size,
               [&](Rank& rank) { ExchangeRandomMessages(rank, Seed() + round, 400, 600 << 10); });
    }
  }
}

TEST(messages_larger_than_the_pipes_flow_between_all_pairs_at_once) {
  for (int size : kWorldSizes) {
    RunWorld(size, [](Rank& rank) { ExchangeWithAll(rank, (1 << 20) + 13); });
  }
}

TEST(zero_bytes_are_a_message) {
  RunWorld(3, [](Rank& rank) {
    const int next = (rank.rank() + 1) % 3, previous = (rank.rank() + 2) % 3;
    CHECK_OK(SendReceive(rank.transport, next, nullptr, 0, previous, nullptr, 0, Soon()));
    Barrier(rank);
  });
}

TEST(control_messages_of_any_size_travel_beside_data) {
  for (int size : kWorldSizes) {
    RunWorld(size, [](Rank& rank) { ExchangeControlBesideData(rank, 3 << 20); });
  }
}

TEST(a_thousand_large_control_messages_both_ways_do_not_deadlock) {
  RunWorld(2,
           [](Rank& rank) { ExchangeControl(rank, hororing_test::kFew ? 200 : 1000, 100 << 10); });
  RunWorld(5, [](Rank& rank) { ExchangeControl(rank, 50, 100 << 10); });
  RunWorld(8, [](Rank& rank) { ExchangeControl(rank, 500, 24); });
}

TEST(a_million_wakes_are_not_lost) {
  RunWorld(1, [](Rank& rank) { WakeManyTimes(rank, 500000); }, 0);
  RunWorld(1, [](Rank& rank) { WakeManyTimes(rank, 500000); }, kDefaultSpin);
}

TEST(messages_wake_ranks_that_sleep_without_spinning) {
  // A token goes around; all other ranks wait on the futex. A lost wake causes a hang.
  RunWorld(
      3,
      [](Rank& rank) {
        rank.Enter("token");
        const int next = (rank.rank() + 1) % 3;
        if (rank.rank() == 0) rank.transport.Post(next, "token");
        for (int round = 0; round < 5000; ++round) {
          int peer = -1;
          std::string message;
          while (!rank.transport.Poll(&peer, &message)) rank.transport.Sleep(kForever);
          if (rank.rank() != 0 || round < 4999) rank.transport.Post(next, message);
        }
        Barrier(rank);
      },
      0);
}

TEST(an_idle_sleep_ends_in_time_and_costs_no_processor) {
  RunWorld(2, [](Rank& rank) {
    double cpu_seconds = 0;
    SleepIdly(rank, 300 * kMillisecond, &cpu_seconds);
    CHECK(cpu_seconds < 0.03);
  });
}

// To a rank, it looks like other work on its core: every sched_yield takes `offer_taken_ns`.
TEST(a_rank_that_shares_its_core_offers_it_before_it_polls) {
  RunWorld(
      1,
      [](Rank& rank) {
        // The sleep is shorter than the time for which a rank with its own core polls.
        const auto offers = [&] {
          const int before = core_offers;
          rank.transport.Sleep(After(NowNs(), 2 * kMicrosecond));
          return core_offers - before;
        };
        constexpr int kSleeps = 1000;  // many, because any of them may be interrupted
        int with = 0, without = 0;
        offer_taken_ns = 0;
        for (int i = 0; i < kSleeps; ++i) with += offers() > 0;
        CHECK_EQ(with, 0);
        offer_taken_ns = 50 * kMicrosecond;
        const TimeNs end = After(NowNs(), 10 * kSecond);
        for (const int before = core_offers; core_offers == before && NowNs() < end;) {
          rank.transport.Sleep(After(NowNs(), kMillisecond));
        }
        for (int i = 0; i < kSleeps; ++i) with += offers() > 0;
        CHECK(with > 0);
        offer_taken_ns = 0;  // the rank has its own core again, and notices it
        for (int i = 0; i < kSleeps; ++i) without += offers() == 0;
        CHECK(without > kSleeps / 2);
        offer_taken_ns = -1;
      },
      kSecond);
}

TEST(an_announced_failure_ends_every_wait_with_the_reason) {
  for (int size : {2, 3, 5, 8}) {
    RunWorld(size, [](Rank& rank) {
      if (rank.rank() == 1)
        return rank.transport.AnnounceFailure({Code::kPeerLost, "the disk is full"});
      const TimeNs begin = NowNs();
      char byte = 0;
      rank.Enter("waiting for a rank that fails");
      // The peer has not failed; odd ranks sleep.
      const int peer = rank.rank() == 0 ? rank.size() - 1 : 0;
      if (rank.rank() % 2 == 0) {
        const Status status = rank.transport.Wait(rank.transport.Receive(peer, &byte, 1), kForever);
        CHECK(status.code() == Code::kPeerLost);
        CHECK_EQ(status.rank(), 1);
        CHECK_EQ(status.message(), std::string("rank 1 failed: the disk is full"));
      } else {
        while (rank.transport.CheckPeers().ok()) rank.transport.Sleep(kForever);
        CHECK_EQ(rank.transport.CheckPeers().rank(), 1);
      }
      CHECK(NowNs() - begin < 10 * kSecond);
      // Ranks that fail because of rank 1 do not replace the reason.
      rank.transport.AnnounceFailure(rank.transport.CheckPeers());
      CHECK_EQ(rank.transport.CheckPeers().message(),
               std::string("rank 1 failed: the disk is full"));
    });
  }
}

TEST(any_thread_can_end_every_kind_of_wait) {
  std::vector<EndlessWait> waits(std::begin(kEndlessWaits), std::end(kEndlessWaits));
  waits.push_back({"shared memory", [](Rank& rank) {
                     return dynamic_cast<ShmTransport&>(rank.transport)
                         .WaitUntil([] { return false; }, [] { return std::vector<int>{1}; },
                                    kForever);
                   }});
  for (const EndlessWait& each : waits) {
    std::atomic<int> ended{0};
    RunWorld(3, [&](Rank& rank) {
      EndByRevoke(rank, each, [&] {
        ++ended;
        while (ended < 3) std::this_thread::yield();
      });
    });
  }
}

TEST(a_rank_that_was_stopped_while_it_waited_has_its_whole_limit_again) {
  RunWorld(2, GoOnAfterAStop);
  RunWorld(2, WaitWhileDataMoves);
}

TEST(long_reasons_are_cut) {
  RunWorld(2, [](Rank& rank) {
    if (rank.rank() == 1)
      return rank.transport.AnnounceFailure({Code::kPeerLost, std::string(5000, 'y')});
    while (rank.transport.CheckPeers().ok()) rank.transport.Sleep(kForever);
    CHECK(Contains(rank.transport.CheckPeers().message(), "rank 1 failed: yyyy"));
    CHECK(Contains(rank.transport.CheckPeers().message(), "yyy..."));
    CHECK(rank.transport.CheckPeers().message().size() < 256);
  });
}

TEST(a_deadline_names_the_rank_breaks_the_data_plane_and_frees_the_buffers) {
  std::atomic<bool> gave_up{false};
  RunWorld(3, [&](Rank& rank) {
    Barrier(rank);
    const std::string late(1 << 20, 'z');
    if (rank.rank() == 2) return rank.Enter("not involved");
    if (rank.rank() == 1) {
      while (!gave_up.load()) std::this_thread::yield();
      const Transport::Request sending = rank.transport.Send(0, late.data(), late.size());
      CHECK(!rank.transport.Wait(sending, After(NowNs(), 10 * kMillisecond)).ok());
      return;
    }
    std::string buffer(1 << 20, '-');
    const Transport::Request receiving = rank.transport.Receive(1, buffer.data(), buffer.size());
    const Transport::Request sending = rank.transport.Send(1, late.data(), late.size());
    const Status first = rank.transport.Wait(receiving, After(NowNs(), 50 * kMillisecond));
    CHECK(first.code() == Code::kTransport);
    CHECK_EQ(first.rank(), 1);
    CHECK(Contains(first.message(), "no progress from rank(s) 1 for "));
    CHECK_EQ(rank.transport.Wait(sending, kForever).message(), first.message());
    gave_up = true;
    for (int i = 0; i < 20; ++i) {
      char byte = 0;
      const Transport::Request again = rank.transport.Receive(1, &byte, 1);
      CHECK_EQ(rank.transport.Wait(again, kForever).message(), first.message());
      rank.transport.Sleep(After(NowNs(), kMillisecond));
      CHECK_EQ(byte, '\0');
    }
    CHECK(buffer == std::string(1 << 20, '-'));
  });
}

TEST(an_announced_failure_is_the_same_kind_of_error_to_all) {
  for (const Code code : {Code::kTransport, Code::kStalled, Code::kInternal}) {
    CHECK(Announced(Status(code, "why", 2), 1).code() == code);
  }
  for (size_t padding = 0; padding < 3; ++padding) {  // a character of three bytes is not cut
    std::string text(padding, 'x');
    for (int i = 0; i < 100; ++i) text += "\u65e5";
    const std::string cut = Announced(Status(Code::kTransport, text, 1), 1).message();
    const std::string prefix = "rank 1 failed: " + std::string(padding, 'x');
    CHECK(cut.size() <= 200 && cut.size() > 194);
    CHECK_EQ((cut.size() - prefix.size() - 3) % 3, size_t{0});
  }
  // An error of this rank's own call.
  CHECK(Announced(Status(Code::kInvalidArgument, "why"), 1).code() == Code::kPeerLost);
  RunWorld(2, [](Rank& rank) {
    Barrier(rank);
    if (rank.rank() == 1) return rank.transport.AnnounceFailure({Code::kTransport, "why", 0});
    char byte = 0;
    const Status status = rank.transport.Wait(rank.transport.Receive(1, &byte, 1), Soon());
    CHECK(status.code() == Code::kTransport);
    CHECK_EQ(status.message(), std::string("why"));
  });
}

// Rank 0 waits for rank 1, which waits for rank 2, which is stopped.
TEST(a_wait_that_lasts_blames_who_gives_no_sign_of_life) {
  std::atomic<int> done{0};
  RunWorld(3, [&](Rank& rank) {
    std::vector<std::string> warnings;
    rank.transport.SetWaitLimits(
        {600 * kMillisecond, [&](const std::string& text) { warnings.push_back(text); }});
    Barrier(rank);
    while (rank.rank() == 2 && done.load() < 2) std::this_thread::yield();
    if (rank.rank() == 2) return;
    char byte = 0;
    const Transport::Request receiving = rank.transport.Receive(rank.rank() + 1, &byte, 1);
    const Status status = rank.transport.Wait(receiving, After(NowNs(), 1500 * kMillisecond));
    CHECK(status.code() == Code::kTransport);
    CHECK_EQ(status.rank(), 2);
    CHECK(Contains(status.message(), "no progress from rank(s) 2 for "));  // 1.5 s, more under load
    CHECK(!warnings.empty());
    for (const std::string& text : warnings) CHECK(Contains(text, "from rank(s) 2 for "));
    CHECK(rank.transport.Silence(1 - rank.rank()) < rank.transport.Silence(2));
    ++done;
    while (done.load() < 2) std::this_thread::yield();
  });
}

TEST(a_peer_that_left_counts_as_lost_only_for_those_who_need_it) {
  RunWorld(3, [](Rank& rank) {
    Barrier(rank);
    const std::string farewell = Content(5, 1000);
    if (rank.rank() == 2) {
      CHECK_OK(rank.transport.Wait(rank.transport.Send(0, farewell.data(), 1000), Soon()));
      rank.transport.Post(0, "last words");
      CHECK(rank.transport.Flush(Soon()));
      return;
    }
    const int other = 1 - rank.rank();
    char token = 1, got = 0;
    CHECK_OK(SendReceive(rank.transport, other, &token, 1, other, &got, 1, Soon()));
    if (rank.rank() == 0) {
      std::string buffer(1000, '-');
      CHECK_OK(rank.transport.Wait(rank.transport.Receive(2, buffer.data(), 1000), Soon()));
      CHECK(buffer == farewell);
      int peer = -1;
      std::string message;
      CHECK(PollUntil(rank.transport, Soon(), &peer, &message));
      CHECK_EQ(message, std::string("last words"));
      CHECK_OK(rank.transport.CheckPeers());
      const Status status = rank.transport.Wait(rank.transport.Receive(2, &got, 1), Soon());
      CHECK(status.code() == Code::kPeerLost);
      CHECK_EQ(status.rank(), 2);
      CHECK(Contains(status.message(), "rank 2 has shut down"));
      // More than the pipe holds, to a rank that has shut down.
      rank.transport.Post(2, std::string(1 << 20, 'm'));
      rank.transport.Post(1, "still here");
      CHECK(!rank.transport.Flush(Soon()));
    } else {
      int peer = -1;
      std::string message;
      CHECK(PollUntil(rank.transport, Soon(), &peer, &message));
      CHECK_EQ(message, std::string("still here"));
    }
  });
}

TEST(a_rank_that_dies_silently_at_operation_k_is_noticed_by_the_deadline) {
  for (int k : {0, 1, 5, 12}) {  // each step has two operations
    std::vector<std::unique_ptr<Transport>> transports = MakeInprocWorld(3, kDefaultSpin);
    const Fault fault{Fault::Kind::kDie, static_cast<uint64_t>(k), 0};
    transports[1] = std::make_unique<FaultyTransport>(std::move(transports[1]), fault);
    RunWorld(std::move(transports), [k](Rank& rank) {
      const int next = (rank.rank() + 1) % 3, previous = (rank.rank() + 2) % 3;
      char token = 1, got = 0;
      Status status;
      for (int step = 0; status.ok() && step < 100; ++step) {
        status = SendReceive(rank.transport, next, &token, 1, previous, &got, 1,
                             step < k / 2 ? Soon() : After(NowNs(), 100 * kMillisecond));
      }
      CHECK(!status.ok());
      if (rank.rank() == 1) CHECK(Contains(status.message(), "injected fault"));
    });
  }
}

TEST(ranks_may_be_slow) {
  std::vector<std::unique_ptr<Transport>> transports = MakeInprocWorld(3, kDefaultSpin);
  const Fault slow{Fault::Kind::kNone, 0, 2 * kMillisecond};
  transports[2] = std::make_unique<FaultyTransport>(std::move(transports[2]), slow);
  RunWorld(std::move(transports),
           [](Rank& rank) { ExchangeRandomMessages(rank, Seed(), 100, 300 << 10); });
}

TEST(processes_over_a_shared_segment_talk_and_leave_nothing) {
  const ShmSegment::Geometry geometry = ShmSegment::Geometry::For(3);
  std::shared_ptr<ShmSegment> segment;
  CHECK_OK(ShmSegment::Create(geometry, &segment));
  CHECK_EQ(LeftInShm(getpid()).size(), 1u);
  const std::vector<pid_t> pids = ForkWorld(segment->name(), geometry, [](ShmTransport& transport) {
    if (std::string(transport.name()) != "shm" || !Meet(transport)) return 1;
    const int next = (transport.rank() + 1) % 3, previous = (transport.rank() + 2) % 3;
    const std::string out = Content(static_cast<uint64_t>(transport.rank()), 5 << 20);
    std::string in(5 << 20, '?');
    if (!SendReceive(transport, next, out.data(), out.size(), previous, in.data(), in.size(),
                     Soon())
             .ok()) {
      return 2;
    }
    if (in != Content(static_cast<uint64_t>(previous), 5 << 20)) return 3;
    return Meet(transport) ? 0 : 4;
  });
  for (pid_t pid : pids) CHECK_EQ(ExitCode(pid), 0);
  segment->Unlink();
  CHECK(LeftInShm(getpid()).empty());
}

TEST(a_killed_process_is_noticed_and_named) {
  for (const int ranks : {3, 24}) {  // with 24, no check looks at all processes
    const ShmSegment::Geometry geometry = ShmSegment::Geometry::For(ranks);
    std::shared_ptr<ShmSegment> segment;
    CHECK_OK(ShmSegment::Create(geometry, &segment));
    const auto body = [](ShmTransport& transport) {
      if (!Meet(transport)) return 1;
      if (transport.rank() == 1) {
        kill(getpid(), SIGKILL);  // no destructor runs, and no waitpid has reaped the process yet
      }
      char byte = 0;
      const TimeNs begin = NowNs();
      const std::string died = "rank 1 (pid ";
      // Rank 0 needs the dead rank, the others wait for rank 0. Only the last rank announces.
      const int peer = transport.rank() == 0 ? 1 : 0;
      const Status status = transport.Wait(transport.Receive(peer, &byte, 1), kForever);
      if (NowNs() - begin > 10 * kSecond) return 2;
      if (status.code() != Code::kPeerLost || status.rank() != 1) return 3;
      if (status.message().rfind(died, 0) != 0) return 4;
      if (transport.rank() == transport.size() - 1) transport.AnnounceFailure(status);
      // An idle rank notices it, too.
      return transport.CheckPeers().rank() == 1 ? 0 : 5;
    };
    const std::vector<pid_t> pids = ForkWorld(segment->name(), geometry, body);
    for (size_t rank = 0; rank < pids.size(); ++rank) {
      CHECK_EQ(ExitCode(pids[rank]), rank == 1 ? 1000 + SIGKILL : 0);
    }
    segment->Unlink();
    CHECK(LeftInShm(getpid()).empty());
  }
}

TEST(a_process_that_told_its_reason_before_it_ended_is_quoted) {
  const ShmSegment::Geometry geometry = ShmSegment::Geometry::For(2);
  std::shared_ptr<ShmSegment> segment;
  CHECK_OK(ShmSegment::Create(geometry, &segment));
  const std::vector<pid_t> pids = ForkWorld(segment->name(), geometry, [](ShmTransport& transport) {
    if (!Meet(transport)) return 1;
    if (transport.rank() == 1) {
      transport.AnnounceFailure({Code::kPeerLost, "ValueError: no such file", 1});
      _exit(7);
    }
    char byte = 0;
    const Status status = transport.Wait(transport.Receive(1, &byte, 1), kForever);
    return status.message() == "rank 1 failed: ValueError: no such file" ? 0 : 2;
  });
  CHECK_EQ(ExitCode(pids[0]), 0);
  CHECK_EQ(ExitCode(pids[1]), 7);
}

TEST(what_a_killed_creator_has_left_is_removed_by_the_next_and_nothing_else) {
  const auto create_and_die = [] {
    std::shared_ptr<ShmSegment> segment;
    if (!ShmSegment::Create(ShmSegment::Geometry::For(2), &segment).ok()) _exit(1);
    raise(SIGKILL);
  };
  const pid_t killed = fork();
  if (killed == 0) create_and_die();
  CHECK_EQ(ExitCode(killed), 1000 + SIGKILL);
  CHECK(LeftInShm(killed).size() <= 1u);  // another job on this machine may have removed it
  std::shared_ptr<ShmSegment> first, second;
  CHECK_OK(ShmSegment::Create(ShmSegment::Geometry::For(2), &first));
  CHECK(LeftInShm(killed).empty());
  CHECK_OK(ShmSegment::Create(ShmSegment::Geometry::For(2), &second));
  CHECK_EQ(LeftInShm(getpid()).size(), 2u);  // their creator is alive
  first.reset();
  second.reset();
  CHECK(LeftInShm(getpid()).empty());
}

TEST(a_file_of_another_user_in_shared_memory_is_left_alone) {
  if (geteuid() != 0) return;  // only root can make such a file
  const std::string path = "/dev/shm/hororing." + std::to_string(getpid()) + ".foreign";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0666);
  CHECK(fd >= 0 && fchown(fd, 12345, 12345) == 0);
  close(fd);
  std::shared_ptr<ShmSegment> segment;
  CHECK_OK(ShmSegment::Create(ShmSegment::Geometry::For(2), &segment));
  CHECK_EQ(unlink(path.c_str()), 0);
}

TEST(a_full_shared_memory_is_an_error_with_a_remedy) {
  ShmSegment::Geometry geometry = ShmSegment::Geometry::For(2);
  geometry.slot_bytes = size_t{1} << 45;
  std::shared_ptr<ShmSegment> segment;
  const Status status = ShmSegment::Create(geometry, &segment);
  CHECK(status.code() == Code::kTransport);
  CHECK(Contains(status.message(), "/dev/shm"));
  CHECK(Contains(status.message(), "its size is"));
  CHECK(Contains(status.message(), "HORORING_TRANSPORT=mpi"));
  CHECK(segment == nullptr);
  CHECK(LeftInShm(getpid()).empty());
}

TEST(a_segment_of_another_layout_is_refused) {
  std::shared_ptr<ShmSegment> segment, attached;
  CHECK_OK(ShmSegment::Create(ShmSegment::Geometry::For(2), &segment));
  const Status status =
      ShmSegment::Attach(segment->name(), ShmSegment::Geometry::For(3), &attached);
  CHECK(Contains(status.message(), "laid out differently"));
  CHECK(!ShmSegment::Attach("/hororing.none", ShmSegment::Geometry::For(3), &attached).ok());
  segment.reset();
  CHECK(LeftInShm(getpid()).empty());
}

TEST(segments_of_up_to_64_ranks_fit_a_container) {
  for (int ranks = 1; ranks <= 64; ++ranks) {
    const ShmSegment::Geometry geometry = ShmSegment::Geometry::For(ranks);
    CHECK(geometry.total_bytes() < (62 << 20));
    CHECK(geometry.data_pipe_bytes >= 4096 && geometry.control_pipe_bytes >= 4096);
    for (size_t bytes : {geometry.data_pipe_bytes, geometry.control_pipe_bytes}) {
      CHECK_EQ(bytes & (bytes - 1), size_t{0});
    }
  }
}

TEST(topologies_number_hosts_by_their_lowest_rank) {
  const std::vector<std::string> ids = {"b|1", "a|1", "b|1", "a|1", "a|1"};
  const Topology first = MakeTopology(0, ids);
  CHECK_EQ(first.hosts.size(), 2u);
  CHECK_EQ(first.hosts[0], std::string("b"));
  CHECK(first.host_of == (std::vector<int>{0, 1, 0, 1, 1}));
  CHECK_EQ(first.local_rank, 0);
  CHECK_EQ(first.local_size, 2);
  CHECK_EQ(first.cross_size, 2);
  CHECK(!first.homogeneous);
  const Topology last = MakeTopology(4, ids);
  CHECK_EQ(last.local_rank, 2);
  CHECK_EQ(last.local_size, 3);
  CHECK_EQ(last.cross_rank, 0);  // the only rank with local rank 2
  CHECK_EQ(last.cross_size, 1);
  const Topology fourth = MakeTopology(3, ids);
  CHECK_EQ(fourth.local_rank, 1);
  CHECK_EQ(fourth.cross_rank, 1);
  CHECK(MakeTopology(1, {"a|1", "b|1", "a|1", "b|1"}).homogeneous);
  // One machine, two containers: equal names, different ids.
  CHECK_EQ(MakeTopology(1, {"a|1", "a|2"}).cross_size, 2);
}

TEST(without_a_launcher_the_world_has_one_rank_and_needs_no_mpi) {
  WorldOptions options;
  options.transport = "auto";
  options.mpi_library_path = "/nonexistent/libhororing_mpi.so";
  World world;
  CHECK_OK(MakeWorld(options, &world));
  CHECK_EQ(world.transport->size(), 1);
  CHECK_EQ(world.topology.size, 1);
  CHECK_EQ(std::string(world.transport->name()), std::string("inproc"));
  FinalizeMpi();
}

TEST(a_missing_mpi_library_is_an_error) {
  WorldOptions options;
  options.launched = true;
  options.transport = "auto";
  for (const char* path : {"", "/nonexistent/libhororing_mpi.so"}) {
    options.mpi_library_path = path;
    World world;
    const Status status = MakeWorld(options, &world);
    CHECK(status.code() == Code::kTransport);
    CHECK(Contains(status.message(), "MPI transport"));
    MpiInfo info;
    CHECK(!DescribeMpi(path, &info).ok());
  }
}
