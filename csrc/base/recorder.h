// Recorder: the last events of this process and the stack of its main thread, for other ranks and
// `python -m hororing doctor`. They are in a file that the Python package creates and reads
// (hororing/_engine/recorder.py) and that is mapped here, so they survive a kill.
//
// One per process, like the queue of the log. Thread-safe, without locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/status.h"
#include "base/types.h"

namespace hororing {

// These numbers are used in the file. kSubmitted is written when the loop reports the request,
// which is at most a few CYCLE_TIME_MS after the caller submitted it.
enum class Event : uint8_t { kSubmitted = 1, kAgreed = 2, kDone = 3, kFailed = 4 };

// Totals of this process in all its engines, which the file also holds, by these numbers. Times in
// ns. hororing/_engine/recorder.py names them.
enum class Total : size_t {
  kSteps,        // a step ends when a reduction is reported that has been reported in it
  kStepBeganAt,  // not a total: when the last one ended
  kRequests,     // reported
  kBatches,
  kTensors,       // in batches
  kWaitedNs,      // something was reported, nothing ran, and other ranks had not reported it yet
  kBatchNs,       // running batches
  kBatchBeganAt,  // not a total: 0 while none runs
  kBlockedNs,     // threads of the script waited for results
  kBytes,         // of this rank's inputs in batches, by AlgorithmUsed: six numbers
  kEnd = kBytes + 6
};
void Add(Total total, int64_t amount);
void Set(Total total, int64_t value);

// Called once. `stack_signal`: the signal whose handler makes the main thread write its Python
// stack into the file, after the events; 0: none.
Status OpenRecorder(int file, int stack_signal);
// Does nothing before OpenRecorder.
void Record(Event event, TimeNs now, Collective collective, int32_t process_set,
            std::string_view name);
// "pid 12; the last event: done allreduce 'x', 3 s ago; its main thread:\n  File ...", of at most
// 4 KiB. Waits for the main thread for at most that time.
std::string DescribeActivity(TimeNs patience);

}  // namespace hororing
