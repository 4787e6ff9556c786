#include "schedule/cost_model.h"

#include <algorithm>
#include <cmath>

namespace hororing {
namespace {

constexpr size_t kKept = 15;  // batches of a class

template <typename T>
T Median(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

CostLine FitLine(const CostTable& table) {
  // Weights 1 / t^2 make the errors relative.
  double w = 0, wm = 0, wmm = 0, wt = 0, wmt = 0;
  for (const auto& [bytes, seconds] : table) {
    const double m = static_cast<double>(bytes), t = std::max(seconds, 1e-9);
    const double weight = 1 / (t * t);
    w += weight;
    wm += weight * m;
    wmm += weight * m * m;
    wt += weight * t;
    wmt += weight * m * t;
  }
  if (table.empty()) return {};
  const double spread = w * wmm - wm * wm;
  if (table.size() == 1 || spread <= 0) return {wt / w, 0};
  const double beta = (w * wmt - wm * wt) / spread;
  const double alpha = (wt - beta * wm) / w;
  if (beta < 0) return {wt / w, 0};
  if (alpha < 0) return {0, wmt / wmm};
  return {alpha, beta};
}

double Interpolate(const CostTable& table, const CostLine& beyond, int64_t bytes) {
  if (table.empty()) return beyond(bytes);
  const auto above = std::lower_bound(
      table.begin(), table.end(), bytes,
      [](const std::pair<int64_t, double>& point, int64_t size) { return point.first < size; });
  if (above == table.begin() || above == table.end()) {
    const auto& [size, seconds] = above == table.end() ? table.back() : table.front();
    return std::max(0.0, seconds + beyond.beta_s_per_byte * static_cast<double>(bytes - size));
  }
  const auto& [low, low_s] = *(above - 1);
  const auto& [high, high_s] = *above;
  const double part = static_cast<double>(bytes - low) / static_cast<double>(high - low);
  return low_s + part * (high_s - low_s);
}

void CostModel::Add(int64_t bytes, double seconds) {
  const double octave = std::log2(static_cast<double>(std::max<int64_t>(bytes, 1)));
  for (auto* classes : {&classes_, &window_}) {
    Batches& kept = (*classes)[static_cast<int>(std::lround(2 * octave))];
    kept.emplace_back(bytes, seconds);
    if (kept.size() > kKept) kept.pop_front();
  }
}

double CostModel::Moved(CostModel* before, size_t least) const {
  const CostTable table = before->Table();
  const CostLine line = FitLine(table);
  double moved = 0, expected = 0;
  for (const auto& [octave, batches] : window_) {
    if (batches.size() < least) continue;
    if (before->classes_.count(octave) == 0) {
      before->classes_[octave] = batches;
      continue;
    }
    std::vector<double> off;  // of each batch: classes hold different sizes
    double usual = 0;
    for (const auto& [bytes, seconds] : batches) {
      const double cost = Interpolate(table, line, bytes);
      off.push_back(seconds - cost);
      usual += cost;
    }
    std::sort(off.begin(), off.end());
    const size_t count = off.size();
    const double spread = off[3 * count / 4] - off[count / 4];  // single slow batches do not count
    const double beyond = std::abs(off[count / 2]) - spread;
    moved += std::max(0.0, beyond) * static_cast<double>(count);
    expected += usual;
  }
  return expected > 0 ? moved / expected : 0;
}

CostTable CostModel::Table() const {
  CostTable table;
  double longest = 0;
  for (const auto& [octave, kept] : classes_) {
    std::vector<int64_t> sizes;
    std::vector<double> times;
    for (const auto& [bytes, seconds] : kept) {
      sizes.push_back(bytes);
      times.push_back(seconds);
    }
    longest = std::max(longest, Median(times));
    table.emplace_back(Median(sizes), longest);
  }
  return table;
}

}  // namespace hororing
