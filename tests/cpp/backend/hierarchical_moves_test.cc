// SharedMemoryBackend's all-gather, broadcast and reduce-scatter among ranks on emulated hosts, and
// batches of process sets, compared with the flat algorithms of HostBackend.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backend/host_backend.h"
#include "collective/slice_exchange.h"
#include "hosts_world.h"

namespace hororing {
namespace {

// A process set and its backends, which are null on ranks that are not members.
struct Set {
  Members members;
  std::vector<std::unique_ptr<SharedMemoryBackend>> backends;

  explicit Set(HostsWorld& world, Members of = {})
      : members(of.ranks.empty() ? Members::World(world.size()) : std::move(of)),
        backends(static_cast<size_t>(world.size())) {
    for (const int r : members.ranks) {
      backends[static_cast<size_t>(r)] = world.Backend(r, 0, members);
    }
  }
  size_t size() const { return members.ranks.size(); }
};

// One batch of a set, with its memory.
struct Job {
  Set* set;
  std::function<Batch(size_t)> batch;  // for a rank of the set
  std::function<std::string()> judge;  // returns the first error in the outputs, or ""
};

// All ranks run the jobs in this order, without synchronization.
std::string RunJobs(HostsWorld& world, const std::vector<Job>& jobs) {
  world.Run([&](int r) {
    TraceSink trace;
    for (const Job& job : jobs) {
      const std::vector<int>& ranks = job.set->members.ranks;
      const auto at = std::find(ranks.begin(), ranks.end(), r);
      if (at == ranks.end()) continue;
      const Batch batch = job.batch(static_cast<size_t>(at - ranks.begin()));
      SharedMemoryBackend& backend = *job.set->backends[static_cast<size_t>(r)];
      CHECK(backend.Supports(batch));
      CHECK_OK(backend.Run(batch, After(NowNs(), kLimit), trace));
      CHECK_EQ(world.wire(r).open(), 0u);
    }
  });
  for (size_t i = 0; i < jobs.size(); ++i) {
    const std::string verdict = jobs[i].judge();
    if (!verdict.empty()) return "batch " + std::to_string(i) + ": " + verdict;
  }
  return "";
}

Bytes Random(DataType dtype, size_t elements, std::mt19937& random) {
  Bytes data(elements * ElementSize(dtype));
  Fill(dtype, data.data(), elements, random);
  return data;
}

// The tensors of a batch on all members.
struct Tensors {
  explicit Tensors(size_t members) : inputs(members), outputs(members) {}
  std::vector<std::vector<Bytes>> inputs, outputs;  // [rank][tensor]
};

// Empty contributions, small ones, and some of several blocks.
size_t RaggedSize(size_t rank, size_t tensor, std::mt19937& random) {
  switch ((rank + tensor) % 4) {
    case 0: return 0;
    case 1: return random() % 7;
    case 2: return random() % 2000;
    default: return random() % 90000;
  }
}

Job Allgather(Set& set, DataType dtype, size_t tensors, std::mt19937& random) {
  const size_t element = ElementSize(dtype);
  std::vector<std::vector<size_t>> sizes(tensors);  // bytes, [tensor][rank]
  std::vector<Bytes> expected(tensors);
  const auto memory = std::make_shared<Tensors>(set.size());
  Tensors& data = *memory;
  for (size_t t = 0; t < tensors; ++t) {
    for (size_t rank = 0; rank < set.size(); ++rank) {
      const size_t elements = RaggedSize(rank, t, random) / element;
      data.inputs[rank].push_back(Random(dtype, elements, random));
      sizes[t].push_back(elements * element);
      expected[t].insert(expected[t].end(), data.inputs[rank][t].begin(),
                         data.inputs[rank][t].end());
    }
    for (auto& outputs : data.outputs) outputs.emplace_back(expected[t].size(), 0xEE);
  }
  const auto batch_of = [=](size_t rank) {
    Batch batch;
    batch.kind = Collective::kAllgather;
    for (size_t t = 0; t < tensors; ++t) {
      BatchEntry entry;
      entry.name = "gather";
      entry.input = memory->inputs[rank][t].data();
      entry.output = memory->outputs[rank][t].data();
      entry.elements = memory->inputs[rank][t].size() / element;
      entry.reduce.dtype = dtype;
      entry.receive_bytes = sizes[t];
      batch.entries.push_back(entry);
    }
    return batch;
  };
  return {&set, batch_of, [=]() -> std::string {
            for (const auto& outputs : memory->outputs) {
              if (outputs != expected) return "allgather";
            }
            return "";
          }};
}

Job Broadcast(Set& set, int root, DataType dtype, const std::vector<size_t>& sizes,
              std::mt19937& random) {
  const auto memory = std::make_shared<Tensors>(set.size());
  Tensors& data = *memory;
  for (size_t rank = 0; rank < set.size(); ++rank) {
    for (const size_t elements : sizes) {
      data.inputs[rank].push_back(Random(dtype, elements, random));
      data.outputs[rank].emplace_back(elements * ElementSize(dtype), 0xEE);
    }
  }
  const std::vector<Bytes> expected = data.inputs[static_cast<size_t>(root)];
  const bool in_place = random() % 2 == 0;
  const auto batch_of = [=](size_t rank) {
    Batch batch;
    batch.kind = Collective::kBroadcast;
    batch.root = root;
    for (size_t t = 0; t < sizes.size(); ++t) {
      BatchEntry entry;
      entry.input = memory->inputs[rank][t].data();
      entry.output = (in_place ? memory->inputs : memory->outputs)[rank][t].data();
      entry.elements = sizes[t];
      entry.reduce.dtype = dtype;
      batch.entries.push_back(entry);
    }
    return batch;
  };
  return {&set, batch_of, [=]() -> std::string {
            for (const auto& outputs : in_place ? memory->inputs : memory->outputs) {
              if (outputs != expected) return "broadcast";
            }
            return "";
          }};
}

// The sum over the hosts in order, of partial results, rounded once.
Bytes SummedByHosts(const ReduceSpec& spec, const Hosts& hosts, const std::vector<int>& ranks,
                    const std::vector<const void*>& sources, size_t n) {
  const size_t partial = PartialSize(spec);
  std::vector<int> order;  // of the hosts
  for (const int rank : ranks) {
    const int host = hosts[static_cast<size_t>(rank)];
    if (std::find(order.begin(), order.end(), host) == order.end()) order.push_back(host);
  }
  Bytes total;
  for (const int host : order) {
    std::vector<const void*> here;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (hosts[static_cast<size_t>(ranks[rank])] == host) here.push_back(sources[rank]);
    }
    std::vector<std::byte> sum(n * partial), widened(n * partial);
    SumPartials(spec, sum.data(), here, n, widened.data());
    if (total.empty()) {
      total.resize(n * partial);
      std::copy(sum.begin(), sum.end(), reinterpret_cast<std::byte*>(total.data()));
    } else {
      CombinePartials(spec, total.data(), total.data(), sum.data(), n);
    }
  }
  Bytes result(n * ElementSize(spec.dtype));
  FinishPartial(spec, static_cast<int>(ranks.size()), result.data(), total.data(), n);
  return result;
}

// Parts of any size, not only those of the engine.
Job Reducescatter(Set& set, const Hosts& hosts, const ReduceSpec& spec, size_t tensors,
                  std::mt19937& random) {
  const size_t element = ElementSize(spec.dtype);
  std::vector<std::vector<size_t>> parts(tensors);  // elements, [tensor][rank]
  std::vector<size_t> totals(tensors, 0);
  const auto memory = std::make_shared<Tensors>(set.size());
  Tensors& data = *memory;
  for (size_t t = 0; t < tensors; ++t) {
    for (size_t rank = 0; rank < set.size(); ++rank) {
      parts[t].push_back(RaggedSize(rank, t, random) / 8);
      totals[t] += parts[t].back();
    }
    for (size_t rank = 0; rank < set.size(); ++rank) {
      data.inputs[rank].push_back(Random(spec.dtype, totals[t], random));
      data.outputs[rank].emplace_back(parts[t][rank] * element, 0xEE);
    }
  }
  const Tensors before = data;
  const Members members = set.members;
  const auto batch_of = [=](size_t rank) {
    Batch batch;
    batch.kind = Collective::kReducescatter;
    for (size_t t = 0; t < tensors; ++t) {
      BatchEntry entry;
      entry.name = "scatter";
      entry.input = memory->inputs[rank][t].data();
      entry.output = memory->outputs[rank][t].data();
      entry.elements = totals[t];
      entry.reduce = spec;
      entry.parts = parts[t];
      batch.entries.push_back(entry);
    }
    return batch;
  };
  const auto judge = [=]() -> std::string {
    if (before.inputs != memory->inputs) return "reducescatter changed inputs";
    for (size_t t = 0; t < tensors; ++t) {
      std::vector<const void*> sources;
      for (const auto& inputs : before.inputs) sources.push_back(inputs[t].data());
      const Bytes all = SummedByHosts(spec, hosts, members.ranks, sources, totals[t]);
      size_t begin = 0;
      for (size_t rank = 0; rank < parts[t].size(); ++rank) {
        const Bytes& got = memory->outputs[rank][t];
        if (!std::equal(got.begin(), got.end(), all.begin() + static_cast<ptrdiff_t>(begin))) {
          return "reducescatter: tensor " + std::to_string(t) + " at rank " + std::to_string(rank);
        }
        begin += got.size();
      }
    }
    return "";
  };
  return {&set, batch_of, judge};
}

// An allreduce of values whose sums are exact: any order of summation gives the same bits.
Job Allreduce(Set& set, size_t elements) {
  const auto memory = std::make_shared<Tensors>(set.size());
  const size_t ranks = set.size();
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::vector<float> values(elements);
    for (size_t i = 0; i < elements; ++i) values[i] = static_cast<float>(i % 1000 + rank);
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    memory->inputs[rank].emplace_back(bytes, bytes + elements * 4);
  }
  const auto batch_of = [=](size_t rank) {
    Batch batch;
    BatchEntry entry;
    entry.input = entry.output = memory->inputs[rank][0].data();
    entry.elements = elements;
    batch.entries.push_back(entry);
    return batch;
  };
  return {&set, batch_of, [=]() -> std::string {
            for (const auto& tensors : memory->inputs) {
              for (size_t i = 0; i < elements; ++i) {
                float value = 0;
                std::memcpy(&value, tensors[0].data() + i * 4, 4);
                const size_t sum = ranks * (i % 1000) + ranks * (ranks - 1) / 2;
                if (value != static_cast<float>(sum)) return "allreduce";
              }
            }
            return "";
          }};
}

