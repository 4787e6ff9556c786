// Settings that differ by the size of a batch, as text: one word for all classes (base/tuning.h),
// or as many with commas between them.
#pragma once

#include <array>
#include <string>

#include "base/status.h"
#include "base/tuning.h"

namespace hororing {

using WordsByClass = std::array<std::string, Tuning::kClassEnds.size() + 1>;

// kInvalidArgument where `text` has another number of words; `what` says of what.
Status SplitByClass(const std::string& text, const char* what, WordsByClass* words);
// The same the other way round.
std::string JoinByClass(const WordsByClass& words);

}  // namespace hororing
