#include "collective/layout.h"

namespace hororing {
void Layout::Add(const ReduceSpec& spec, size_t bytes) {
  if (bytes == 0) return;
  const size_t begin = bytes_;
  bytes_ += bytes;
  partial_bytes_ += bytes / ElementSize(spec.dtype) * PartialSize(spec);
  wide_ = wide_ || NeedsWideAccumulator(spec);
  if (!runs_.empty() && runs_.back().spec == spec) {
    runs_.back().end += bytes;
  } else {
    runs_.push_back({spec, begin, begin + bytes});
  }
}

size_t Layout::widening() const {
  size_t most = 1;
  for (const Run& run : runs_) {
    most = std::max(most, PartialSize(run.spec) / ElementSize(run.spec.dtype));
  }
  return most;
}

size_t Layout::PartialBytes(size_t bytes) const {
  size_t partial = 0;
  for (size_t i = 0; i < runs_.size() && runs_[i].begin < bytes; ++i) {
    const ReduceSpec& spec = runs_[i].spec;
    partial += (std::min(bytes, runs_[i].end) - runs_[i].begin) / ElementSize(spec.dtype) *
               PartialSize(spec);
  }
  return partial;
}

Span Layout::Part(const Span& span, int count, int index) const {
  const Span part = Chunk(span.size / unit(), count, index);
  return {span.begin + part.begin * unit(), part.size * unit()};
}

std::vector<Span> Layout::Parts(int count) const {
  std::vector<Span> parts;
  for (int i = 0; i < count; ++i) parts.push_back(Part({0, bytes()}, count, i));
  return parts;
}

void ReduceAlone(const Layout& layout, std::byte* result, const std::byte* source) {
  layout.ForEachRun({0, layout.bytes()}, [&](const ReduceSpec& spec, size_t at, size_t, size_t n) {
    const void* const from = source + at;
    ReduceMany(spec, 1, result + at, &from, 1, n);
  });
}

void StartPartial(const Layout& layout, const Span& span, std::byte* partial,
                  const std::byte* source) {
  layout.ForEachRun(span, [&](const ReduceSpec& spec, size_t at, size_t partial_at, size_t n) {
    StartPartial(spec, partial + partial_at, source + at, n);
  });
}

void CombinePartials(const Layout& layout, const Span& span, std::byte* accumulator,
                     const std::byte* first, const std::byte* second) {
  layout.ForEachRun(span, [&](const ReduceSpec& spec, size_t, size_t at, size_t n) {
    CombinePartials(spec, accumulator + at, first + at, second + at, n);
  });
}

void FinishPartial(const Layout& layout, const Span& span, int divisor, std::byte* result,
                   const std::byte* partial) {
  layout.ForEachRun(span, [&](const ReduceSpec& spec, size_t at, size_t partial_at, size_t n) {
    FinishPartial(spec, divisor, result + at, partial + partial_at, n);
  });
}

}  // namespace hororing
