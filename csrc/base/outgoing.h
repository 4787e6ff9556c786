// Copies into memory that other cores have read, and will read next: slots and pipes.
//
// A core must own the line that it writes; from a core that has read it since, it is taken away
// first. Within one last-level cache that costs little. Between two of them it is by far the
// dearest part of a sum through shared memory: ordinary stores reach 2 GB/s there (EPYC of the
// Zen 4 generation), though reading what lies in the other cache reaches 18. Streaming stores go
// past the caches to memory, without asking: 28 GB/s, wherever the other core is, but what is read
// next comes from memory: 15 GB/s, where in a shared cache it would be 40. So copies are ordinary
// unless that is slow, which they show themselves: threads move, and machines tell little.
#pragma once

#include <array>
#include <cstddef>

#include "base/clock.h"

namespace hororing {

// Which stores the next copy is to use. Pure: times are arguments.
class StoreChoice {
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

// With streaming stores, where the processor has them. In no order with what follows until a Fence.
void StreamingCopy(void* to, const void* from, size_t bytes);
void Fence();

class Outgoing {
 public:
  explicit Outgoing(TimeNs (*clock)() = NowNs) : clock_(clock) {}

  // Others may read it after the next Settle, and a release of whatever they wait for.
  void Copy(void* to, const void* from, size_t bytes);
  // Ends a stretch of copies, and of the work between them, which is timed with them: a single
  // store's time does not show.
  void Settle();
  const StoreChoice& choice() const { return choice_; }

 private:
  void Account();

  TimeNs (*const clock_)();
  StoreChoice choice_;
  size_t copied_ = 0;     // since the last Account
  TimeNs begin_ns_ = -1;  // of the stretch that is timed; -1: none is
  bool unsettled_ = false;
};

}  // namespace hororing
