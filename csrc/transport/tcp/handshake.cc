#include "transport/tcp/handshake.h"

#include <sys/random.h>

#include <cstring>

#include "base/sha256.h"
#include "transport/tcp/socket.h"

namespace hororing {
namespace {

const std::string kMagic = "HRT1";
constexpr size_t kNonce = 16, kProof = 32;

std::string Random(size_t bytes) {
  std::string random(bytes, '\0');
  // So few bytes arrive at once, after the kernel has gathered entropy.
  while (getrandom(random.data(), bytes, 0) != static_cast<ssize_t>(bytes)) continue;
  return random;
}

std::string Bytes(const Hello& hello) {
  return std::string(reinterpret_cast<const char*>(&hello), sizeof hello);
}

}  // namespace

std::string RandomKey() {
  std::string key;
  for (const char byte : Random(32)) {
    key += "0123456789abcdef"[byte >> 4 & 15];
    key += "0123456789abcdef"[byte & 15];
  }
  return key;
}

Handshake::Handshake(const std::string& key, bool connecting, const Hello& hello)
    : key_(key), connecting_(connecting), hello_(hello), own_(Random(kNonce)) {
  if (!connecting) out_ = kMagic + own_;
  wanted_ = connecting ? kMagic.size() + kNonce : kNonce + sizeof(Hello) + kProof;
}

Handshake Handshake::Connecting(const std::string& key, const Hello& hello) {
  return Handshake(key, true, hello);
}

Handshake Handshake::Accepting(const std::string& key, int rank) {
  Hello expected;
  expected.peer = rank;
  return Handshake(key, false, expected);
}

std::string Handshake::Proof(const char* role) const {
  const std::string& accepting = connecting_ ? other_ : own_;
  const std::string& connecting = connecting_ ? own_ : other_;
  return HmacSha256(key_, role + accepting + connecting + Bytes(hello_));
}

bool Handshake::Take() {
  if (!connecting_) {
    other_ = in_.substr(0, kNonce);
    Hello given;
    std::memcpy(&given, in_.data() + kNonce, sizeof given);
    const bool for_us = given.peer == hello_.peer;
    hello_ = given;
    if (!for_us || !EqualSecrets(in_.substr(kNonce + sizeof given), Proof("connecting"))) {
      return false;
    }
    out_ += Proof("accepting");
    wanted_ = 0;
  } else if (other_.empty()) {
    if (in_.compare(0, kMagic.size(), kMagic) != 0) return false;
    other_ = in_.substr(kMagic.size());
    out_ = own_ + Bytes(hello_) + Proof("connecting");
    wanted_ = kProof;
  } else {
    if (!EqualSecrets(in_, Proof("accepting"))) return false;
    wanted_ = 0;
  }
  in_.clear();
  return true;
}

Handshake::State Handshake::Advance(int fd) {
  for (;;) {
    while (!out_.empty()) {
      const ptrdiff_t sent = SendSome(fd, out_.data(), out_.size());
      if (sent < 0) return State::kFailed;
      if (sent == 0) return State::kUnderWay;
      out_.erase(0, static_cast<size_t>(sent));
    }
    if (wanted_ == 0) return State::kDone;
    char bytes[128];
    const ptrdiff_t got = ReceiveSome(fd, bytes, wanted_ - in_.size());
    if (got < 0) return State::kFailed;
    if (got == 0) return State::kUnderWay;
    in_.append(bytes, static_cast<size_t>(got));
    if (in_.size() == wanted_ && !Take()) return State::kFailed;
  }
}

}  // namespace hororing
