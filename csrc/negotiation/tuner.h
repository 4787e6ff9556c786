// Tuner: finds the fusion threshold and the cycle time that make a job's communication fastest, by
// successive halving (K. Jamieson, A. Talwalkar, "Non-stochastic best arm identification and
// hyperparameter optimization", AISTATS 2016, arXiv:1502.07943). It tries every candidate for a
// short time, the better half for twice as long, and so on until one is left. The last two have at
// least three samples each, so that no single sample decides. Within a round, candidates are
// measured round-robin, so that a slow phase of the machine affects all of them.
//
// Score: bytes reduced per second of busy step time, which lasts from the first tensor of a step to
// the end of its last batch; the median over a candidate's samples.
//
// Pure: time is an argument. On rank 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "negotiation/step_watch.h"

namespace hororing {

class Tuner {
 public:
  struct Setting {
    int64_t fusion_bytes = 0;
    TimeNs cycle_time_ns = 0;
  };
  struct Options {
    Setting initial;          // also the largest threshold that is tried
    bool tune_fusion = true;  // false: as in `initial`
    bool tune_cycle_time = true;
    int warmup_samples = 3;  // with the initial setting; not scored
    int steps_per_sample = 10;
  };
  explicit Tuner(const Options& options);

  // A step has ended; `setting` is that of the next one.
  void Learn(const Step& step);

  const Setting& setting() const { return candidates_[sample_ % candidates_.size()].setting; }
  bool done() const { return candidates_.size() == 1; }
  // Lines of the log (CSV) since the last call, starting with the header.
  std::vector<std::string> TakeLog();

 private:
  struct Candidate {
    Setting setting;
    std::vector<double> scores{};  // of this round
    double score() const;          // bytes per second
  };

  void Sampled(double score);
  size_t SamplesOfRound() const;
  void Halve();
  void Log(const std::string& phase, double score);

  const Options options_;
  std::vector<Candidate> candidates_;  // never empty; the initial setting is the first
  int warmup_left_;
  int round_ = 1;
  size_t sample_ = 0;  // of the round
  // The current sample.
  int steps_ = 0;
  int64_t bytes_ = 0;
  TimeNs busy_ns_ = 0;
  int samples_ = 0;
  std::vector<std::string> log_;
};

}  // namespace hororing
