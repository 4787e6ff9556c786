// Rung 1: the fusion planner.
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "schedule/fusion_planner.h"

using namespace hororing;

namespace {

FusionItem Item(int64_t bytes, DataType dtype = DataType::kFloat32) {
  FusionItem item;
  item.bytes = bytes;
  item.key.reduce.dtype = dtype;
  return item;
}

}  // namespace

TEST(what_fits_is_fused_in_order) {
  const auto plan = PlanFusion({Item(64), Item(64), Item(64)}, 128);
  CHECK(plan == (std::vector<std::vector<size_t>>{{0, 1}, {2}}));
}

TEST(another_dtype_does_not_close_a_batch) {
  const auto plan = PlanFusion({Item(64), Item(64, DataType::kFloat16), Item(64)}, 1024);
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
    for (const auto& batch : PlanFusion(items, threshold)) {
      CHECK(!batch.empty());
      CHECK(seen.empty() || batch[0] > previous_first);
      previous_first = batch[0];
      int64_t bytes = 0;
      for (size_t k = 0; k < batch.size(); ++k) {
        CHECK(k == 0 || batch[k] > batch[k - 1]);
        CHECK(items[batch[k]].key == items[batch[0]].key);
        CHECK(seen.insert(batch[k]).second);
        bytes += (items[batch[k]].bytes + 63) / 64 * 64;
      }
      CHECK(bytes <= threshold || batch.size() == 1);
    }
    CHECK_EQ(seen.size(), items.size());
  }
}
