// Requests that are submitted and awaited together, as gradients are.
#include <sched.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "engine_world.h"

namespace hororing_test {
namespace {

TEST(many_requests_are_submitted_and_awaited_together) {
  for (int size : {1, 2, 3}) {
    Play(size, {}, [](Player& player) {
      constexpr size_t kCount = 40;
      for (int round = 0; round < 3; ++round) {
        std::vector<std::vector<float>> data(kCount);
        std::array<int64_t, kCount> handles{};
        for (size_t i = 0; i < kCount; ++i) {
          data[i].assign(i % 5, static_cast<float>(player.rank + 1));
          const std::string name = "t" + std::to_string(i);
          CHECK_OK(player.Submit(name, data[i], ReduceOp::kSum, &handles[i]));
        }
        bool all_ok = false;
        const HandleState state =
            player.engine->WaitMany(handles.data(), kCount, kTestTimeout, &all_ok);
        CHECK(state == HandleState::kDone);
        CHECK(all_ok);
        const auto sum = static_cast<float>(player.size * (player.size + 1) / 2);
        for (size_t i = 0; i < kCount; ++i) {
          for (float value : data[i]) CHECK_EQ(value, sum);
          CHECK(player.handles->Poll(handles[i]) == HandleState::kUnknown);  // released
        }
      }
    });
  }
}

TEST(persistent_requests_start_by_their_ids_up_to_one_that_must_be_submitted) {
  for (int size : {1, 2, 3}) {
    Play(size, {}, [](Player& player) {
      constexpr size_t kCount = 4;
      const std::array<std::string, kCount> names{"a", "b", "c", "d"};
      std::array<std::vector<float>, kCount> data;
      std::array<int64_t, kCount> handles{};
      std::array<uint64_t, kCount> ids{};
      std::array<uintptr_t, kCount> addresses{};
      const auto fill = [&] {
        for (size_t i = 0; i < kCount; ++i) {
          data[i].assign(3, static_cast<float>(player.rank + 1));
          addresses[i] = reinterpret_cast<uintptr_t>(data[i].data());
        }
      };
      const auto submit = [&](size_t i, ReduceOp op = ReduceOp::kSum) {
        auto entry = Player::Entry(names[i], data[i], op);
        CHECK_OK(player.engine->Submit(&entry, false, &handles[i], &ids[i]));
      };
      const auto start = [&] {
        std::array<Restart, kCount> restarts;
        for (size_t i = 0; i < kCount; ++i) restarts[i].id = ids[i];
        return player.engine->Start(restarts.data(), addresses.data(), kCount, handles.data());
      };
      const auto wait = [&] {
        bool all_ok = false;
        const HandleState state =
            player.engine->WaitMany(handles.data(), kCount, kTestTimeout, &all_ok);
        CHECK(state == HandleState::kDone && all_ok);
        const auto sum = static_cast<float>(player.size * (player.size + 1) / 2);
        for (const auto& each : data) CHECK(each == std::vector<float>(3, sum));
      };
      CHECK_EQ(start(), size_t{0});
      for (int round = 0; round < 2; ++round) {
        fill();
        for (size_t i = 0; i < kCount; ++i) {
          submit(i);
          CHECK_EQ(ids[i] != 0, round == 1);
        }
        wait();
      }
      for (int round = 0; round < 3; ++round) {
        fill();
        std::vector<float> go(1, 0.0f);
        if (player.rank != 0) CHECK_OK(player.Allreduce("go", go));
        CHECK_EQ(start(), kCount);
        if (player.rank == 0) {
          // The requests stay active until the others start.
          const std::array<int64_t, kCount> first = handles;
          const size_t more = start();
          handles = first;
          if (player.size > 1) CHECK_EQ(more, size_t{0});
          CHECK_OK(player.Allreduce("go", go));
        }
        wait();
      }
      fill();
      addresses[2] = 0;  // no memory
      CHECK_EQ(start(), size_t{2});
      for (size_t i : {0, 1}) CHECK_OK(player.Wait(handles[i]));
      const uint64_t b = ids[1];
      submit(1, ReduceOp::kMax);  // from now on the name has another request
      CHECK_EQ(ids[1], uint64_t{0});
      CHECK_OK(player.Wait(handles[1]));
      fill();
      ids[1] = b;
      CHECK_EQ(start(), size_t{1});
      CHECK_OK(player.Wait(handles[0]));
      std::vector<float> last(1, 0.0f);
      CHECK_OK(player.Allreduce("all are here", last));
      CHECK(player.engine->Shutdown("", kTestTimeout));
      CHECK_EQ(start(), size_t{0});
    });
  }
}

TEST(a_table_knows_requests_by_their_ids_while_none_is_in_flight) {
  HandleTable handles;
  TensorTable table(&handles);
  std::vector<float> data(3);
  int64_t handle = 0;
  uint64_t id = 0;
  std::vector<TensorEntry*> taken;
  const auto submit = [&](size_t elements) {
    data.resize(elements);
    std::unique_ptr<TensorEntry> entry = Player::Entry("a", data, ReduceOp::kSum, 1);
    const Request request = entry->request;
    CHECK_OK(table.Submit(&entry, &handle, &id));
    table.TakeSubmitted(&taken);  // as in the loop, before it removes any
    return request;
  };
  const Request three = submit(3);
  const std::string key = Key(three);
  CHECK_EQ(table.IdOf(three), uint64_t{0});
  table.Define(7, three, {1, 2});
  CHECK_EQ(table.IdOf(three), uint64_t{7});
  CHECK(table.Remove(key) != nullptr);
  CHECK(table.Find(key) == nullptr && table.Remove(key) == nullptr);
  CHECK(table.Titles({"NEGOTIATE"}).empty());
  CHECK(table.FindRecord(7)->agreed == three && table.FindRecord(7)->rows.size() == 2);

  const Request four = submit(4);  // has no id in this form
  CHECK_EQ(table.IdOf(four), uint64_t{0});
  table.Find(key)->cache_id = 8;
  table.Define(8, four, {});
  CHECK(table.FindRecord(7) == nullptr);
  table.Forget(8);
  table.Forget(8);
  CHECK(table.FindRecord(8) == nullptr && table.IdOf(four) == 0);
  CHECK_EQ(table.Find(key)->cache_id, uint64_t{0});
  CHECK(table.Remove(key) != nullptr);

  table.Define(9, three, {});  // as for a joined rank
  CHECK(table.RemoveSet(2).empty());
  CHECK(table.FindRecord(9) != nullptr);
  static_cast<void>(submit(3));
  CHECK_EQ(table.RemoveSet(1).size(), size_t{1});
  CHECK(table.FindRecord(9) == nullptr);
  table.Define(10, three, {});
  CHECK(table.RemoveSet(1).empty());
  CHECK(table.FindRecord(10) == nullptr && table.Find(key) == nullptr);
}

TEST(the_loop_is_rung_once_until_it_looks) {
  const auto world = MakeInprocWorld(1, 20 * kMicrosecond);
  Eventcount& events = *world[0]->eventcount();
  Mailbox mailbox;
  mailbox.Attach(world[0].get());
  const auto rings = [&] {
    const uint32_t before = events.Epoch();
    mailbox.NotifySubmitted();
    return events.Epoch() != before;
  };
  CHECK(rings());
  CHECK(!rings());
  mailbox.BeginScan();
  CHECK(rings());
  mailbox.BeginScan();
  mailbox.poll_by = 1;  // the loop has promised to poll
  CHECK(!rings());
  mailbox.poll_by = kForever;
  CHECK(rings());
  mailbox.Attach(nullptr);
}

TEST(a_table_starts_what_is_inactive_and_has_an_id_of_its_own) {
  HandleTable handles;
  TensorTable table(&handles), other(&handles);
  std::vector<float> data(2, 1.0f);
  std::vector<TensorEntry*> taken;
  std::map<std::string, uint64_t> ids;
  int64_t handle = 0;
  const auto submit = [&](const char* name) {
    std::unique_ptr<TensorEntry> entry = Player::Entry(name, data, ReduceOp::kSum);
    CHECK_OK(table.Submit(&entry, &handle, &ids[name]));
    CHECK(handles.Poll(handle) == HandleState::kPending);
  };
  const auto start = [&](TensorTable& of, const char* name) {
    const auto address = reinterpret_cast<uintptr_t>(data.data());
    const Restart restart{ids[name], std::nullopt};
    return of.Start(&restart, &address, 1, &handle) == 1;
  };
  // Takes all submitted entries, and completes them.
  const auto take = [&] {
    table.TakeSubmitted(&taken);
    table.Deactivate(taken);
    return taken.size();
  };
  for (const char* name : {"a", "b", "c"}) submit(name);
  CHECK_EQ(take(), size_t{3});
  for (uint64_t round = 0; round < 2; ++round) {
    const uint64_t a = 2 * round + 1, b = 2 * round + 2;
    for (const auto& [name, id] : {std::pair("a", a), std::pair("b", b)}) {
      submit(name);
      table.Define(id, Player::Entry(name, data, ReduceOp::kSum)->request, {});
      table.Find(name)->cache_id = id;
      CHECK(!start(table, name));
    }
    CHECK_EQ(take(), size_t{2});
    submit("c");
    submit("a");
    submit("b");
    CHECK_EQ(take(), size_t{3});
    CHECK(start(table, "b") && !start(table, "b") && !start(other, "a"));
    CHECK_EQ(take(), size_t{1});
    table.Forget(b);
    CHECK(!start(table, "b"));
    CHECK(start(table, "a"));
    table.Forget(a);  // while it is active
    CHECK_EQ(table.Find("a")->cache_id, uint64_t{0});
    CHECK_EQ(take(), size_t{1});
    CHECK(!start(table, "a"));
  }
}

TEST(who_waits_for_many_hears_that_one_has_failed_and_may_ask_each) {
  Play(2, {}, [](Player& player) {
    std::vector<float> good(3, 1.0f), bad(player.rank == 1 ? 5u : 4u, 1.0f), late(3, 1.0f),
        both(1, 0.0f);
    std::array<int64_t, 3> handles{};
    CHECK_OK(player.Submit("good", good, ReduceOp::kSum, &handles[0]));
    CHECK_OK(player.Submit("bad", bad, ReduceOp::kSum, &handles[1]));
    bool all_ok = true;
    if (player.rank == 0) {
      CHECK_OK(player.Submit("late", late, ReduceOp::kSum, &handles[2]));
      const HandleState state = player.engine->WaitMany(handles.data(), 3, kMillisecond, &all_ok);
      CHECK(state == HandleState::kPending);
      CHECK(!all_ok);
    }
    CHECK_OK(player.Allreduce("rank 0 has waited", both));
    if (player.rank == 1) CHECK_OK(player.Submit("late", late, ReduceOp::kSum, &handles[2]));
    CHECK(player.engine->WaitMany(handles.data(), 3, kTestTimeout, &all_ok) == HandleState::kDone);
    CHECK(!all_ok);
    CHECK_OK(player.Wait(handles[0]));
    CHECK(player.Wait(handles[1]).code() == Code::kMismatch);
    CHECK_OK(player.Wait(handles[2]));
  });
}

TEST(a_waiter_for_many_of_which_one_is_released_is_told) {
  HandleTable table;
  std::array<int64_t, 2> handles{};
  table.Create(handles.data(), handles.size());
  std::thread waiter([&] {
    bool all_ok = true;
    CHECK(table.WaitMany(handles.data(), 2, kTestTimeout, &all_ok) == HandleState::kDone);
    CHECK(!all_ok);
  });
  table.Complete(handles[0], Status::Ok(), {});
  CHECK(table.Release(handles[1]));
  waiter.join();
  table.Complete(handles[1], Status::Ok(), {});
  CHECK(table.Poll(handles[0]) == HandleState::kDone);
}

// A submitter wakes the loop unless the loop has promised to poll (Mailbox::Submitted). If a wake
// were lost, nothing else would find the request: there are no periodic checks here and, with one
// rank, no messages.
TEST(every_request_that_nobody_waits_for_wakes_a_loop_that_does_not_look_by_itself) {
  constexpr TimeNs kLost = 10 * kSecond;
  constexpr size_t kMost = 20;
  EngineConfig config;
  config.checks_ns = kForever;
  for (int size : {1, 2}) {
    // By rank. They outlive the engines, which may still hold lost requests.
    std::vector<std::vector<std::vector<float>>> all(
        2, std::vector<std::vector<float>>(kMost, std::vector<float>(1, 1.0f)));
    Play(size, config, [&all](Player& player) {
      std::mt19937 same(Seed()), own(Seed() + static_cast<unsigned>(player.rank));
      std::vector<std::vector<float>>& tensors = all[static_cast<size_t>(player.rank)];
      std::vector<int64_t> handles(kMost);
      const auto done = [&](int64_t handle) {
        const TimeNs deadline = After(NowNs(), kLost);
        while (player.handles->Poll(handle) == HandleState::kPending && NowNs() < deadline)
          sched_yield();
        const bool found = player.handles->Poll(handle) == HandleState::kDone;
        player.handles->Release(handle);
        return found;
      };
      const auto submit = [&](size_t i) {
        return player.Submit(std::to_string(i), tensors[i], ReduceOp::kMax, &handles[i]).ok();
      };
      bool found = true;
      for (int round = 0; round < (player.size == 1 ? 2000 : 500) && found; ++round) {
        // A burst, after which the loop polls, and then requests that come just too slowly for it
        // to keep polling. Each may come while the loop stops polling, or while a caller runs it.
        const size_t burst = same() % 6, waited_for = same() % (4 * kMost);
        for (size_t i = 0; i < kMost && found; ++i) {
          const TimeNs pause = own() % 32 == 0 ? 300 : i < burst ? 0 : 6 + own() % 12;
          for (const TimeNs until = NowNs() + pause * kMicrosecond; NowNs() < until;) {
          }
          found = submit(i);
          if (i == waited_for) found &= player.Wait(std::exchange(handles[i], 0)).ok();
        }
        for (size_t i = 0; i < kMost && found; ++i) found = handles[i] == 0 || done(handles[i]);
      }
      CHECK(found);
    });
  }
}

}  // namespace
}  // namespace hororing_test
