// Recorder: the last events of this process, and where its main thread is, for those who ask what
// it is doing: other ranks, and `python -m hororing doctor`. In a file that the Python package
// makes and reads (hororing/recorder.py), mapped here: a process that is killed leaves it behind.
//
// One per process, as the log's queue. Thread-safe, and without locks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/status.h"
#include "base/types.h"

namespace hororing {

// The numbers are those of the file.
enum class Event : uint8_t { kSubmitted = 1, kAgreed = 2, kDone = 3, kFailed = 4 };

// Once, for good. `stack_signal`: one that makes the main thread write its Python stack behind the
// events in the file, by the handler that is installed; 0: there is none.
Status OpenRecorder(int file, int stack_signal);
// Nothing before OpenRecorder.
void Record(Event event, TimeNs now, Collective collective, std::string_view name);
// "pid 12; the last event: done allreduce 'x', 3 s ago; its main thread:\n  File ...", of at most
// 4 KiB. Waits for the main thread at most so long.
std::string WhatIsDoneHere(TimeNs patience);

}  // namespace hororing
