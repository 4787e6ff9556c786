// State shared by the files of the C interface: the process's engine, and the thread's last error.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "capi/hororing.h"
#include "engine/engine.h"

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace hororing {

// A forked child must not touch the parent's state: the threads that hold its locks do not exist.
bool InForkedChild();
// The handles of all engines of the process.
const std::shared_ptr<HandleTable>& Handles();
// Null before hr_init and after hr_shutdown.
std::shared_ptr<Engine> CurrentEngine();
Status NotInitialized();
// For hr_last_error; returns the code.
int Remember(const Status& status);

inline CuStream StreamOf(uintptr_t stream) { return reinterpret_cast<CuStream>(stream); }
// The end of a function of the C interface, whose body is a try block: no exception (no memory, no
// thread) leaves it. Caught takes it for hr_last_error, and returns the code.
#define HR_OR(value) \
  catch (...) {      \
    return value;    \
  }
int Caught() noexcept;

// requests.cc: kInvalidArgument if the request is invalid. `entry`: a new one, or Engine::Submit's.
Status MakeEntry(const hr_request& from, const ProcessSets& sets, int rank, TensorEntry* entry);
inline std::optional<double> WeightOf(const hr_request& from) {
  return from.weight != nullptr ? std::optional<double>(*from.weight) : std::nullopt;
}

// Copies what fits of a text, with a zero at its end.
void CopyText(std::string_view from, char* text, int32_t text_bytes);
inline std::string Text(const char* text) { return text != nullptr ? text : ""; }

// Milliseconds and microseconds of the configuration; zero means none at all.
inline TimeNs Scaled(double value, TimeNs unit) {
  return value <= 0 ? 0 : static_cast<TimeNs>(value * static_cast<double>(unit));
}

}  // namespace hororing
