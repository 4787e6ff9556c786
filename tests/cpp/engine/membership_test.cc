// Rungs 1 and 2: process sets and joined ranks, in the coordinator alone and in whole worlds.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_world.h"
#include "kernels/reduce.h"
#include "negotiation/codec.h"
#include "negotiation/coordinator.h"

using namespace hororing;
using namespace hororing_test;

namespace {

Request Allreduce(const std::string& name, int32_t process_set = kWorldSet) {
  Request request;
  request.name = name;
  request.process_set = process_set;
  request.tensors = {{DataType::kFloat32, {4}}};
  return request;
}

Request Control(Collective kind, std::vector<int32_t> ranks = {}, int32_t root = 0) {
  Request request;
  request.name = Name(kind);
  request.kind = kind;
  request.ranks = std::move(ranks);
  request.root = root;
  return request;
}

// Passes a report through the codec, as on the wire.
void Tell(Coordinator& coordinator, int rank, std::vector<Request> fresh,
          std::vector<uint64_t> cached = {}, uint64_t applied = 0) {
  Report report, travelled;
  report.fresh = std::move(fresh);
  report.cached = std::move(cached);
  report.applied = applied;
  CHECK(Decode(Encode(report), &travelled));
  coordinator.Receive(rank, travelled, 0);
}

std::vector<Decision> Decisions(Coordinator& coordinator) {
  const auto agreement = coordinator.TakeAgreement();
  if (!agreement) return {};
  Agreement travelled;
  CHECK(Decode(Encode(*agreement), &travelled));
  return travelled.decisions;
}

Coordinator MakeCoordinator(int size) {
  Coordinator::Options options;
  options.size = size;
  options.cache_capacity = 8;
  return Coordinator(options);
}

int64_t AddSet(Coordinator& coordinator, int size, std::vector<int32_t> ranks) {
  for (int rank = 0; rank < size; ++rank) {
    Tell(coordinator, rank, {Control(Collective::kAddProcessSet, ranks)});
  }
  const std::vector<Decision> decisions = Decisions(coordinator);
  CHECK_EQ(decisions.size(), size_t{1});
  CHECK(decisions[0].kind == Decision::Kind::kRun);
  return decisions[0].details().rows.at(0);
}

}  // namespace

TEST(a_set_is_added_once_and_its_id_is_used_again_after_its_removal) {
  Coordinator coordinator = MakeCoordinator(3);
  CHECK_EQ(AddSet(coordinator, 3, {0, 2}), int64_t{1});
  CHECK_EQ(AddSet(coordinator, 3, {1}), int64_t{2});
  CHECK_EQ(AddSet(coordinator, 3, {}), int64_t{3});
  for (const auto& [ranks, text] : std::vector<std::pair<std::vector<int32_t>, std::string>>{
           {{2, 0}, "process set 1 has the ranks [0, 2] already"},
           {{0, 1, 2}, "process set 0 has the ranks [0, 1, 2] already"},
           {{1, 1}, "rank 1 occurs twice"},
           {{0, 3}, "rank 3 is not a rank of this job"},
           {{-1}, "rank -1 is not a rank of this job"}}) {
    for (int rank : {0, 1, 2}) {
      Tell(coordinator, rank, {Control(Collective::kAddProcessSet, ranks)});
    }
    const std::vector<Decision> decisions = Decisions(coordinator);
    CHECK(decisions.at(0).kind == Decision::Kind::kFail);
    CHECK(decisions[0].details().status.code() == Code::kInvalidArgument);
    CHECK(Contains(decisions[0].details().status.message(), text));
  }
  for (int rank : {0, 1, 2}) {
    Tell(coordinator, rank, {Control(Collective::kRemoveProcessSet, {}, 1)});
  }
  CHECK_EQ(Decisions(coordinator).at(0).details().rows.at(0), int64_t{1});
  for (int rank : {0, 1, 2}) {
    Tell(coordinator, rank, {Control(Collective::kRemoveProcessSet, {}, 1)});
  }
  CHECK_EQ(Decisions(coordinator).at(0).details().rows.at(0), int64_t{0});
  CHECK_EQ(AddSet(coordinator, 3, {0, 1}), int64_t{1});
}

