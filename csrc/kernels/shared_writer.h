// Copies into memory that other cores have read and will read next: slots and pipes.
//
// A core must take a cache line away from those that have read it before it can write it. Between
// two last-level caches that is by far the most expensive part of a sum through shared memory: 2
// GB/s (EPYC of the Zen 4 generation, ADR 37). Non-temporal (streaming) stores reach 28 GB/s
// anywhere, but the next read then comes from memory, at 15 GB/s instead of 40 in a shared cache.
// Copies are therefore ordinary unless measurements show that they are slow: threads move between
// cores, and machines do not expose their topology.
#pragma once

#include <array>
#include <cstddef>

#include "base/clock.h"

namespace hororing {

// Decides which stores the next copy uses. Pure: times are arguments.
class StorePolicy {
 public:
  // Bytes of one measurement, bytes between two measurements, and how many measure the stores in
  // use for each one that measures the others; fewer at the start, when memory is new.
  static constexpr size_t kSample = 32 << 10, kInterval = 1 << 20, kTrialEvery = 32;
  // Streaming starts if work with ordinary stores takes this many times as long, ends if it takes
  // less. Within a cache the factor is below two, which readers gain; across caches three and more.
  static constexpr double kBegin = 2.5, kEnd = 1.8;

  bool streaming() const { return streaming_; }
  // Whether Record needs the duration.
  bool measures() const { return measures_; }
  // Records that this many bytes were copied, including the work that belongs to them.
  void Record(size_t bytes, TimeNs took);

 private:
  // Duration of the latest samples, in nanoseconds per byte.
  struct Costs {
    std::array<double, 3> latest{};
    size_t count = 0;
    void Add(double cost) { latest[count++ % latest.size()] = cost; }
    // Page faults and a lost core make samples slower; nothing makes them faster.
    double Least() const;
  };
  void ChooseStores();

  bool streaming_ = false;  // of the next copy
  bool prefers_streaming_ = false;
  bool measures_ = true;
  size_t left_ = kSample;  // bytes until the next change
  size_t sampled_bytes_ = 0;
  TimeNs sampled_ns_ = 0;
  size_t samples_ = 0, next_trial_ = 1;
  Costs ordinary_, streamed_;
};

// With non-temporal stores, if the processor has them. Not ordered with later stores until a Fence.
void StreamingCopy(void* to, const void* from, size_t bytes);
void StoreFence();

class SharedWriter {
 public:
  explicit SharedWriter(TimeNs (*clock)() = NowNs) : clock_(clock) {}

  // Others may read it after the next Fence and a release store to the flag that they wait for.
  void Copy(void* to, const void* from, size_t bytes);
  // Ends copies and the work between them, timed together: a single store cannot be timed.
  void Fence();
  const StorePolicy& choice() const { return choice_; }

 private:
  void Account();

  TimeNs (*const clock_)();
  StorePolicy choice_;
  size_t copied_ = 0;     // since the last Account
  TimeNs begin_ns_ = -1;  // of the sequence being timed; -1: none
  bool needs_fence_ = false;
};

}  // namespace hororing
