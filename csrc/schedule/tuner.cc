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
constexpr TimeNs kLongHold = 5;         // times the initial hold time
constexpr size_t kDecidingSamples = 3;  // the least of which the median can do without one

}  // namespace

Tuner::Tuner(const Options& options)
    : options_(options),
      current_(options.initial),
      warmup_left_(options.warmup_samples),
      best_(options.initial) {
  log_.push_back("sample,phase,fusion_bytes,cycle_time_ms,chunk_bytes,algorithm,score_mb_per_s");
  seen_.fill(true);  // nothing is known yet
  if (warmup_left_ == 0) BeginNext();
  // Where there is nothing to search, no warming up either.
  bool any = false;
  for (int i = 1; i < static_cast<int>(Search::kEnd); ++i) {
    any = any || CandidatesOf(static_cast<Search>(i)).size() > 1;
  }
  done_ = !any;
  if (warmup_left_ > 0) seen_ = {};  // warming up will tell
}

std::vector<Tuner::Setting> Tuner::Thresholds() const {
  std::vector<Setting> settings;
  int64_t fusion_bytes = best_.fusion_bytes;
  std::vector<TimeNs> holds = {best_.hold_ns};
  if (options_.tune_hold && best_.hold_ns > 0) {
    holds.push_back(0);
    holds.push_back(kLongHold * best_.hold_ns);
  }
  for (int i = 0; i < kThresholds; ++i, fusion_bytes /= kStep) {
    if (i > 0 && (!options_.tune_fusion || fusion_bytes < kLeastThreshold)) break;
    for (const TimeNs hold_ns : holds) settings.push_back({fusion_bytes, hold_ns, best_.tuning});
  }
  return settings;
}

// The best so far is the first.
std::vector<Tuner::Setting> Tuner::CandidatesOf(Search search) const {
  if (search == Search::kFusion) return Thresholds();
  std::vector<Setting> settings = {best_};
  if (search == Search::kChunks) {
    for (const int64_t chunk_bytes : options_.chunks) {
      if (!options_.tune_chunks || chunk_bytes == best_.tuning.chunk_bytes) continue;
      settings.push_back(best_);
      settings.back().tuning.chunk_bytes = chunk_bytes;
    }
    return settings;
  }
  return Algorithms(static_cast<size_t>(search) - static_cast<size_t>(Search::kAlgorithms));
}

std::vector<Tuner::Setting> Tuner::Algorithms(size_t index) const {
  std::vector<Setting> settings = {best_};
  for (const uint8_t algorithm : options_.algorithms[index]) {
    const bool other = algorithm != best_.tuning.algorithms[index];
    if (!options_.tune_algorithms || !seen_[index] || !other) continue;
    settings.push_back(best_);
    settings.back().tuning.algorithms[index] = algorithm;
  }
  return settings;
}

void Tuner::BeginNext() {
  candidates_.clear();
  while (candidates_.size() < 2) {
    search_ = static_cast<Search>(static_cast<int>(search_) + 1);
    candidates_.clear();
    if (search_ == Search::kEnd) break;
    for (const Setting& setting : CandidatesOf(search_)) candidates_.push_back({setting});
  }
  round_ = 1;
  turn_ = 0;
  current_ = best_;
  if (search_ != Search::kEnd) return;
  done_ = true;
  Log("best", best_, best_score_);
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
    if (--warmup_left_ == 0) BeginNext();
    return;
  }
  const char* const names[] = {"", "fusion", "chunks", "algorithm.1", "algorithm.2", "algorithm.3"};
  Log(std::string(names[static_cast<size_t>(search_)]) + " round " + std::to_string(round_),
      current_, score);
  candidates_[turn_ % candidates_.size()].scores.push_back(score);
  if (++turn_ == TurnsOfRound()) Halve();
  if (!done_) current_ = candidates_[turn_ % candidates_.size()].setting;
}

size_t Tuner::TurnsOfRound() const {
  size_t each = size_t{1} << (round_ - 1);
  if (candidates_.size() == 2) each = std::max(each, kDecidingSamples);
  return candidates_.size() * each;
}

void Tuner::Halve() {
  std::stable_sort(candidates_.begin(), candidates_.end(),
                   [](const Candidate& a, const Candidate& b) { return a.score() > b.score(); });
  turn_ = 0;
  candidates_.resize((candidates_.size() + 1) / 2);
  if (candidates_.size() == 1) {
    best_ = candidates_[0].setting;
    best_score_ = candidates_[0].score();
    BeginNext();
  } else {
    ++round_;
    for (Candidate& candidate : candidates_) candidate.scores.clear();
  }
  seen_ = {};
}

void Tuner::Log(const std::string& phase, const Setting& setting, double score) {
  char numbers[160];
  std::snprintf(numbers, sizeof numbers, "%lld,%.6g,%lld",
                static_cast<long long>(setting.fusion_bytes),
                static_cast<double>(setting.hold_ns) * 1e-6,
                static_cast<long long>(setting.tuning.chunk_bytes));
  const std::string algorithms =
      options_.algorithms_text ? options_.algorithms_text(setting.tuning) : "";
  char rate[32];
  std::snprintf(rate, sizeof rate, "%.6g", score * 1e-6);
  log_.push_back(std::to_string(samples_) + "," + phase + "," + numbers + ",\"" + algorithms +
                 "\"," + rate);
}

std::vector<std::string> Tuner::TakeLog() { return std::exchange(log_, {}); }

}  // namespace hororing
