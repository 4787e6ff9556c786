// Library: functions of a shared library that is found at run time (ADR 23).
//
// Opened libraries are never closed: their threads and exit handlers live as long as the process.
#pragma once

#include <string>
#include <vector>

#include "base/call_watch.h"
#include "base/status.h"

namespace hororing {

class Library {
 public:
  // Opens the first of `paths` that can be opened; before, what the process has loaded (by a
  // framework, for example), as two copies conflict. `what`, for errors: "NVIDIA's driver".
  static Status Open(const std::string& what, const std::vector<std::string>& paths,
                     Library* library);

  // False if the library has no such function.
  template <typename Function>
  bool Find(const char* name, Function* function) const {
    *function = reinterpret_cast<Function>(Symbol(name));
    return *function != nullptr;
  }
  // The file from which it was loaded.
  const std::string& path() const { return path_; }

 private:
  void* Symbol(const char* name) const;

  void* handle_ = nullptr;
  std::string path_;
};

// "a:b:c" as a list; empty parts are left out.
std::vector<std::string> SplitPaths(const std::string& paths);

// A function of such a library. Calls by the loop's thread are watched (base/call_watch.h), because
// some of NVIDIA's may never return.
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
