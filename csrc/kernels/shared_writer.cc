#include "kernels/shared_writer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/types.h"
#include "kernels/copy.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hororing {
namespace {

// The smallest copy that benefits.
constexpr size_t kMin = 512;

// Whole lines; `to` is the beginning of one.
void StreamLines(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__SSE2__)
  for (size_t at = 0; at < bytes; at += kCacheLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + at);
    auto* const target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace

void StreamingCopy(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const size_t odd = reinterpret_cast<uintptr_t>(to) % kCacheLine;
  const size_t head = std::min(bytes, odd == 0 ? 0 : kCacheLine - odd);
  const size_t lines = (bytes - head) / kCacheLine * kCacheLine;
  const size_t done = head + lines;
  if (head > 0) std::memcpy(target, source, head);
  StreamLines(target + head, source + head, lines);
  if (done < bytes) std::memcpy(target + done, source + done, bytes - done);
}

void StoreFence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

double StorePolicy::Costs::Least() const {
  const auto known = static_cast<std::ptrdiff_t>(std::min(count, latest.size()));
  return *std::min_element(latest.begin(), latest.begin() + known);
}

void StorePolicy::Record(size_t bytes, TimeNs took) {
  if (measures_) {
    sampled_bytes_ += bytes;
    sampled_ns_ += took;
  }
  if (bytes < left_) {
    left_ -= bytes;
    return;
  }
  if (measures_) ChooseStores();
  // The first two show the cost of each kind.
  measures_ = !measures_ || samples_ == 1;
  left_ = measures_ ? kSample : kInterval;
  const bool trial = measures_ && samples_ == next_trial_;
  if (trial) next_trial_ += std::min(samples_ + 1, kTrialEvery);
  streaming_ = prefers_streaming_ != trial;
}

void StorePolicy::ChooseStores() {
  Costs& costs = streaming_ ? streamed_ : ordinary_;
  costs.Add(static_cast<double>(sampled_ns_) / static_cast<double>(sampled_bytes_));
  sampled_bytes_ = 0;
  sampled_ns_ = 0;
  ++samples_;
  if (streamed_.count == 0) return;
  const double bound = prefers_streaming_ ? kEnd : kBegin;
  prefers_streaming_ = ordinary_.Least() > bound * streamed_.Least();
}

void SharedWriter::Copy(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  if (bytes < kMin) {
    std::memcpy(target, source, bytes);
    return;
  }
  while (bytes > 0) {
    if (choice_.measures() && begin_ns_ < 0) begin_ns_ = clock_();
    const size_t part = std::min(bytes, StorePolicy::kSample);
    if (choice_.streaming()) {
      StreamingCopy(target, source, part);
      needs_fence_ = true;
    } else {
      CopyBytes(target, source, part);
    }
    copied_ += part;
    if (copied_ >= StorePolicy::kSample) Account();
    target += part;
    source += part;
    bytes -= part;
  }
}

void SharedWriter::Fence() {
  if (needs_fence_) StoreFence();
  needs_fence_ = false;
  if (copied_ > 0) Account();
}

void SharedWriter::Account() {
  const TimeNs took = choice_.measures() ? clock_() - begin_ns_ : 0;
  begin_ns_ = -1;
  choice_.Record(std::exchange(copied_, 0), took);
}

}  // namespace hororing
