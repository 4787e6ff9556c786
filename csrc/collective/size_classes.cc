#include "collective/size_classes.h"

#include <algorithm>
#include <vector>

namespace hororing {

Status SplitByClass(const std::string& text, const char* what, WordsByClass* words) {
  std::vector<std::string> given(1);
  for (const char each : text) {
    if (each == ',') {
      given.emplace_back();
    } else if (each != ' ') {
      given.back() += each;
    }
  }
  if (given.size() == 1) given.resize(words->size(), given[0]);
  if (given.size() != words->size()) {
    return Status(Code::kInvalidArgument, std::string(what) + " '" + text + "': give one, or " +
                                              std::to_string(words->size()) +
                                              " with commas between them, by size of batch");
  }
  std::copy(given.begin(), given.end(), words->begin());
  return Status::Ok();
}

std::string JoinByClass(const WordsByClass& words) {
  if (std::all_of(words.begin(), words.end(), [&](const auto& each) { return each == words[0]; })) {
    return words[0];
  }
  std::string text = words[0];
  for (size_t i = 1; i < words.size(); ++i) text += "," + words[i];
  return text;
}

}  // namespace hororing
