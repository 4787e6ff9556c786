// The host backend over worlds of threads: all collectives except allreduce.

#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "backend_world.h"
#include "check.h"

namespace hororing {
namespace {

constexpr int kWorldSizes[] = {1, 2, 3, 5, 8};

// The bytes that rank r contributes to tensor t: ragged, sometimes nothing.
Bytes Contribution(int rank, size_t tensor) {
  const size_t bytes = (static_cast<size_t>(rank) * 7 + tensor * 13) % 5 * (tensor + 1) * 100;
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<unsigned char>(static_cast<size_t>(rank) * 31 + tensor * 17 + i);
  }
  return data;
}

TEST(allgather_concatenates_ragged_parts_in_rank_order) {
  for (int ranks : kWorldSizes) {
    for (size_t tensors : {size_t{1}, size_t{2}, size_t{9}}) {
      TestWorld world(ranks);
      std::vector<Bytes> expected(tensors);
      std::vector<std::vector<size_t>> sizes(tensors);
      for (size_t t = 0; t < tensors; ++t) {
        for (int r = 0; r < ranks; ++r) {
          const Bytes part = Contribution(r, t);
          sizes[t].push_back(part.size());
          expected[t].insert(expected[t].end(), part.begin(), part.end());
        }
      }
      world.Run([&](int r, Rank& rank) {
        for (int round = 0; round < 3; ++round) {
          std::vector<Bytes> inputs, outputs;
          for (size_t t = 0; t < tensors; ++t) {
            inputs.push_back(Contribution(r, t));
            outputs.emplace_back(expected[t].size(), static_cast<unsigned char>(0xEE));
          }
          Batch batch;
          batch.kind = Collective::kAllgather;
          for (size_t t = 0; t < tensors; ++t) {
            BatchEntry entry;
            entry.name = "g" + std::to_string(t);
            entry.input = inputs[t].data();
            entry.output = outputs[t].data();
            entry.elements = inputs[t].size();
            entry.reduce.dtype = DataType::kUint8;
            entry.receive_bytes = sizes[t];
            batch.entries.push_back(entry);
          }
          CHECK_OK(rank.host->Run(batch, After(NowNs(), kLimit), rank.trace));
          for (size_t t = 0; t < tensors; ++t) CHECK(outputs[t] == expected[t]);
        }
      });
    }
  }
}

TEST(allgather_with_sizes_that_do_not_fit_is_refused) {
  TestWorld world(1);
  Batch batch;
  batch.kind = Collective::kAllgather;
  BatchEntry entry;
  entry.elements = 3;
  entry.reduce.dtype = DataType::kUint8;
  entry.receive_bytes = {8};
  batch.entries.push_back(entry);
  TraceSink trace;
  CHECK(world.rank(0).host->Run(batch, kForever, trace).code() == Code::kInternal);
}

// The bytes of tensor t that rank `from` sends to rank `to`: ragged, sometimes nothing.
Bytes Mail(int from, int to, size_t tensor) { return Contribution(from * 3 + to * 5, tensor); }

TEST(alltoall_brings_every_part_to_its_rank_in_rank_order) {
  for (int ranks : hororing_test::AllOrFew<int>({1, 2, 3, 4, 5, 8}, {3, 5})) {
    for (size_t tensors : {size_t{1}, size_t{2}, size_t{7}}) {
      TestWorld world(ranks);
      world.Run([&](int r, Rank& rank) {
        std::vector<Bytes> inputs(tensors), outputs(tensors), expected(tensors);
        Batch batch;
        batch.kind = Collective::kAlltoall;
        for (size_t t = 0; t < tensors; ++t) {
          BatchEntry entry;
          for (int q = 0; q < ranks; ++q) {
            const Bytes sent = Mail(r, q, t), received = Mail(q, r, t);
            entry.send_bytes.push_back(sent.size());
            entry.receive_bytes.push_back(received.size());
            inputs[t].insert(inputs[t].end(), sent.begin(), sent.end());
            expected[t].insert(expected[t].end(), received.begin(), received.end());
          }
          outputs[t].assign(expected[t].size(), 0xEE);
          entry.name = "a" + std::to_string(t);
          entry.input = inputs[t].data();
          entry.output = outputs[t].data();
          entry.elements = inputs[t].size();
          entry.reduce.dtype = DataType::kUint8;
          batch.entries.push_back(entry);
        }
        for (int round = 0; round < 3; ++round) {
          CHECK_OK(rank.host->Run(batch, After(NowNs(), kLimit), rank.trace));
          for (size_t t = 0; t < tensors; ++t) {
            CHECK(outputs[t] == expected[t]);
            outputs[t].assign(expected[t].size(), 0xEE);
          }
        }
      });
    }
  }
}

TEST(alltoall_with_sizes_that_do_not_fit_is_refused) {
  TestWorld world(1);
  Batch batch;
  batch.kind = Collective::kAlltoall;
  BatchEntry entry;
  entry.elements = 3;
  entry.reduce.dtype = DataType::kUint8;
  entry.receive_bytes = {2};
  for (const std::vector<size_t>& sizes : {std::vector<size_t>{2}, std::vector<size_t>{2, 1}}) {
    entry.send_bytes = sizes;
    batch.entries = {entry};
    CHECK(world.rank(0).host->Run(batch, kForever, world.rank(0).trace).code() == Code::kInternal);
  }
}

// Uneven parts of every kind; the last tensor is empty.
std::vector<std::vector<size_t>> RandomParts(int ranks, size_t tensors, std::mt19937& random) {
  const size_t choices[] = {0, 0, 1, 2, 63, 1009, 30011};
  std::vector<std::vector<size_t>> parts(tensors);
  for (std::vector<size_t>& each : parts) {
    for (int r = 0; r < ranks; ++r) each.push_back(choices[random() % std::size(choices)]);
  }
  if (tensors > 1) parts.back().assign(static_cast<size_t>(ranks), 0);
  return parts;
}

TEST(reducescatter_gives_the_bits_of_rank_order_however_many_tensors) {
  std::mt19937 random(hororing_test::Seed());
  for (int ranks : hororing_test::AllOrFew<int>({1, 2, 3, 4, 5, 8}, {3, 5})) {
    TestWorld world(ranks);
    for (const ReduceSpec& spec : AllSpecs()) {
      if (random() % 3 != 0) continue;  // each run takes every spec with some of the world sizes
      const size_t element = ElementSize(spec.dtype);
      const auto parts = RandomParts(ranks, 1 + random() % 4, random);
      // Per tensor: the ranks' inputs, their outputs, and the whole result.
      std::vector<std::vector<Bytes>> inputs(parts.size()), outputs(parts.size());
      std::vector<Bytes> expected;
      for (size_t t = 0; t < parts.size(); ++t) {
        size_t elements = 0;
        for (const size_t part : parts[t]) elements += part;
        std::vector<const void*> sources;
        for (const size_t part : parts[t]) {
          inputs[t].emplace_back(elements * element);
          Fill(spec.dtype, inputs[t].back().data(), elements, random);
          outputs[t].emplace_back(part * element + 1, static_cast<unsigned char>(0xA5));
        }
        for (const Bytes& input : inputs[t]) sources.push_back(input.data());
        expected.emplace_back(elements * element);
        ReduceMany(spec, ranks, expected[t].data(), sources.data(), ranks, elements);
      }
      const auto before = inputs;
      world.Run([&](int rank, Rank& each) {
        const size_t r = static_cast<size_t>(rank);
        Batch batch;
        batch.kind = Collective::kReducescatter;
        for (size_t t = 0; t < parts.size(); ++t) {
          BatchEntry entry;
          entry.name = "t" + std::to_string(t);
          entry.input = inputs[t][r].data();
          entry.output = outputs[t][r].data();
          entry.elements = inputs[t][r].size() / element;
          entry.reduce = spec;
          entry.parts = parts[t];
          batch.entries.push_back(entry);
        }
        CHECK_OK(each.host->Run(batch, After(NowNs(), kLimit), each.trace));
      });
      CHECK(inputs == before);
      for (size_t t = 0; t < parts.size(); ++t) {
        Bytes joined;
        for (Bytes& output : outputs[t]) {
          CHECK_EQ(output.back(), 0xA5);
          joined.insert(joined.end(), output.begin(), output.end() - 1);
        }
        if (joined != expected[t]) {
          CHECK_EQ("tensor " + std::to_string(t) + " of " + Describe(spec, parts[t], ranks),
                   std::string("right"));
        }
      }
    }
  }
}

TEST(broadcast_brings_the_roots_tensors_to_all_ranks) {
  for (int ranks : kWorldSizes) {
    TestWorld world(ranks);
    // An empty tensor, small ones that travel together, and one that travels alone.
    for (const std::vector<size_t>& sizes :
         std::vector<std::vector<size_t>>{{1000}, {0, 1, 1009, 70000}, {5, 300007, 0, 64}, {0}}) {
      for (int root = 0; root < ranks; ++root) {
        const bool in_place = (root + static_cast<int>(sizes.size())) % 2 == 0;
        world.Run([&](int r, Rank& rank) {
          std::vector<Bytes> inputs, outputs;
          Batch batch;
          batch.kind = Collective::kBroadcast;
          batch.root = root;
          for (size_t size : sizes) {
            inputs.emplace_back(size, static_cast<unsigned char>(r + 1));
            outputs.emplace_back(size, static_cast<unsigned char>(0xEE));
          }
          for (size_t t = 0; t < sizes.size(); ++t) {
            BatchEntry entry;
            entry.name = "b" + std::to_string(t);
            entry.input = inputs[t].data();
            entry.output = in_place ? inputs[t].data() : outputs[t].data();
            entry.elements = sizes[t];
            entry.reduce.dtype = DataType::kUint8;
            batch.entries.push_back(entry);
          }
          CHECK_OK(rank.host->Run(batch, After(NowNs(), kLimit), rank.trace));
          for (size_t t = 0; t < sizes.size(); ++t) {
            const Bytes expected(sizes[t], static_cast<unsigned char>(root + 1));
            CHECK((in_place ? inputs[t] : outputs[t]) == expected);
            if (!in_place) CHECK(inputs[t] == Bytes(sizes[t], static_cast<unsigned char>(r + 1)));
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace hororing
