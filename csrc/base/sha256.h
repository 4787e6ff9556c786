// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for proofs of a few bytes: not made for speed.
#pragma once

#include <string>

namespace hororing {

// 32 bytes each.
std::string Sha256(const std::string& message);
std::string HmacSha256(const std::string& key, const std::string& message);

// Takes the same time wherever the two differ.
bool EqualSecrets(const std::string& one, const std::string& other);

}  // namespace hororing