TEST(what_was_ready_before_its_set_was_removed_reaches_the_old_members) {
  Coordinator::Options options;
  options.size = 2;
  Coordinator coordinator(options);
  const int32_t set = static_cast<int32_t>(AddSet(coordinator, 2, {1}));
  Tell(coordinator, 1, {Allreduce("x", set)});
  for (int rank : {0, 1}) {
    Tell(coordinator, rank, {Control(Collective::kRemoveProcessSet, {}, set)});
    Tell(coordinator, rank, {Control(Collective::kAddProcessSet, {0})});
  }
  const auto agreement = coordinator.TakeAgreement();
  CHECK_EQ(agreement->decisions.size(), size_t{3});
  CHECK_EQ(coordinator.PartFor({1}, *agreement)->decisions.size(), size_t{3});
}

TEST(the_set_of_a_layer_leaves_its_ranks_to_the_user) {
  Coordinator coordinator = MakeCoordinator(2);
  for (int64_t id : {1, 2}) {
    for (int rank : {0, 1}) {
      Tell(coordinator, rank, {Control(Collective::kAddProcessSet, {0}, /*internal*/ 1)});
    }
    CHECK_EQ(Decisions(coordinator).at(0).details().rows.at(0), id);
  }
  CHECK_EQ(AddSet(coordinator, 2, {0}), int64_t{3});
}

TEST(a_set_may_be_added_by_its_members_alone_and_all_ranks_know_it) {
  Coordinator coordinator = MakeCoordinator(4);
  Request first = Control(Collective::kAddProcessSet, {0, 3}, /*of_members_alone*/ 2);
  Request second = Control(Collective::kAddProcessSet, {1, 2}, /*of_members_alone*/ 2);
  first.name = "0.3";
  second.name = "1.2";
  Tell(coordinator, 1, {second});
  Tell(coordinator, 3, {first});
  CHECK_EQ(Decisions(coordinator).size(), size_t{0});
  Tell(coordinator, 0, {first});
  Tell(coordinator, 2, {second});
  const std::vector<Decision> decisions = Decisions(coordinator);
  CHECK_EQ(decisions.size(), size_t{2});
  for (size_t i = 0; i < 2; ++i) {
    CHECK_EQ(decisions[i].process_set, kWorldSet);
    CHECK_EQ(decisions[i].details().rows.at(0), static_cast<int64_t>(i + 1));
    CHECK(decisions[i].details().neutral == (i == 0 ? first : second));
  }
  Play(3, EngineConfig(), [](Player& player) {
    int64_t id = 0;
    if (player.rank != 1) {
      CHECK_OK(player.Control(Collective::kAddProcessSet, &id, {0, 2}, 2));
      CHECK_EQ(id, int64_t{1});
      std::vector<float> data(5, static_cast<float>(player.rank + 1));
      CHECK_OK(player.Allreduce("x", data, ReduceOp::kSum, 1));
      CHECK_EQ(data[4], 4.0f);
    }
    CHECK_OK(player.AddSet({0, 1}, &id));
    CHECK_EQ(id, int64_t{2});
  });
}

TEST(ranks_that_add_different_sets_are_told_of_one_another) {
  Coordinator coordinator = MakeCoordinator(2);
  Tell(coordinator, 0, {Control(Collective::kAddProcessSet, {0})});
  Tell(coordinator, 1, {Control(Collective::kAddProcessSet, {0, 1})});
  const Decision decision = Decisions(coordinator).at(0);
  CHECK(decision.details().status.code() == Code::kMismatch);
  CHECK(Contains(decision.details().status.message(), "rank 0: [0]; rank 1: [0, 1]"));
}

TEST(a_set_decides_without_the_others_and_concerns_only_its_members) {
  Coordinator coordinator = MakeCoordinator(4);
  CHECK(coordinator.IsForAll({}));
  const int32_t set = static_cast<int32_t>(AddSet(coordinator, 4, {1, 3}));
  CHECK(!coordinator.IsForAll({}));
  Tell(coordinator, 0, {Allreduce("x")});  // another tensor, in the world
  Tell(coordinator, 3, {Allreduce("x", set)});
  CHECK(!coordinator.TakeAgreement().has_value());
  Tell(coordinator, 1, {Allreduce("x", set)});
  const auto agreement = coordinator.TakeAgreement();
  CHECK_EQ(agreement->decisions.size(), size_t{1});
  CHECK_EQ(agreement->decisions[0].process_set, set);
  CHECK(!coordinator.PartFor({0}, *agreement).has_value());
  CHECK(!coordinator.PartFor({2}, *agreement).has_value());
  CHECK_EQ(coordinator.PartFor({3}, *agreement)->sequence, agreement->sequence);
  const std::vector<Waiting> waiting = coordinator.AllWaiting();
  CHECK_EQ(waiting.size(), size_t{1});
  CHECK(waiting[0].missing == (std::vector<int>{1, 2, 3}));
}

