// Handshake: authenticates both ends of a new connection. Both sides prove by HMAC-SHA256, over the
// nonces of both, that they hold the job's key, without sending it; a recording cannot be replayed.
// The data that follows is neither encrypted nor signed.
//
//   connecting                                   accepting
//              <- "HRT1", nonce of 16 bytes
//   nonce, hello, HMAC ->
//              <- HMAC
//
// All messages have a fixed length; anything else is not from this job.
#pragma once

#include <cstdint>
#include <string>

namespace hororing {

// 32 random bytes, as 64 hexadecimal digits.
std::string RandomKey();

// What a connection is for.
struct Hello {
  int32_t rank = 0;  // of the connecting side
  int32_t peer = 0;  // the rank that it wants to reach
  int32_t plane = 0;
};

class Handshake {
 public:
  static Handshake Connecting(const std::string& key, const Hello& hello);
  static Handshake Accepting(const std::string& key, int rank);  // For `rank`.

  enum class State { kUnderWay, kDone, kFailed };
  // Moves bytes, and never blocks. After kDone the connection is at the first byte that follows.
  State Advance(int fd);
  const Hello& hello() const { return hello_; }

 private:
  Handshake(const std::string& key, bool connecting, const Hello& hello);
  bool Take();  // false: the other side is not of this job
  std::string Proof(const char* role) const;

  std::string key_;
  bool connecting_;
  Hello hello_;
  std::string own_, other_;  // nonces
  std::string in_, out_;
  size_t wanted_;  // bytes of the awaited message; 0: none
};

}  // namespace hororing
