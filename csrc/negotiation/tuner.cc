#include "negotiation/tuner.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace hororing {
namespace {

// Smaller thresholds are not tried.
constexpr int64_t kMinThreshold = 64 << 10;
constexpr int64_t kStep = 8;  // between thresholds
constexpr int kThresholds = 3;
constexpr TimeNs kLongCycle = 5;        // times the initial cycle time
constexpr size_t kDecidingSamples = 3;  // so that the median ignores one outlier

}  // namespace

Tuner::Tuner(const Options& options) : options_(options), warmup_left_(options.warmup_samples) {
  log_.push_back("sample,phase,fusion_bytes,cycle_time_ms,score_mb_per_s");
  std::vector<TimeNs> cycle_times = {options.initial.cycle_time_ns};
  if (options.tune_cycle_time && cycle_times[0] > 0) {
    cycle_times.push_back(0);
    cycle_times.push_back(kLongCycle * cycle_times[0]);
  }
  int64_t fusion_bytes = options.initial.fusion_bytes;
  for (int i = 0; i < kThresholds; ++i, fusion_bytes /= kStep) {
    if (i > 0 && (!options.tune_fusion || fusion_bytes < kMinThreshold)) break;
    for (const TimeNs cycle_time_ns : cycle_times)
      candidates_.push_back({{fusion_bytes, cycle_time_ns}});
  }
}

double Tuner::Candidate::score() const {
  std::vector<double> sorted = scores;
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

void Tuner::Learn(const Step& step) {
  if (done() || step.bytes == 0 || step.end_ns <= step.begin_ns) return;
  bytes_ += step.bytes;
  busy_ns_ += step.end_ns - step.begin_ns;
  if (++steps_ < options_.steps_per_sample) return;
  Sampled(static_cast<double>(bytes_) / (static_cast<double>(busy_ns_) * 1e-9));
  steps_ = 0;
  bytes_ = 0;
  busy_ns_ = 0;
}

void Tuner::Sampled(double score) {
  ++samples_;
  if (warmup_left_ > 0) {
    --warmup_left_;
    return Log("warmup", score);
  }
  Log("round " + std::to_string(round_), score);
  candidates_[sample_ % candidates_.size()].scores.push_back(score);
  if (++sample_ == SamplesOfRound()) Halve();
}

size_t Tuner::SamplesOfRound() const {
  size_t each = size_t{1} << (round_ - 1);
  if (candidates_.size() == 2) each = std::max(each, kDecidingSamples);
  return candidates_.size() * each;
}

void Tuner::Halve() {
  std::stable_sort(candidates_.begin(), candidates_.end(),
                   [](const Candidate& a, const Candidate& b) { return a.score() > b.score(); });
  candidates_.resize((candidates_.size() + 1) / 2);
  sample_ = 0;
  if (done()) return Log("best", candidates_[0].score());
  ++round_;
  for (Candidate& candidate : candidates_) candidate.scores.clear();
}

void Tuner::Log(const std::string& phase, double score) {
  char numbers[160];
  std::snprintf(numbers, sizeof numbers, ",%lld,%.6g,%.6g",
                static_cast<long long>(setting().fusion_bytes),
                static_cast<double>(setting().cycle_time_ns) * 1e-6, score * 1e-6);
  log_.push_back(std::to_string(samples_) + "," + phase + numbers);
}

std::vector<std::string> Tuner::TakeLog() { return std::exchange(log_, {}); }

}  // namespace hororing