// Runs the job on all ranks with the backend that does not use shared memory.
std::string RunFlat(HostsWorld& world, const Job& job) {
  world.Run([&](int r) {
    HostBackend backend(*world.world(r).transport, {}, world.world(r).topology.ranks_on());
    TraceSink trace;
    CHECK_OK(backend.Run(job.batch(static_cast<size_t>(r)), After(NowNs(), kLimit), trace));
    CHECK_EQ(world.wire(r).open(), 0u);
  });
  return job.judge();
}

TEST(every_collective_on_every_layout) {
  std::mt19937 random(hororing_test::Seed());
  size_t number = 0;
  for (const Hosts& hosts : kLayouts) {
    // Slots of 256 KiB: several blocks.
    HostsWorld world(++number % 3 == 0 ? "queue" : "inproc", hosts, {}, 256 << 10);
    Set all(world);
    std::vector<Job> jobs;
    for (const DataType dtype : kAllTypes) {
      jobs.push_back(Allgather(all, dtype, 1 + random() % 4, random));
    }
    for (int root = 0; root < world.size(); ++root) {
      const DataType dtype = kAllTypes[random() % 11];
      for (const std::vector<size_t>& sizes :
           {std::vector<size_t>{1}, {0, 77, 0, 50000, 3}, {random() % 500000}}) {
        CHECK_EQ(Text(hosts) + ": " + RunFlat(world, Broadcast(all, root, dtype, sizes, random)),
                 Text(hosts) + ": ");
      }
    }
    for (const ReduceSpec& spec : AllSpecs()) {
      jobs.push_back(Reducescatter(all, hosts, spec, 1 + random() % 3, random));
    }
    CHECK_EQ(Text(hosts) + ": " + RunJobs(world, jobs), Text(hosts) + ": ");
  }
}