TEST(removing_a_set_fails_what_waits_in_it_and_forgets_its_cached_requests) {
  Coordinator coordinator = MakeCoordinator(2);
  const int32_t set = static_cast<int32_t>(AddSet(coordinator, 2, {0}));
  Tell(coordinator, 0, {Allreduce("x", set)});
  const uint64_t id = Decisions(coordinator).at(0).cache_id;
  CHECK(id != 0);
  CHECK_EQ(AddSet(coordinator, 2, {1}), int64_t{2});
  for (int rank : {0, 1}) {
    Tell(coordinator, rank, {Control(Collective::kRemoveProcessSet, {}, set)});
  }
  CHECK(Decisions(coordinator).at(0).kind == Decision::Kind::kRun);
  Tell(coordinator, 0, {}, {id});               // was in transit
  Tell(coordinator, 0, {Allreduce("y", set)});  // was in transit
  CHECK(coordinator.AllWaiting().empty());

  const int32_t again = static_cast<int32_t>(AddSet(coordinator, 2, {0}));
  CHECK_EQ(again, set);
  Tell(coordinator, 0, {Allreduce("x", again)});
  CHECK(Decisions(coordinator).at(0).cache_id > id);
}

TEST(a_joined_rank_is_waited_for_no_more_and_told_what_it_takes_part_in) {
  Coordinator coordinator = MakeCoordinator(3);
  Tell(coordinator, 0, {Allreduce("early")});
  Tell(coordinator, 1, {Allreduce("early")});
  CHECK(Decisions(coordinator).empty());
  Tell(coordinator, 2, {Control(Collective::kJoin)});
  std::vector<Decision> decisions = Decisions(coordinator);
  CHECK_EQ(decisions.size(), size_t{1});
  CHECK_EQ(decisions[0].details().name, std::string("early"));
  CHECK(decisions[0].details().neutral.has_value());
  CHECK(*decisions[0].details().neutral == Allreduce("early"));
  // From now on all ranks know it by its id, even the joined one.
  const uint64_t id = decisions[0].cache_id;
  Tell(coordinator, 0, {}, {id});
  Tell(coordinator, 1, {}, {id});
  decisions = Decisions(coordinator);
  CHECK_EQ(decisions.at(0).cache_id, id);
  CHECK(!decisions[0].details().neutral.has_value());

  Request gather = Allreduce("g");
  gather.kind = Collective::kAllgather;
  for (int rank : {0, 1}) Tell(coordinator, rank, {gather});
  decisions = Decisions(coordinator);
  CHECK(decisions.at(0).kind == Decision::Kind::kFail);
  CHECK(decisions[0].details().status.code() == Code::kMismatch);
  CHECK(Contains(decisions[0].details().status.message(), "rank 2 has joined"));
  CHECK(coordinator.AllWaiting().empty());  // a join is no stall

  Tell(coordinator, 0, {Control(Collective::kJoin)});
  CHECK(Decisions(coordinator).empty());
  Tell(coordinator, 1, {Control(Collective::kJoin)});
  CHECK(Decisions(coordinator).at(0).details().rows == (std::vector<int64_t>{1}));
  // The join is over: all ranks must report again.
  Tell(coordinator, 0, {}, {id});
  CHECK(Decisions(coordinator).empty());
}

TEST(a_rank_that_reported_before_it_joined_stands_for_nobody_else) {
  Coordinator coordinator = MakeCoordinator(3);
  Tell(coordinator, 0, {Allreduce("a")});
  Tell(coordinator, 0, {Control(Collective::kJoin)});
  Tell(coordinator, 1, {Allreduce("a")});
  CHECK(Decisions(coordinator).empty());  // rank 2 is missing
  Tell(coordinator, 2, {Allreduce("a")});
  CHECK_EQ(Decisions(coordinator).size(), size_t{1});
}

