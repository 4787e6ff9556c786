// Requests of compiled programs that the engine has not yet completed, and the threads that tell
// XLA.
//
// XLA runs what comes next inside the call that completes a future, on the thread that makes it:
// computations, or the next request. So this is never a thread of the engine, holds no lock, and
// another thread goes on watching meanwhile: however long the computation takes, and even if it
// waits for another request, that one is completed.
//
// Callable from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "jax/xla_api.h"

namespace hororing::jax {

// Copies results that the core has allocated to XLA's memory. Returns what is wrong with them.
using TakeResults = std::function<XlaError*(int64_t handle)>;

// Takes over a submitted request; completes its future, which `call` gets, at once or from a thread
// of this file.
XlaError* CompleteLater(XlaCall* call, int64_t handle, TakeResults take);

// Whether no request is in flight.
bool NothingInFlight();

// The error of a failed request, of which hr_last_error() of this thread has the text.
XlaError* CoreError(const XlaApi* api, int code);

// An error as hororing/jax/errors.py reads it. `rank`: the one to blame, or -1.
XlaError* MakeError(const XlaApi* api, int code, const std::string& text, int rank = -1);

// Ends the threads, after an engine has ended: nothing is in flight any more. Waits for a second at
// most.
void EndThreads();

}  // namespace hororing::jax