TEST(sets_over_several_hosts_and_on_one_share_the_slots_in_any_order) {
  std::mt19937 random(hororing_test::Seed());
  const Hosts hosts = {0, 1, 0, 0, 1, 2, 0};
  for (const char* kind : {"inproc", "queue"}) {
    HostsWorld world(kind, hosts, {}, 256 << 10);
    Set all(world);
    Set some(world, {{0, 1, 3, 4}, 3, 1});
    Set here(world, {{0, 2, 6}, 5, 2});   // one host
    Set again(world, {{1, 2, 3}, 3, 7});  // reuses the number of `some`
    std::vector<Job> jobs;
    constexpr int kRounds = hororing_test::kFew ? 10 : 40;
    for (int round = 0; round < kRounds; ++round) {
      Set* const sets[] = {&all, round < kRounds / 2 ? &some : &again, &here};
      Set& set = *sets[random() % 3];
      switch (random() % 3) {
        case 0: jobs.push_back(Allreduce(set, random() % 60000)); break;
        case 1: jobs.push_back(Allgather(set, DataType::kInt16, 2, random)); break;
        default:
          jobs.push_back(Reducescatter(set, hosts, {DataType::kBfloat16, ReduceOp::kAverage, 1, 1},
                                       2, random));
      }
    }
    CHECK_EQ(RunJobs(world, jobs), std::string());
  }
}

