// Tuner: finds the settings with which a job's steps communicate the fastest: fusion threshold and
// hold time together, then the size of chunks, then the algorithm of each class of batches that the
// job has. Each of these searches is a successive halving (K. Jamieson, A. Talwalkar,
// "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016,
// arXiv:1502.07943): every candidate is tried for a little while, the better half twice as long,
// and so on until one is left, which stays. The last two have three samples each at least, so that
// none of them decides alone. Within a round the candidates take turns, so that a machine that is
// slow for a while is slow for all of them. What the search before has found is a candidate of the
// next one.
//
// Score: bytes reduced per second of busy step time, from the first tensor of a step to the end
// of its last batch; of a candidate, the median over its samples.
//
// Pure: time is an argument. On rank 0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/tuning.h"
#include "schedule/step_watch.h"

namespace hororing {

class Tuner {
 public:
  struct Setting {
    int64_t fusion_bytes = 0;
    TimeNs hold_ns = 0;
    Tuning tuning;  // for all ranks
  };
  struct Options {
    Setting initial;          // also the largest threshold that is tried
    bool tune_fusion = true;  // false: as in `initial`
    bool tune_hold = true;
    bool tune_chunks = true;
    bool tune_algorithms = true;
    int warmup_samples = 3;  // with the initial setting, and forgotten
    int steps_per_sample = 10;
    // What else is tried, where it is to be tuned.
    std::vector<int64_t> chunks;
    std::array<std::vector<uint8_t>, 3> algorithms;             // by class, as Tuning::algorithms
    std::function<std::string(const Tuning&)> algorithms_text;  // for the log
  };
  explicit Tuner(const Options& options);

  // A step is over; see `setting` for what the next one uses.
  void Learn(const Step& step);
  // A batch was carried out.
  void Ran(int64_t bytes) { seen_[Tuning::ClassOf(static_cast<size_t>(bytes))] = true; }

  const Setting& setting() const { return current_; }
  bool done() const { return done_; }
  // Lines of the log (CSV) since the last call, the header first.
  std::vector<std::string> TakeLog();

 private:
  struct Candidate {
    Setting setting;
    std::vector<double> scores{};  // of this round
    double score() const;          // bytes per second
  };
  enum class Search { kNone, kFusion, kChunks, kAlgorithms, kEnd = kAlgorithms + 3 };

  std::vector<Setting> Thresholds() const;
  std::vector<Setting> CandidatesOf(Search search) const;
  std::vector<Setting> Algorithms(size_t index) const;
  void BeginNext();
  void Sampled(double score);
  size_t TurnsOfRound() const;
  void Halve();
  void Log(const std::string& phase, const Setting& setting, double score);

  const Options options_;
  std::vector<Candidate> candidates_;
  Setting current_;
  bool done_ = false;
  int warmup_left_;
  Search search_ = Search::kNone;
  Setting best_;  // of the searches so far
  double best_score_ = 0;
  int round_ = 1;
  size_t turn_ = 0;  // of the round
  // Of the sample under way.
  int steps_ = 0;
  int64_t bytes_ = 0;
  TimeNs busy_ns_ = 0;
  int samples_ = 0;
  std::array<bool, 3> seen_{};  // classes of batches, in this round
  std::vector<std::string> log_;
};

}  // namespace hororing
