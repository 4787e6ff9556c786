// Rung 1: the fusion planner.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "engine/fusion_planner.h"

using namespace hororing;

namespace {

FusionItem Item(int64_t bytes, DataType dtype = DataType::kFloat32) {
  FusionItem item;
  item.bytes = bytes;
  item.reduce.dtype = dtype;
  return item;
}

}  // namespace

TEST(what_fits_is_fused_in_order) {
  const auto plan = PlanFusion({Item(64), Item(64), Item(64)}, 128);
  CHECK(plan == (std::vector<std::vector<size_t>>{{0, 1}, {2}}));
}

TEST(tensors_of_several_dtypes_share_a_batch_with_those_of_a_dtype_side_by_side) {
  const FusionItem halves = Item(64, DataType::kFloat16), ints = Item(64, DataType::kInt32);
  const auto plan = PlanFusion({Item(64), halves, ints, Item(64), ints, halves}, 1024);
  CHECK(plan == (std::vector<std::vector<size_t>>{{0, 3, 1, 5, 2, 4}}));
}

TEST(a_reduce_scatter_of_another_dtype_neither_joins_nor_closes_a_batch) {
  FusionItem floats = Item(64), ints = Item(64, DataType::kInt32);
  for (FusionItem* item : {&floats, &ints}) {
    item->key.kind = Collective::kReducescatter;
    item->key.only = item->reduce;
  }
  const auto plan = PlanFusion({floats, ints, floats}, 1024);
  CHECK(plan == (std::vector<std::vector<size_t>>{{0, 2}, {1}}));
}

TEST(padding_counts) {
  const auto plan = PlanFusion({Item(1), Item(1), Item(1)}, 128);
  CHECK(plan == (std::vector<std::vector<size_t>>{{0, 1}, {2}}));
}

TEST(a_tensor_larger_than_the_threshold_goes_alone) {
  const auto plan = PlanFusion({Item(4), Item(5000), Item(4)}, 1000);
  CHECK(plan == (std::vector<std::vector<size_t>>{{0}, {1}, {2}}));
}

TEST(threshold_zero_means_no_fusion) {
  const auto plan = PlanFusion({Item(0), Item(4), Item(4)}, 0);
  CHECK_EQ(plan.size(), size_t{3});
}

TEST(every_item_is_in_exactly_one_batch_of_one_key_within_the_threshold) {
  std::mt19937 random(hororing_test::Seed());
  for (int round = 0; round < 500; ++round) {
    std::vector<FusionItem> items;
    for (size_t i = random() % 40; i > 0; --i) {
      items.push_back(Item(static_cast<int64_t>(random() % 3000),
                           random() % 2 ? DataType::kFloat32 : DataType::kInt32));
    }
    const int64_t threshold = static_cast<int64_t>(random() % 6000);
    std::set<size_t> seen;
    size_t previous_first = 0;
    std::vector<size_t> previous;
    const auto padded = [&](size_t at) { return (items[at].bytes + 63) / 64 * 64; };
    for (const auto& batch : PlanFusion(items, threshold)) {
      CHECK(!batch.empty());
      // A batch begins only with an item that did not fit into the previous one.
      int64_t before = padded(batch[0]);
      for (const size_t at : previous) before += at < batch[0] ? padded(at) : 0;
      CHECK(previous.empty() || threshold == 0 || before > threshold);
      previous = batch;
      CHECK(batch[0] == *std::min_element(batch.begin(), batch.end()));
      CHECK(seen.empty() || batch[0] > previous_first);
      previous_first = batch[0];
      int64_t bytes = 0;
      std::set<DataType> dtypes;
      for (size_t k = 0; k < batch.size(); ++k) {
        const bool same = k > 0 && items[batch[k]].reduce == items[batch[k - 1]].reduce;
        CHECK(same ? batch[k] > batch[k - 1] : dtypes.insert(items[batch[k]].reduce.dtype).second);
        CHECK(items[batch[k]].key == items[batch[0]].key);
        CHECK(seen.insert(batch[k]).second);
        bytes += padded(batch[k]);
      }
      CHECK(bytes <= threshold || batch.size() == 1);
    }
    CHECK_EQ(seen.size(), items.size());
    CHECK_EQ(PlanFusion(items, int64_t{1} << 40).size(), items.empty() ? size_t{0} : size_t{1});
  }
}
