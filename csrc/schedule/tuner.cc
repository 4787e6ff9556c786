#include "schedule/tuner.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace hororing {
namespace {

// Below this many bytes a smaller threshold is no other setting.
constexpr int64_t kLeastThreshold = 64 << 10;
constexpr int64_t kStep = 8;  // between thresholds
constexpr int kThresholds = 3;
constexpr TimeNs kLongHold = 5;  // times the initial hold time

}  // namespace

Tuner::Tuner(const Options& options)
    : options_(options), current_(options.initial), warmup_left_(options.warmup_samples) {
  std::vector<int64_t> thresholds = {options.initial.fusion_bytes};
  while (options.tune_fusion && thresholds.size() < kThresholds &&
         thresholds.back() / kStep >= kLeastThreshold) {
    thresholds.push_back(thresholds.back() / kStep);
  }
  std::vector<TimeNs> holds = {options.initial.hold_ns};
  if (options.tune_hold && options.initial.hold_ns > 0) {
    holds.push_back(0);
    holds.push_back(kLongHold * options.initial.hold_ns);
  }
  for (const int64_t fusion_bytes : thresholds) {
    for (const TimeNs hold_ns : holds) candidates_.push_back({{fusion_bytes, hold_ns}, {}});
  }
  log_.push_back("sample,phase,fusion_bytes,cycle_time_ms,score_mb_per_s");
  if (warmup_left_ == 0) current_ = candidates_[0].setting;
  done_ = candidates_.size() == 1;
}

double Tuner::Candidate::score() const {
  std::vector<double> sorted = scores;
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

void Tuner::Learn(const Step& step) {
  if (done_ || step.bytes == 0 || step.end_ns <= step.begin_ns) return;
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
    Log("warmup", current_, score);
    --warmup_left_;
    return;
  }
  Log("round" + std::to_string(round_), current_, score);
  candidates_[turn_ % candidates_.size()].scores.push_back(score);
  if (++turn_ == candidates_.size() << (round_ - 1)) Halve();
  current_ = candidates_[turn_ % candidates_.size()].setting;
}

void Tuner::Halve() {
  std::stable_sort(candidates_.begin(), candidates_.end(),
                   [](const Candidate& a, const Candidate& b) { return a.score() > b.score(); });
  turn_ = 0;
  candidates_.resize((candidates_.size() + 1) / 2);
  if (candidates_.size() == 1) {
    done_ = true;
    Log("best", candidates_[0].setting, candidates_[0].score());
    return;
  }
  ++round_;
  for (Candidate& candidate : candidates_) candidate.scores.clear();
}

void Tuner::Log(const std::string& phase, const Setting& setting, double score) {
  char line[160];
  std::snprintf(line, sizeof line, "%d,%s,%lld,%.6g,%.6g", samples_, phase.c_str(),
                static_cast<long long>(setting.fusion_bytes),
                static_cast<double>(setting.hold_ns) * 1e-6, score * 1e-6);
  log_.push_back(line);
}

std::vector<std::string> Tuner::TakeLog() { return std::exchange(log_, {}); }

}  // namespace hororing
