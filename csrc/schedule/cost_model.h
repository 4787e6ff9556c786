// CostModel: what a batch of so many bytes costs, learned from the batches that were run.
//
// Two forms of one thing. The line T(M) = alpha + beta * M (R. Hockney, "The communication
// challenge for MPP", Parallel Computing 20, 1994, doi:10.1016/S0167-8191(06)80021-9), and the
// measured points themselves, which are followed where the line is too simple (caches, another
// algorithm from some size on). Both rest on medians over classes of sizes, so that single slow
// batches (a rank that was late, a machine that was busy) do not count.
//
// Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

namespace hororing {

struct CostLine {
  double alpha_s = 0;
  double beta_s_per_byte = 0;

  double operator()(int64_t bytes) const {
    return alpha_s + beta_s_per_byte * static_cast<double>(bytes);
  }
};

// Measured points, sizes ascending.
using CostTable = std::vector<std::pair<int64_t, double>>;  // bytes, seconds

// The line with the least squares of relative errors, so that small batches count as much as
// large ones. Neither number is negative; one size alone tells the latency, not the rate.
CostLine FitLine(const CostTable& table);

// By the points on both sides of `bytes`; outside of them, on from the nearest with `beyond`'s
// rate. Never negative.
double Interpolate(const CostTable& table, const CostLine& beyond, int64_t bytes);

class CostModel {
 public:
  void Add(int64_t bytes, double seconds);
  // Median size and time of each class of sizes (two to an octave) that was seen; times do not
  // decrease.
  CostTable Table() const;
  // How many classes there are: from two on, there is a rate.
  size_t sizes() const { return classes_.size(); }

  // A window of batches begins.
  void BeginWindow() { window_.clear(); }
  // How far the batches of the window are from what `before` expects, beyond what they differ among
  // themselves (medians and quartiles of classes with `least` batches or more), as a part of that.
  // A class that `before` lacks becomes a part of it: what was never measured has not changed.
  double Moved(CostModel* before, size_t least) const;
  // Forgets what was measured before the window, if there is still a rate then.
  void KeepWindow() {
    if (window_.size() > 1) classes_ = window_;
  }

 private:
  using Batches = std::deque<std::pair<int64_t, double>>;  // bytes, seconds
  std::map<int, Batches> classes_;                         // of each the latest few
  std::map<int, Batches> window_;
};

}  // namespace hororing