TEST(what_was_evicted_is_forgotten_although_a_rank_has_joined) {
  Coordinator coordinator = MakeCoordinator(3);
  for (int rank : {0, 1, 2}) Tell(coordinator, rank, {Allreduce("x")});
  const uint64_t id = Decisions(coordinator).at(0).cache_id;
  Tell(coordinator, 2, {Control(Collective::kJoin)});
  uint64_t sequence = 0;
  for (int i = 0; i < 8; ++i) {
    for (int rank : {0, 1}) Tell(coordinator, rank, {Allreduce("y" + std::to_string(i))});
    sequence = coordinator.TakeAgreement()->sequence;
  }
  Tell(coordinator, 0, {}, {id}, sequence);  // may still come: rank 1 has not applied the eviction
  CHECK_EQ(coordinator.AllWaiting().size(), size_t{1});
  Tell(coordinator, 1, {}, {id}, sequence);
  CHECK_EQ(Decisions(coordinator).at(0).details().name, std::string("x"));
  Tell(coordinator, 0, {}, {}, sequence);
  Tell(coordinator, 0, {}, {id}, sequence);
  CHECK(coordinator.AllWaiting().empty());
}

TEST(a_join_that_meets_another_call_of_its_name_is_over_for_all) {
  Coordinator coordinator = MakeCoordinator(2);
  Tell(coordinator, 1, {Control(Collective::kJoin)});
  Tell(coordinator, 0, {Allreduce(Name(Collective::kJoin))});
  CHECK(Decisions(coordinator).at(0).details().status.code() == Code::kMismatch);
  Tell(coordinator, 0, {Allreduce("x")});
  CHECK(Decisions(coordinator).empty());
}

TEST(neutral_elements_leave_the_others_as_they_are) {
  std::mt19937 random(hororing_test::Seed());
  for (int number = 0; number < kDataTypeCount; ++number) {
    const DataType dtype = static_cast<DataType>(number);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      constexpr size_t kElements = 33;
      const size_t bytes = kElements * ElementSize(dtype);
      std::vector<uint8_t> value(bytes), neutral(bytes), result(bytes);
      // Values other than NaN; for bool only 0 and 1.
      for (uint8_t& byte : value) byte = static_cast<uint8_t>(random() % 2);
      const ReduceSpec spec{dtype, op, 1.0, 1.0};
      FillNeutral(spec, neutral.data(), kElements);
      const void* sources[] = {value.data(), neutral.data()};
      ReduceMany(spec, 2, result.data(), sources, 2, kElements);
      CHECK(std::memcmp(result.data(), value.data(), bytes) == 0);
    }
  }
}

TEST(overlapping_sets_in_opposite_orders_do_not_wait_for_one_another) {
  const unsigned seed = hororing_test::Seed();
  for (const int64_t fusion : {int64_t{0}, int64_t{64} << 20}) {
    EngineConfig config;
    config.fusion_bytes = fusion;
    Play(4, config, [&](Player& player) {
      const std::vector<std::vector<int32_t>> members = {{0, 1, 2, 3}, {0, 1},    {1, 2}, {2, 3},
                                                         {0, 3},       {0, 2, 3}, {1}};
      for (size_t s = 1; s < members.size(); ++s) {
        int64_t id = 0;
        CHECK_OK(player.AddSet(members[s], &id));
        CHECK_EQ(id, static_cast<int64_t>(s));
      }
      std::mt19937 random(seed + static_cast<unsigned>(player.rank));
      for (int step = 0; step < 20; ++step) {
        std::vector<size_t> order;
        for (size_t s = 0; s < members.size(); ++s) {
          const auto& ranks = members[s];
          if (std::find(ranks.begin(), ranks.end(), player.rank) != ranks.end()) order.push_back(s);
        }
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::vector<float>> data(order.size());
        std::vector<int64_t> handles(order.size());
        for (size_t i = 0; i < order.size(); ++i) {
          // From the short cut to several blocks of the direct allreduce.
          const size_t elements = 1 + order[i] * (step % 4 == 0 ? 60000 : 100);
          data[i].assign(elements, static_cast<float>(player.rank + 1));
          CHECK_OK(player.Submit("x", data[i], ReduceOp::kSum, &handles[i], false,
                                 static_cast<int32_t>(order[i])));
        }
        for (size_t i = 0; i < order.size(); ++i) {
          CHECK_OK(player.Wait(handles[i]));
          float sum = 0;
          for (int32_t rank : members[order[i]]) sum += static_cast<float>(rank + 1);
          for (float value : data[i]) CHECK_EQ(value, sum);
        }
      }
      int64_t removed = 0;
      CHECK_OK(player.RemoveSet(2, &removed));
      CHECK_EQ(removed, int64_t{1});
      std::vector<float> last(3, 1.0f);
      CHECK_OK(player.Allreduce("last", last));
      CHECK_EQ(last[0], 4.0f);
    });
  }
}

