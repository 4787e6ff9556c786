// Requests that are submitted and awaited together, as gradients are.
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "engine_world.h"

namespace hororing_test {
namespace {

using Entries = std::vector<std::unique_ptr<TensorEntry>>;
using Look = HandleTable::Look;

TEST(many_requests_are_submitted_and_awaited_together) {
  for (int size : {1, 2, 3}) {
    Play(size, {}, [](Player& player) {
      constexpr size_t kCount = 40;
      for (int round = 0; round < 3; ++round) {
        std::vector<std::vector<float>> data(kCount);
        Entries entries;
        for (size_t i = 0; i < kCount; ++i) {
          data[i].assign(i % 5, static_cast<float>(player.rank + 1));
          entries.push_back(Player::Entry("t" + std::to_string(i), data[i], ReduceOp::kSum));
        }
        std::array<int64_t, kCount> handles{};
        size_t submitted = 0;
        CHECK_OK(player.engine->SubmitMany(std::move(entries), handles.data(), &submitted));
        CHECK_EQ(submitted, kCount);
        bool all_ok = false;
        const Look look = player.engine->WaitMany(handles.data(), kCount, kPatience, &all_ok);
        CHECK(look == Look::kDone);
        CHECK(all_ok);
        const auto sum = static_cast<float>(player.size * (player.size + 1) / 2);
        for (size_t i = 0; i < kCount; ++i) {
          for (float value : data[i]) CHECK_EQ(value, sum);
          CHECK(player.handles->Poll(handles[i]) == Look::kUnknown);  // released
        }
      }
    });
  }
}

TEST(what_was_submitted_before_is_submitted_again_up_to_what_is_not_the_same) {
  for (int size : {1, 2, 3}) {
    Play(size, {}, [](Player& player) {
      const std::array<std::string, 4> names{"a", "b", "c", "d"};
      std::array<std::vector<float>, 4> data;
      std::array<int64_t, 4> handles{}, shapes{};
      std::array<OneTensor, 4> tensors{};
      const auto prepare = [&](size_t elements) {
        for (size_t i = 0; i < names.size(); ++i) {
          data[i].assign(elements, static_cast<float>(player.rank + 1));
          tensors[i] = Player::Again(names[i], data[i], ReduceOp::kSum, &shapes[i]);
        }
      };
      const auto again = [&] {
        return player.engine->SubmitAgain(tensors.data(), tensors.size(), false, handles.data());
      };
      const auto sum = static_cast<float>(player.size * (player.size + 1) / 2);
      prepare(3);
      CHECK_EQ(again(), size_t{0});
      for (auto& each : data) CHECK_OK(player.Allreduce(names[&each - data.data()], each));
      for (int round = 0; round < 3; ++round) {
        prepare(3);
        std::vector<float> go(1, 0.0f);
        if (player.rank != 0) CHECK_OK(player.Allreduce("go", go));
        CHECK_EQ(again(), size_t{4});
        if (player.rank == 0) {
          std::array<int64_t, 4> others{};
          const OneTensor* const first = tensors.data();
          // In flight, as long as the others do not go.
          if (player.size > 1) {
            CHECK_EQ(player.engine->SubmitAgain(first, 4, false, others.data()), size_t{0});
          }
          CHECK_OK(player.Allreduce("go", go));
        }
        bool all_ok = false;
        const Look look = player.engine->WaitMany(handles.data(), 4, kPatience, &all_ok);
        CHECK(look == Look::kDone && all_ok);
        for (const auto& each : data) CHECK(each == std::vector<float>(3, sum));
      }
      tensors[2].op = ReduceOp::kAverage;
      CHECK_EQ(again(), size_t{2});
      for (size_t i : {0, 1}) CHECK_OK(player.Wait(handles[i]));
      prepare(4);
      CHECK_EQ(again(), size_t{0});
      tensors[0].shape = tensors[1].shape;
      shapes[1] = 3;
      tensors[0].input = nullptr;
      CHECK_EQ(again(), size_t{0});
      std::vector<float> last(1, 0.0f);
      CHECK_OK(player.Allreduce("all are here", last));
      CHECK(player.engine->Shutdown("", kPatience));
      prepare(3);
      CHECK_EQ(again(), size_t{0});
    });
  }
}

TEST(a_table_knows_requests_by_their_ids_while_none_is_in_flight) {
  TensorTable table;
  std::vector<float> data(3);
  const auto submit = [&](size_t elements) {
    data.resize(elements);
    std::unique_ptr<TensorEntry> entry = Player::Entry("a", data, ReduceOp::kSum, 1);
    const Request request = entry->request;
    CHECK_OK(table.Add(std::move(entry)));
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
  CHECK(table.Known(7)->request == three && table.Known(7)->rows.size() == 2);

  const Request four = submit(4);  // as which it is not known
  CHECK_EQ(table.IdOf(four), uint64_t{0});
  table.Find(key)->cache_id = 8;
  table.Define(8, four, {});
  CHECK(table.Known(7) == nullptr);
  table.Forget(8);
  table.Forget(8);
  CHECK(table.Known(8) == nullptr && table.IdOf(four) == 0);
  CHECK_EQ(table.Find(key)->cache_id, uint64_t{0});
  CHECK(table.Remove(key) != nullptr);

  table.Define(9, three, {});  // by a rank that has joined
  CHECK(table.RemoveSet(2).empty());
  CHECK(table.Known(9) != nullptr);
  static_cast<void>(submit(3));
  CHECK_EQ(table.RemoveSet(1).size(), size_t{1});
  CHECK(table.Known(9) == nullptr);
  table.Define(10, three, {});
  CHECK(table.RemoveSet(1).empty());
  CHECK(table.Known(10) == nullptr && table.Find(key) == nullptr);
}

// Names that come again, in any order, with other shapes, in sets that come and go, while the cache
// forgets most of them: whichever way a request takes, its result is right.
TEST(requests_made_again_are_right_whatever_was_forgotten_meanwhile) {
  for (int capacity : {0, 3, 100}) {
    EngineConfig config;
    config.cache_capacity = capacity;
    const unsigned seed = Seed();
    Play(3, config, [&](Player& player) {
      std::minstd_rand shared(seed), own(seed + static_cast<unsigned>(player.rank));
      for (int round = 0; round < 40; ++round) {
        int64_t set = kWorldSet;
        const bool in_set = round % 5 == 4;
        if (in_set) CHECK_OK(player.AddSet({0, 2}, &set));
        const bool member = !in_set || player.rank != 1;
        const float sum = in_set ? 4.0f : 6.0f;
        std::array<std::vector<float>, 8> data;
        std::array<int64_t, 8> handles{};
        std::array<size_t, 8> order{0, 1, 2, 3, 4, 5, 6, 7};
        for (auto& each : data) {
          const bool changed = shared() % 6 == 0;
          each.assign(changed ? 5 : 2, static_cast<float>(player.rank + 1));
        }
        std::shuffle(order.begin(), order.end(), own);
        for (size_t i : order) {
          if (!member) break;
          CHECK_OK(player.Submit("t" + std::to_string(i), data[i], ReduceOp::kSum, &handles[i],
                                 false, static_cast<int32_t>(set)));
        }
        for (size_t i = 0; i < data.size() && member; ++i) {
          CHECK_OK(player.Wait(handles[i]));
          for (float value : data[i]) CHECK_EQ(value, sum);
        }
        int64_t removed = 0;
        if (in_set) CHECK_OK(player.RemoveSet(set, &removed));
      }
    });
  }
}

// Who adds without ringing may be interrupted before it takes the loop's place: that one does not
// count.
TEST(the_loop_is_rung_once_for_what_it_has_not_taken_yet) {
  HandleTable handles;
  TensorTable table;
  std::vector<float> data(2, 1.0f);
  std::vector<TensorEntry*> taken;
  for (const char* name : {"a", "b", "c"}) {
    CHECK_OK(table.Add(Player::Entry(name, data, ReduceOp::kSum)));
  }
  const auto take = [&] {
    table.TakeSubmitted(&taken);
    table.Rest(taken, &handles);
    return taken.size();
  };
  const auto rings = [&](const std::string& name, bool ring) {
    int64_t shape = 0;
    int64_t handle = 0;
    const OneTensor tensor = Player::Again(name, data, ReduceOp::kSum, &shape);
    CHECK_EQ(table.AddAgain(&tensor, 1, &handle, 0, &ring), size_t{1});
    CHECK(handles.Poll(handle) == Look::kPending);
    return ring;
  };
  CHECK_EQ(take(), size_t{3});
  for (uint64_t round = 0; round < 2; ++round) {
    const uint64_t a = 2 * round + 1, b = 2 * round + 2;
    table.Define(a, Player::Entry("a", data, ReduceOp::kSum)->request, {});
    table.Define(b, Player::Entry("b", data, ReduceOp::kSum)->request, {});
    for (const char* name : {"a", "b"}) {
      CHECK_OK(table.Add(Player::Entry(name, data, ReduceOp::kSum)));
    }
    CHECK_EQ(take(), size_t{2});
    CHECK(!rings("c", false));
    CHECK(rings("a", true));
    CHECK(!rings("b", true));
    CHECK_EQ(take(), size_t{3});
    CHECK(rings("b", true));
    CHECK_EQ(take(), size_t{1});
    table.Forget(b);
    CHECK(rings("a", true));
    table.Forget(a);  // in flight
    CHECK(!rings("c", true));
    CHECK_EQ(take(), size_t{2});
    CHECK_OK(table.Add(Player::Entry("b", data, ReduceOp::kSum)));
    CHECK_EQ(take(), size_t{1});
  }
}

TEST(the_first_request_that_is_refused_ends_a_submission_of_many) {
  Play(2, {}, [](Player& player) {
    std::vector<float> a(3, 1.0f), x(3, 1.0f), b(3, 1.0f), both(1, 0.0f);
    int64_t first = 0;
    std::array<int64_t, 3> handles{};
    size_t submitted = 9;
    if (player.rank == 0) {
      CHECK_OK(player.Submit("x", x, ReduceOp::kSum, &first));
      Entries entries;
      entries.push_back(Player::Entry("a", a, ReduceOp::kSum));
      entries.push_back(Player::Entry("x", x, ReduceOp::kSum));
      entries.push_back(Player::Entry("b", b, ReduceOp::kSum));
      const Status status =
          player.engine->SubmitMany(std::move(entries), handles.data(), &submitted);
      CHECK(status.code() == Code::kDuplicateName);
      CHECK(Contains(status.message(), "'x'"));
      CHECK_EQ(submitted, size_t{1});
      CHECK(player.handles->Poll(handles[1]) == Look::kUnknown);
      CHECK(player.handles->Poll(handles[2]) == Look::kUnknown);
    }
    CHECK_OK(player.Allreduce("both are here", both));
    if (player.rank == 1) {
      CHECK_OK(player.Submit("a", a, ReduceOp::kSum, &handles[0]));
      CHECK_OK(player.Submit("x", x, ReduceOp::kSum, &first));
    }
    CHECK_OK(player.Allreduce("b", b));
    CHECK_OK(player.Wait(handles[0]));
    CHECK_OK(player.Wait(first));
    CHECK_EQ(a[0] + x[0] + b[0], 6.0f);
  });
}

TEST(who_waits_for_many_hears_that_one_has_failed_and_may_ask_each) {
  Play(2, {}, [](Player& player) {
    std::vector<float> good(3, 1.0f), bad(player.rank == 1 ? 5u : 4u, 1.0f), late(3, 1.0f),
        both(1, 0.0f);
    Entries entries;
    entries.push_back(Player::Entry("good", good, ReduceOp::kSum));
    entries.push_back(Player::Entry("bad", bad, ReduceOp::kSum));
    if (player.rank == 0) entries.push_back(Player::Entry("late", late, ReduceOp::kSum));
    std::array<int64_t, 3> handles{};
    size_t submitted = 0;
    CHECK_OK(player.engine->SubmitMany(std::move(entries), handles.data(), &submitted));
    bool all_ok = true;
    if (player.rank == 0) {
      const Look look = player.engine->WaitMany(handles.data(), submitted, kMillisecond, &all_ok);
      CHECK(look == Look::kPending);
      CHECK(!all_ok);
    }
    CHECK_OK(player.Allreduce("rank 0 has waited", both));
    if (player.rank == 1) CHECK_OK(player.Submit("late", late, ReduceOp::kSum, &handles[2]));
    CHECK(player.engine->WaitMany(handles.data(), 3, kPatience, &all_ok) == Look::kDone);
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
    CHECK(table.WaitMany(handles.data(), 2, kPatience, &all_ok) == Look::kDone);
    CHECK(!all_ok);
  });
  table.Complete(handles[0], Status::Ok(), {});
  CHECK(table.Release(handles[1]));
  waiter.join();
  table.Complete(handles[1], Status::Ok(), {});
  CHECK(table.Poll(handles[0]) == Look::kDone);
}

// A submitter wakes the loop unless the loop has promised to poll (Mailbox::Submitted). Were
// one wake lost, nothing else would find the request here: no housekeeping, and in a world of one
// rank no message.
TEST(every_request_that_nobody_waits_for_wakes_a_loop_that_does_not_look_by_itself) {
  constexpr TimeNs kLost = 10 * kSecond;
  constexpr size_t kMost = 20;
  EngineConfig config;
  config.checks_ns = kForever;
  for (int size : {1, 2}) {
    // By rank; they outlive the engines, which may still have what was lost.
    std::vector<std::vector<std::vector<float>>> all(
        2, std::vector<std::vector<float>>(kMost, std::vector<float>(1, 1.0f)));
    Play(size, config, [&all](Player& player) {
      std::mt19937 same(Seed()), own(Seed() + static_cast<unsigned>(player.rank));
      std::vector<std::vector<float>>& tensors = all[static_cast<size_t>(player.rank)];
      std::vector<int64_t> handles(kMost);
      const auto done = [&](int64_t handle) {
        const TimeNs deadline = After(NowNs(), kLost);
        while (player.handles->Poll(handle) == Look::kPending && NowNs() < deadline) sched_yield();
        const bool found = player.handles->Poll(handle) == Look::kDone;
        player.handles->Release(handle);
        return found;
      };
      const auto submit = [&](size_t i) {
        return player.Submit(std::to_string(i), tensors[i], ReduceOp::kMax, &handles[i]).ok();
      };
      bool found = true;
      for (int round = 0; round < (player.size == 1 ? 2000 : 500) && found; ++round) {
        // A burst, after which the loop looks by itself, and some that come just too slowly for it
        // to go on so: each may come while it stops, or while it is driven meanwhile.
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
