// Status: what a fallible operation returns. Exceptions exist only at the Python edge.
//
// `rank` names the peer at fault for kPeerLost (-1: none), so that Python need not parse the text.
#pragma once

#include <string>
#include <utility>

namespace hororing {

// The values are part of the C interface (capi/hororing.h) and of the wire protocol.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,  // this call; nothing was submitted
  kMismatch = 2,         // this tensor, on every rank; the engine continues
  kDuplicateName = 3,    // this call
  kNotInitialized = 4,   // this call
  kShutDown = 5,         // everything pending; some rank has shut down
  kPeerLost = 6,         // everything pending; the engine has failed
  kStalled = 7,          // everything pending; the engine has failed
  kTransport = 8,        // everything pending; the engine has failed
  kInternal = 9,         // everything pending; a bug in hororing
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message, int rank = -1)
      : code_(code), rank_(rank), message_(std::move(message)) {}

  static Status Ok() { return Status(); }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  int rank() const { return rank_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  int rank_ = -1;
  std::string message_;
};

}  // namespace hororing

// Leaves the enclosing function with the first Status that is not ok.
#define HORORING_RETURN_IF_ERROR(expression)   \
  do {                                         \
    ::hororing::Status status_ = (expression); \
    if (!status_.ok()) return status_;         \
  } while (false)