TEST(flat_forms_go_host_by_host) {
  // Consecutive ranks are on different hosts, as with a bad hostfile.
  std::mt19937 random(hororing_test::Seed());
  const Hosts hosts = {0, 1, 0, 1, 0, 1};
  HostsWorld world("queue", hosts);
  Set all(world);
  // Counts pairs of ranks on different hosts that communicate.
  const auto flat_crossing = [&](const Job& job) {
    std::set<std::pair<int, int>> pairs;
    std::vector<size_t> before;
    for (int r = 0; r < world.size(); ++r) before.push_back(world.wire(r).sent_to().size());
    CHECK_EQ(RunFlat(world, job), std::string());
    for (int r = 0; r < world.size(); ++r) {
      const std::vector<int>& sent = world.wire(r).sent_to();
      for (size_t i = before[static_cast<size_t>(r)]; i < sent.size(); ++i) {
        const bool crosses = hosts[static_cast<size_t>(sent[i])] != hosts[static_cast<size_t>(r)];
        if (crosses) pairs.emplace(r, sent[i]);
      }
    }
    return pairs.size();
  };
  CHECK(flat_crossing(Allgather(all, DataType::kUint8, 1, random)) <= 2);
  // If the root is not the first rank of its host, the chain comes back to that host.
  CHECK_EQ(flat_crossing(Broadcast(all, 2, DataType::kUint8, {2 << 20}, random)), 2u);
}

TEST(flat_forms_go_in_short_messages_and_straight_from_host_to_host) {
  std::mt19937 random(hororing_test::Seed());
  HostsWorld world("queue", {0, 1, 2, 3});
  Set all(world);
  std::set<std::pair<int, int>> talkers;
  const auto messages = [&](const Job& job) {
    std::vector<size_t> before;
    for (int r = 0; r < world.size(); ++r) before.push_back(world.wire(r).sent_to().size());
    world.Run([&](int r) {
      HostBackend backend(*world.world(r).transport, {}, world.world(r).topology.ranks_on());
      TraceSink trace;
      CHECK_OK(backend.Run(job.batch(static_cast<size_t>(r)), After(NowNs(), kLimit), trace));
      CHECK_EQ(world.wire(r).open(), 0u);
    });
    CHECK_EQ(job.judge(), std::string());
    size_t count = 0;
    talkers.clear();
    for (int r = 0; r < world.size(); ++r) {
      const std::vector<int>& sent = world.wire(r).sent_to();
      for (size_t i = before[static_cast<size_t>(r)]; i < sent.size(); ++i, ++count) {
        talkers.emplace(r, sent[i]);
      }
    }
    return count;
  };
  for (const size_t tensors : {1, 3}) {
    (void)messages(Allgather(all, DataType::kUint8, tensors, random));
    CHECK_EQ(talkers.count({3, 1}), 1u);
  }
  // Three hops of 64 messages of 32 KiB.
  CHECK_EQ(messages(Broadcast(all, 1, DataType::kUint8, {2 << 20}, random)), 3 * 64u);
  const ReduceSpec spec{DataType::kInt32, ReduceOp::kSum, 1, 1};
  (void)messages(Reducescatter(all, {0, 1, 2, 3}, spec, 2, random));
}

}  // namespace
}  // namespace hororing
