// HierarchicalBackend's all-gather, broadcast and reduce-scatter among ranks on pretended hosts,
// and batches of process sets; against what the flat forms of HostBackend give.

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/host_backend.h"
#include "collective/slice_exchange.h"
#include "hosts_world.h"

namespace hororing {
namespace {

constexpr WireCost kCost{0, 1e-9};

// The backends of one set on all ranks; null on ranks that are no members.
using SetBackends = std::vector<std::unique_ptr<HierarchicalBackend>>;

SetBackends Backends(HostsWorld& world, Algorithm algorithm, const Members& members = {}) {
  SetBackends backends(static_cast<size_t>(world.size()));
  for (int r = 0; r < world.size(); ++r) {
    const auto& ranks = members.ranks;
    if (!ranks.empty() && std::find(ranks.begin(), ranks.end(), r) == ranks.end()) continue;
    backends[static_cast<size_t>(r)] = world.Backend(r, algorithm, kCost, members);
  }
  return backends;
}

std::vector<int> RanksOf(const HostsWorld& world, const Members& members) {
  return members.ranks.empty() ? Members::World(world.size()).ranks : members.ranks;
}

Bytes Random(DataType dtype, size_t elements, std::mt19937& random) {
  Bytes data(elements * ElementSize(dtype));
  Fill(dtype, data.data(), elements, random);
  return data;
}

// Memory of the tensors of a batch on all members, by place.
struct Tensors {
  std::vector<std::vector<Bytes>> inputs, outputs;  // [place][tensor]
};

// Runs the batch that batch_of(place) describes on every member.
void RunOn(HostsWorld& world, SetBackends& backends, const std::vector<int>& ranks,
           const std::function<Batch(size_t)>& batch_of) {
  world.Run([&](int r) {
    const auto at = std::find(ranks.begin(), ranks.end(), r);
    if (at == ranks.end()) return;
    TraceSink trace;
    const Batch batch = batch_of(static_cast<size_t>(at - ranks.begin()));
    auto& backend = *backends[static_cast<size_t>(r)];
    CHECK(backend.Supports(batch));
    CHECK_OK(backend.Run(batch, After(NowNs(), kLimit), trace));
    CHECK_EQ(world.wire(r).open(), 0u);
  });
}

// Empty contributions, small ones, and some of several blocks.
size_t RaggedSize(size_t place, size_t tensor, std::mt19937& random) {
  switch ((place + tensor) % 4) {
    case 0: return 0;
    case 1: return random() % 7;
    case 2: return random() % 2000;
    default: return random() % 90000;
  }
}

void CheckAllgather(HostsWorld& world, SetBackends& backends, const Members& members,
                    DataType dtype, size_t tensors, std::mt19937& random) {
  const std::vector<int> ranks = RanksOf(world, members);
  const size_t element = ElementSize(dtype);
  std::vector<std::vector<size_t>> sizes(tensors);  // bytes, [tensor][place]
  std::vector<Bytes> expected(tensors);
  Tensors data;
  data.inputs.resize(ranks.size());
  data.outputs.resize(ranks.size());
  for (size_t t = 0; t < tensors; ++t) {
    for (size_t place = 0; place < ranks.size(); ++place) {
      const size_t elements = RaggedSize(place, t, random) / element;
      data.inputs[place].push_back(Random(dtype, elements, random));
      sizes[t].push_back(elements * element);
      expected[t].insert(expected[t].end(), data.inputs[place][t].begin(),
                         data.inputs[place][t].end());
    }
    for (auto& outputs : data.outputs) outputs.emplace_back(expected[t].size(), 0xEE);
  }
  RunOn(world, backends, ranks, [&](size_t place) {
    Batch batch;
    batch.kind = Collective::kAllgather;
    batch.reduce.dtype = dtype;
    for (size_t t = 0; t < tensors; ++t) {
      BatchEntry entry;
      entry.name = "gather";
      entry.input = data.inputs[place][t].data();
      entry.output = data.outputs[place][t].data();
      entry.elements = data.inputs[place][t].size() / element;
      entry.receive_bytes = sizes[t];
      batch.entries.push_back(entry);
    }
    return batch;
  });
  for (size_t place = 0; place < ranks.size(); ++place) {
    for (size_t t = 0; t < tensors; ++t) CHECK(data.outputs[place][t] == expected[t]);
  }
}

void CheckBroadcast(HostsWorld& world, SetBackends& backends, const Members& members, int root,
                    DataType dtype, const std::vector<size_t>& sizes, std::mt19937& random) {
  const std::vector<int> ranks = RanksOf(world, members);
  Tensors data;
  data.inputs.resize(ranks.size());
  data.outputs.resize(ranks.size());
  for (size_t place = 0; place < ranks.size(); ++place) {
    for (const size_t elements : sizes) {
      data.inputs[place].push_back(Random(dtype, elements, random));
      data.outputs[place].emplace_back(elements * ElementSize(dtype), 0xEE);
    }
  }
  const std::vector<Bytes> expected = data.inputs[static_cast<size_t>(root)];
  const bool in_place = random() % 2 == 0;
  RunOn(world, backends, ranks, [&](size_t place) {
    Batch batch;
    batch.kind = Collective::kBroadcast;
    batch.root = root;
    batch.reduce.dtype = dtype;
    for (size_t t = 0; t < sizes.size(); ++t) {
      BatchEntry entry;
      entry.input = data.inputs[place][t].data();
      entry.output = (in_place ? data.inputs : data.outputs)[place][t].data();
      entry.elements = sizes[t];
      batch.entries.push_back(entry);
    }
    return batch;
  });
  for (size_t place = 0; place < ranks.size(); ++place) {
    CHECK((in_place ? data.inputs : data.outputs)[place] == expected);
  }
}

// What hosts that are summed one after the other give, as partial results, rounded once.
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
    for (size_t place = 0; place < ranks.size(); ++place) {
      if (hosts[static_cast<size_t>(ranks[place])] == host) here.push_back(sources[place]);
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

// Parts of any sizes, not only those that the engine cuts.
std::string CheckReducescatter(HostsWorld& world, const Hosts& hosts, SetBackends& backends,
                               const Members& members, const ReduceSpec& spec, size_t tensors,
                               std::mt19937& random) {
  const std::vector<int> ranks = RanksOf(world, members);
  const size_t element = ElementSize(spec.dtype);
  std::vector<std::vector<size_t>> parts(tensors);  // elements, [tensor][place]
  std::vector<size_t> totals(tensors, 0);
  Tensors data;
  data.inputs.resize(ranks.size());
  data.outputs.resize(ranks.size());
  for (size_t t = 0; t < tensors; ++t) {
    for (size_t place = 0; place < ranks.size(); ++place) {
      parts[t].push_back(RaggedSize(place, t, random) / 8);
      totals[t] += parts[t].back();
    }
    for (size_t place = 0; place < ranks.size(); ++place) {
      data.inputs[place].push_back(Random(spec.dtype, totals[t], random));
      data.outputs[place].emplace_back(parts[t][place] * element, 0xEE);
    }
  }
  const Tensors before = data;
  RunOn(world, backends, ranks, [&](size_t place) {
    Batch batch;
    batch.kind = Collective::kReducescatter;
    batch.reduce = spec;
    for (size_t t = 0; t < tensors; ++t) {
      BatchEntry entry;
      entry.name = "scatter";
      entry.input = data.inputs[place][t].data();
      entry.output = data.outputs[place][t].data();
      entry.elements = totals[t];
      entry.parts = parts[t];
      batch.entries.push_back(entry);
    }
    return batch;
  });
  if (before.inputs != data.inputs) return "inputs changed";
  for (size_t t = 0; t < tensors; ++t) {
    std::vector<const void*> sources;
    for (const auto& inputs : before.inputs) sources.push_back(inputs[t].data());
    const Bytes all = SummedByHosts(spec, hosts, ranks, sources, totals[t]);
    size_t begin = 0;
    for (size_t place = 0; place < ranks.size(); ++place) {
      const Bytes& got = data.outputs[place][t];
      if (!std::equal(got.begin(), got.end(), all.begin() + static_cast<ptrdiff_t>(begin))) {
        return "tensor " + std::to_string(t) + " of rank " + std::to_string(ranks[place]);
      }
      begin += got.size();
    }
  }
  return "";
}

constexpr Algorithm kBoth[] = {Algorithm::kThreePhase, Algorithm::kLeader};

TEST(allgathers_of_ragged_and_empty_contributions_on_every_layout) {
  std::mt19937 random(hororing_test::Seed());
  size_t number = 0;
  for (const Hosts& hosts : kLayouts) {
    for (const Algorithm algorithm : kBoth) {
      // Slots of 256 KiB: several blocks.
      HostsWorld world(++number % 3 == 0 ? "queue" : "inproc", hosts, {}, 256 << 10);
      SetBackends backends = Backends(world, algorithm);
      for (const DataType dtype : kAllTypes) {
        CheckAllgather(world, backends, {}, dtype, 1 + random() % 4, random);
      }
    }
  }
}

TEST(broadcasts_from_every_root_on_every_layout) {
  std::mt19937 random(hororing_test::Seed());
  size_t number = 0;
  for (const Hosts& hosts : kLayouts) {
    for (const Algorithm algorithm : kBoth) {
      HostsWorld world(++number % 3 == 0 ? "queue" : "inproc", hosts, {}, 256 << 10);
      SetBackends backends = Backends(world, algorithm);
      for (int root = 0; root < world.size(); ++root) {
        const DataType dtype = kAllTypes[random() % 11];
        CheckBroadcast(world, backends, {}, root, dtype, {1}, random);
        CheckBroadcast(world, backends, {}, root, dtype, {0, 77, 0, 50000, 3}, random);
        CheckBroadcast(world, backends, {}, root, dtype, {random() % 500000}, random);
      }
    }
  }
}

TEST(reducescatters_of_every_type_and_operation_on_every_layout) {
  std::mt19937 random(hororing_test::Seed());
  size_t number = 0;
  for (const Hosts& hosts : kLayouts) {
    for (const Algorithm algorithm : kBoth) {
      HostsWorld world(++number % 3 == 0 ? "queue" : "inproc", hosts, {}, 256 << 10);
      SetBackends backends = Backends(world, algorithm);
      for (const ReduceSpec& spec : AllSpecs()) {
        const size_t tensors = 1 + random() % 3;
        const std::string verdict =
            CheckReducescatter(world, hosts, backends, {}, spec, tensors, random);
        CHECK_EQ(
            Text(hosts) + ", " + Name(algorithm) + ", " + Describe(spec, {}, world.size()) + ": " +
                verdict,
            Text(hosts) + ", " + Name(algorithm) + ", " + Describe(spec, {}, world.size()) + ": ");
      }
    }
  }
}

TEST(every_byte_crosses_to_a_host_once) {
  // Messages that leave a host, counted: ranks deal hosts out one by one, as a bad hostfile does.
  std::mt19937 random(hororing_test::Seed());
  const Hosts hosts = {0, 1, 0, 1, 0, 1};
  HostsWorld world("queue", hosts);
  SetBackends backends = Backends(world, Algorithm::kThreePhase);
  const auto crossing = [&] {
    int count = 0;
    for (int r = 0; r < world.size(); ++r) {
      for (const int peer : world.wire(r).sent_to()) {
        count += hosts[static_cast<size_t>(peer)] != hosts[static_cast<size_t>(r)] ? 1 : 0;
      }
    }
    return count;
  };
  int before = crossing();
  CheckBroadcast(world, backends, {}, 1, DataType::kFloat32, {100}, random);
  CHECK_EQ(crossing() - before, 1);
  before = crossing();
  CheckBroadcast(world, backends, {}, 1, DataType::kFloat32, {40000}, random);  // three lanes
  CHECK_EQ(crossing() - before, 3);
}

}  // namespace
}  // namespace hororing
