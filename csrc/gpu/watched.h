// Watched: a function of a library that is found at run time. Calls by the loop's thread are
// watched (base/call_watch.h), because some of NVIDIA's may never return.
#pragma once

#include "base/call_watch.h"

namespace hororing {

template <typename Signature>
class Watched;

template <typename Result, typename... Parameters>
class Watched<Result(Parameters...)> {
 public:
  using Pointer = Result (*)(Parameters...);

  // `name` and its library are literals.
  Watched(const char* name, const char* library, bool waits_for_kernels)
      : name_{name, library, waits_for_kernels} {}
  Result operator()(Parameters... arguments) const {
    const CallWatch::Call call(CallWatch::Current(), name_);
    return function_(arguments...);
  }
  Pointer* place() { return &function_; }
  const char* name() const { return name_.call; }

 private:
  const CallWatch::Name name_;
  Pointer function_ = nullptr;
};

}  // namespace hororing
