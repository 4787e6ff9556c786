// Codec: the bytes of negotiation messages, hand-written (ADR 8): integers are LEB128 (zigzag if
// signed), doubles little-endian, strings length-prefixed. Versions are compared at init.
//
// Decoding never trusts its input: a truncated or malformed message is an error, not a crash.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "negotiation/messages.h"
#include "trace/trace.h"

namespace hororing {

// The first byte of every control message.
enum class MessageKind : uint8_t {
  kReport = 1,
  kAgreement = 2,
  kTrace = 3,
  kCombined = 4,
  kStatus = 5,  // followed by a rank's status text; empty: a query
};

// Not a message: equal for equal requests.
std::string Encode(const Request& request);
std::string Encode(const Report& report);
std::string Encode(const Agreement& agreement);
// Encodes reports that are already encoded, with the ranks that make each of them.
std::string EncodeCombined(const std::map<std::string, std::vector<int>>& reports);
inline std::string EncodeStatus(const std::string& text) {
  return static_cast<char>(MessageKind::kStatus) + text;
}
// `last`: the sender will send no more.
std::string EncodeTrace(const std::vector<TraceEvent>& events, bool last);

// False if `message` is not a well-formed message of the requested kind.
bool KindOf(const std::string& message, MessageKind* kind);
bool Decode(const std::string& message, Report* report);
bool Decode(const std::string& message, Agreement* agreement);
bool DecodeCombined(const std::string& message,
                    std::vector<std::pair<std::vector<int>, Report>>* reports);
bool DecodeTrace(const std::string& message, std::vector<TraceEvent>* events, bool* last);

}  // namespace hororing
