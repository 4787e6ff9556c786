#include "schedule/bucket_plan.h"

#include <algorithm>

namespace hororing {
namespace {

// Ends that differ by less are equal.
constexpr double kRounding = 1 + 1e-12;

}  // namespace

std::vector<size_t> PlanBuckets(const std::vector<PlanItem>& items, const BucketCost& cost,
                                int64_t limit_bytes) {
  const size_t n = items.size();
  std::vector<double> end_s(n + 1, 0);  // F
  std::vector<size_t> begin(n + 1, 0);  // the j that F[i] is reached with
  for (size_t i = 1; i <= n; ++i) {
    int64_t bytes = 0;
    for (size_t j = i; j-- > 0;) {
      bytes += items[j].bytes;
      if (j + 1 < i && (bytes > limit_bytes || items[j + 1].starts)) break;
      const double end = std::max(end_s[j], items[i - 1].ready_s) + cost(bytes);
      if (j + 1 < i && end > end_s[i] * kRounding) continue;
      end_s[i] = end;
      begin[i] = j;
    }
  }
  std::vector<size_t> ends;
  for (size_t i = n; i > 0; i = begin[i]) ends.push_back(i);
  std::reverse(ends.begin(), ends.end());
  return ends;
}

double PlanEnd(const std::vector<PlanItem>& items, const std::vector<size_t>& ends,
               const BucketCost& cost) {
  double end_s = 0;
  size_t begin = 0;
  for (const size_t end : ends) {
    int64_t bytes = 0;
    for (size_t i = begin; i < end; ++i) bytes += items[i].bytes;
    end_s = std::max(end_s, items[end - 1].ready_s) + cost(bytes);
    begin = end;
  }
  return end_s;
}

}  // namespace hororing