// A rank reports all of them at once, so that an agreement has several decisions.
TEST(a_barrier_of_some_ranks_leaves_the_batches_of_all_alike) {
  Play(3, EngineConfig(), [&](Player& player) {
    int64_t set = 0;
    CHECK_OK(player.AddSet({0, 1}, &set));
    for (int step = 0; step < 50; ++step) {
      std::vector<float> before(20, 1.0f), after(30, 2.0f);
      int64_t handles[3] = {};
      CHECK_OK(player.Submit("before", before, ReduceOp::kSum, &handles[0], true));
      if (player.rank != 2) {
        auto entry = std::make_unique<TensorEntry>();
        entry->request = Control(Collective::kBarrier);
        entry->request.process_set = static_cast<int32_t>(set);
        CHECK_OK(player.Submit(std::move(entry), true, &handles[1]));
      }
      CHECK_OK(player.Submit("after", after, ReduceOp::kSum, &handles[2], true));
      for (const int64_t handle : handles) {
        if (handle != 0) CHECK_OK(player.Wait(handle));
      }
      for (const float value : before) CHECK_EQ(value, 3.0f);
      for (const float value : after) CHECK_EQ(value, 6.0f);
    }
  });
}

TEST(a_joined_rank_takes_part_in_a_barrier_between_allreduces) {
  Play(3, EngineConfig(), [&](Player& player) {
    for (int epoch = 0; epoch < 10; ++epoch) {
      for (int step = 0; player.rank != 2 && step < 5; ++step) {
        std::vector<float> before(20, 1.0f), after(30, 2.0f);
        int64_t handles[3] = {};
        CHECK_OK(player.Submit("before", before, ReduceOp::kSum, &handles[0], true));
        auto entry = std::make_unique<TensorEntry>();
        entry->request = Control(Collective::kBarrier);
        CHECK_OK(player.Submit(std::move(entry), true, &handles[1]));
        CHECK_OK(player.Submit("after", after, ReduceOp::kMax, &handles[2], true));
        for (const int64_t handle : handles) CHECK_OK(player.Wait(handle));
        CHECK(before[19] >= 2.0f);  // rank 2 may have joined
        CHECK_EQ(after[29], 2.0f);
      }
      int64_t last = -1;
      CHECK_OK(player.Join(&last));
    }
  });
}

TEST(uneven_data_ends_with_the_last_rank_to_join) {
  for (int size : {1, 2, 3, 5}) {
    EngineConfig config;
    config.cache_capacity = size % 2 == 0 ? 1024 : 2;
    Play(size, config, [&](Player& player) {
      for (int epoch = 0; epoch < 3; ++epoch) {
        // Rank r has r + 1 batches of three tensors.
        for (int batch = 0; batch <= player.rank; ++batch) {
          std::vector<float> sum(5, 1.0f), least(7, 3.0f), product(300, 2.0f);
          int64_t handle = 0;
          CHECK_OK(player.Submit("sum", sum, ReduceOp::kSum, &handle));
          CHECK_OK(player.Allreduce("least", least, ReduceOp::kMin));
          CHECK_OK(player.Allreduce("product", product, ReduceOp::kProduct));
          CHECK_OK(player.Wait(handle));
          const int alive = size - batch;
          CHECK_EQ(sum[4], static_cast<float>(alive));
          CHECK_EQ(least[6], 3.0f);
          CHECK_EQ(product[299], static_cast<float>(1 << alive));
        }
        int64_t last = -1;
        CHECK_OK(player.Join(&last));
        CHECK_EQ(last, int64_t{size - 1});
      }
    });
  }
}
