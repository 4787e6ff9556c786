// SharedWriter: copies into memory that other cores have read, and will read next: slots and pipes.
//
// A core must own a cache line to write it, so the line is first taken from the core that has read
// it. Within one last-level cache that is cheap. Between two of them it is by far the most
// expensive part of a sum through shared memory: ordinary stores reach 2 GB/s (EPYC of the Zen 4
// generation), although reads of what lies in the other cache reach 18. Non-temporal stores bypass
// the caches: 28 GB/s wherever the other core is, but the next read comes from memory, at 15 GB/s
// where a shared cache would give 40. So copies are ordinary unless measurements show that these
// are slow: threads move between cores, and the machine does not tell.
#pragma once

#include <array>
#include <cstddef>

#include "base/clock.h"

namespace hororing {

// Which stores the next copy is to use. Pure: times are arguments.
class StorePolicy {
 public:
  // Bytes after which stores are judged, bytes from one judgement to the next, and how many of
  // these there are to each of those stores that are not in use; fewer in the beginning, when
  // memory is new.
  static constexpr size_t kSample = 32 << 10, kInterval = 1 << 20, kTrialEvery = 32;
  // Streaming begins where work with ordinary stores takes so many times as long, and ends where it
  // does not take so many times. Within one cache it is less than twice, and what readers save
  // outweighs that; across caches it is three times and more.
  static constexpr double kBegin = 2.5, kEnd = 1.8;

  bool streaming() const { return streaming_; }
  // Whether Worked needs to know how long it took.
  bool measures() const { return measures_; }
  // So many bytes were copied, and what belongs to it done.
  void Worked(size_t bytes, TimeNs took);

 private:
  // What the latest samples took, in nanoseconds per byte.
  struct Costs {
    std::array<double, 3> latest{};
    size_t count = 0;
    void Add(double cost) { latest[count++ % latest.size()] = cost; }
    // Page faults and a core that was lost make samples dearer, nothing makes them cheaper.
    double Least() const;
  };
  void Judge();

  bool streaming_ = false;  // of the next copy
  bool prefers_streaming_ = false;
  bool measures_ = true;
  size_t left_ = kSample;  // bytes until something changes
  size_t sampled_bytes_ = 0;
  TimeNs sampled_ns_ = 0;
  size_t samples_ = 0, next_trial_ = 1;
  Costs ordinary_, streamed_;
};

// With non-temporal stores, where the processor has them. In no order with what follows until a
// StoreFence.
void StreamingCopy(void* to, const void* from, size_t bytes);
void StoreFence();

class SharedWriter {
 public:
  explicit SharedWriter(TimeNs (*clock)() = NowNs) : clock_(clock) {}

  // Others may read it after the next Fence, and a release of whatever they wait for.
  void Copy(void* to, const void* from, size_t bytes);
  // Ends a stretch of copies, and of the work between them, which is timed with them: a single
  // store's time does not show.
  void Fence();
  const StorePolicy& choice() const { return choice_; }

 private:
  void Account();

  TimeNs (*const clock_)();
  StorePolicy choice_;
  size_t copied_ = 0;     // since the last Account
  TimeNs begin_ns_ = -1;  // of the stretch that is timed; -1: none is
  bool unsettled_ = false;
};

}  // namespace hororing
