// WireType: as what sums of float32 travel between hosts. Two bytes an element instead of four, if
// the user wants it so: each contribution is rounded once before it is sent, all are added up in
// float32, and the result is rounded once more, for all ranks alike (ADR 31).
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/reduce.h"
#include "base/status.h"
#include "base/tuning.h"

namespace hororing {

enum class WireType : uint8_t { kFull, kBfloat16, kFloat16 };

const char* Name(WireType type);
// "full", "bfloat16" or "float16": one for all classes of batches (base/tuning.h), or one for each.
// kInvalidArgument where it is something else.
Status ParseWires(const std::string& names, Tuning* tuning);
// The same the other way round.
std::string WireNames(const Tuning& tuning);

// As what a batch of so many bytes travels. kFull for all but sums and averages of float32; and,
// unless `reproducible`, where it fits into a packet or two: those take their latency, however few
// bytes they have, and may be counts or losses. (Whether a tensor is alone in its batch is not
// reproducible.)
WireType WireFor(const Tuning& tuning, size_t bytes, const ReduceSpec& spec, bool reproducible);

// What the elements on the wire are, and how they are combined when they have arrived: `spec`
// itself where they are full. Prescale has been applied by then.
ReduceSpec OnWire(const ReduceSpec& spec, WireType type);
// Bytes of an element of a host's sum on the wire.
size_t PartialOnWire(const ReduceSpec& spec, WireType type);

// to[i] = factor * from[i], rounded once: float32 to what travels. REQUIRES: not kFull. The ranges
// do not overlap.
void Narrow(WireType type, double factor, void* to, const void* from, size_t n);
// And back, exactly.
void Widen(WireType type, void* to, const void* from, size_t n);

}  // namespace hororing
