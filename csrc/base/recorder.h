// Recorder: the last events of this process and the stack of its main thread, for other ranks and
// `python -m hororing doctor`. They are in a file that the Python package creates and reads
// (hororing/_engine/recorder.py) and that is mapped here, so they survive a kill.
//
// One per process, like the queue of the log. Thread-safe, without locks.
#pragma once

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
