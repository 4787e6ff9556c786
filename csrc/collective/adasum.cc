// Adasum: allreduce by adaptive summation. Two vectors a and b are combined as
//
//   a (1 - a.b / 2 a.a)  +  b (1 - a.b / 2 b.b)
//
// which is their sum if they are orthogonal, their average if they are equal, and the other one if
// one is zero. N vectors are combined in a tree of pairs, so N is a power of two:
//
//   N = 4        ranks 0 1 2 3        ((0 1) (2 3))
//
// Vector halving, distance doubling. The vector is cut into N positions; at first rank r holds all
// of them. At level k = 0 .. log2(N)-1 a rank and its partner r XOR 2^k, which holds the same
// positions, swap halves: the one with bit k clear keeps the lower half. Both then have, for their
// half, a (from the 2^k ranks with bit k clear) and b (from those with bit k set):
//
//              rank 0        rank 1        rank 2        rank 3        positions
//   begin      0 1 2 3       0 1 2 3       0 1 2 3       0 1 2 3
//   level 0    0 1           2 3           0 1           2 3           of 01, 01, 23, 23 combined
//   level 1    0             2             1             3             of 0123 combined
//
// The 2^(k+1) ranks with equal r >> (k+1) together hold both vectors. Each computes a.a, a.b and
// b.b over its positions, and recursive doubling within the group adds them up: log2 of the group's
// size messages of 3 numbers per tensor. A sum of two operands does not depend on their order, so
// all ranks of a group combine with the same coefficients. In the end rank r holds one finished
// position (the bits of r reversed). The way back doubles what a rank holds and halves the
// distance, until all ranks have all positions.
//
// Several tensors are combined at once, each with its own coefficients, and cut by itself, so its
// bits do not depend on the others. 16-bit floats are widened to float32 before the first level and
// rounded once, after the last. Coefficients and combinations are computed in float64; squares
// beyond 1e154 overflow, below 1e-154 they vanish.
//
// Cost per rank, L = log2 N, T tensors: 2L messages and L (L+1) / 2 small ones, one after the
// other; (N-1)/N * S bytes of working data there, (N-1)/N * S back, 12 T L (L+1) for the sums. All
// of the (N-1)/N * S bytes that are kept are read twice and written once.
//
// Source: S. Maleki, M. Musuvathi, T. Mytkowicz, O. Saarikivi, T. Xu, V. Eksarevskiy, J. Ekanayake,
// E. Barsoum, "Scaling distributed training with adaptive summation", 2020, arXiv:2006.02924.

#include <algorithm>
#include <string>
#include <vector>

#include "collective/allreduce.h"
#include "collective/segments.h"

namespace hororing {
namespace {

struct Dots {
  double aa = 0, ab = 0, bb = 0;
};

// Sums in a fixed order: lane i mod 4, then the lanes.
template <typename T>
Dots DotsOf(const T* a, const T* b, size_t n) {
  constexpr size_t kLanes = 4;
  double aa[kLanes] = {}, ab[kLanes] = {}, bb[kLanes] = {};
  const auto add = [&](size_t lane, size_t i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    aa[lane] += x * x;
    ab[lane] += x * y;
    bb[lane] += y * y;
  };
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) add(lane, i + lane);
  }
  for (; i < n; ++i) add(i % kLanes, i);
  return {(aa[0] + aa[1]) + (aa[2] + aa[3]), (ab[0] + ab[1]) + (ab[2] + ab[3]),
          (bb[0] + bb[1]) + (bb[2] + bb[3])};
}

// A zero vector keeps its weight: ab is zero too, and the other vector passes unchanged.
double Coefficient(double ab, double square) { return square == 0 ? 1 : 1 - ab / (2 * square); }

template <typename T>
void CombineWith(const Dots& dots, T* result, const T* a, const T* b, size_t n) {
  const double of_a = Coefficient(dots.ab, dots.aa), of_b = Coefficient(dots.ab, dots.bb);
  for (size_t i = 0; i < n; ++i) {
    result[i] = static_cast<T>(of_a * static_cast<double>(a[i]) + of_b * static_cast<double>(b[i]));
  }
}

template <typename T>
class Adasum {
 public:
  // `data`: all positions; `other`: room for half of them.
  Adasum(Transport& transport, const std::vector<size_t>& tensors, T* data, T* other,
         TimeNs deadline)
      : transport_(transport),
        tensors_(tensors),
        data_(data),
        other_(other),
        deadline_(deadline),
        dots_(tensors.size()),
        others_dots_(tensors.size()) {
    size_t begin = 0;
    for (int position = 0; position < size_; ++position) {
      begins_.push_back(begin);
      for (const size_t elements : tensors_) begin += Chunk(elements, size_, position).size;
    }
    begins_.push_back(begin);
  }

  // Leaves one position, own(), in data, complete but for the postscale.
  Status Combine() {
    for (int distance = 1; distance < size_; distance *= 2) {
      HORORING_RETURN_IF_ERROR(Level(distance));
    }
    return Status::Ok();
  }
  Span own() const { return Of(first_, 1); }

  // The way back: `result` has own() in place; elements have `element` bytes.
  Status Gather(std::byte* result, size_t element) {
    for (int distance = size_ / 2; distance > 0; distance /= 2) {
      const int theirs = (rank_ & distance) == 0 ? first_ + held_ : first_ - held_;
      const Span out = Of(first_, held_), in = Of(theirs, held_);
      HORORING_RETURN_IF_ERROR(Swap(distance, result + out.begin * element, out.size * element,
                                    result + in.begin * element, in.size * element));
      first_ = std::min(first_, theirs);
      held_ *= 2;
    }
    return Status::Ok();
  }

 private:
  // The span of `count` positions, in elements.
  Span Of(int position, int count) const {
    const size_t begin = begins_[static_cast<size_t>(position)];
    return {begin, begins_[static_cast<size_t>(position + count)] - begin};
  }

  Status Swap(int distance, const void* data, size_t bytes, void* buffer, size_t buffer_bytes) {
    const int partner = rank_ ^ distance;
    return SendReceive(transport_, partner, data, bytes, partner, buffer, buffer_bytes, deadline_);
  }

  Status Level(int distance) {
    const bool lower = (rank_ & distance) == 0;
    held_ /= 2;
    const int kept = lower ? first_ : first_ + held_;
    const Span out = Of(lower ? first_ + held_ : first_, held_), in = Of(kept, held_);
    HORORING_RETURN_IF_ERROR(
        Swap(distance, data_ + out.begin, out.size * sizeof(T), other_, in.size * sizeof(T)));
    first_ = kept;

    T* const mine = data_ + in.begin;
    const T* const a = lower ? mine : other_;
    const T* const b = lower ? other_ : mine;
    std::fill(dots_.begin(), dots_.end(), Dots());
    ForEachPiece([&](size_t tensor, size_t at, size_t n) {
      Add(&dots_[tensor], DotsOf(a + at, b + at, n));
    });
    HORORING_RETURN_IF_ERROR(SumDots(distance));
    ForEachPiece([&](size_t tensor, size_t at, size_t n) {
      CombineWith(dots_[tensor], mine + at, a + at, b + at, n);
    });
    return Status::Ok();
  }

  // Adds up dots_ among the 2 * distance ranks that hold the vectors together.
  Status SumDots(int distance) {
    const size_t bytes = dots_.size() * sizeof(Dots);
    for (int step = 1; step <= distance; step *= 2) {
      HORORING_RETURN_IF_ERROR(Swap(step, dots_.data(), bytes, others_dots_.data(), bytes));
      for (size_t t = 0; t < dots_.size(); ++t) Add(&dots_[t], others_dots_[t]);
    }
    return Status::Ok();
  }

  static void Add(Dots* sum, const Dots& more) {
    sum->aa += more.aa;
    sum->ab += more.ab;
    sum->bb += more.bb;
  }

  // Calls visit(tensor, at, n) for the chunks held here; `at` counts from the first of them.
  template <typename Visit>
  void ForEachPiece(Visit visit) const {
    size_t at = 0;
    for (int position = first_; position < first_ + held_; ++position) {
      for (size_t t = 0; t < tensors_.size(); ++t) {
        const size_t n = Chunk(tensors_[t], size_, position).size;
        visit(t, at, n);
        at += n;
      }
    }
  }

  Transport& transport_;
  const std::vector<size_t>& tensors_;
  T* const data_;
  T* const other_;
  const int size_ = transport_.size(), rank_ = transport_.rank();
  const TimeNs deadline_;
  std::vector<size_t> begins_;            // of the positions, in elements, and their end
  int first_ = 0, held_ = size_;          // the positions that this rank holds
  std::vector<Dots> dots_, others_dots_;  // per tensor
};

template <typename T>
Status Run(Transport& transport, const ReduceSpec& spec, void* data, size_t n,
           const std::vector<size_t>& tensors, Scratch& scratch, TimeNs deadline) {
  const bool wide = sizeof(T) != ElementSize(spec.dtype);
  size_t half = 0;  // elements of the lower half of the positions, which is not the smaller one
  for (int position = 0; position < transport.size() / 2; ++position) {
    for (const size_t elements : tensors) half += Chunk(elements, transport.size(), position).size;
  }
  const size_t room = RoundUp(half * sizeof(T), kCacheLine);
  const size_t scratch_bytes = room + (wide ? n * sizeof(T) : 0);
  std::byte* memory = nullptr;
  HORORING_RETURN_IF_ERROR(
      scratch.Reserve(scratch_bytes, "Adasum: no memory for working data", &memory));
  T* const work = wide ? reinterpret_cast<T*>(memory + room) : static_cast<T*>(data);
  StartPartial(spec, work, data, n);
  Adasum<T> adasum(transport, tensors, work, reinterpret_cast<T*>(memory), deadline);
  HORORING_RETURN_IF_ERROR(adasum.Combine());

  std::byte* const result = static_cast<std::byte*>(data);
  const size_t element = ElementSize(spec.dtype);
  const Span own = adasum.own();
  FinishPartial(spec, 1, result + own.begin * element, work + own.begin, own.size);
  return adasum.Gather(result, element);
}

}  // namespace

Status CheckAdasum(const ReduceSpec& spec, int size) {
  if (!IsFloating(spec.dtype)) {
    return Status(Code::kInvalidArgument,
                  std::string("Adasum of ") + Name(spec.dtype) +
                      ": it is defined for float16, bfloat16, float32 and float64; convert the "
                      "tensor, or use Average or Sum");
  }
  HORORING_RETURN_IF_ERROR(Check(spec));
  if ((size & (size - 1)) != 0) {
    return Status(Code::kInvalidArgument, "Adasum among " + std::to_string(size) +
                                              " ranks: it combines pairs of pairs, so the number "
                                              "of ranks must be a power of two; use Average or "
                                              "Sum, or start another number of processes");
  }
  return Status::Ok();
}

Status AdasumAllreduce(Transport& transport, const ReduceSpec& spec, void* data,
                       const std::vector<size_t>& tensors, Scratch& scratch, TimeNs deadline) {
  HORORING_RETURN_IF_ERROR(CheckAdasum(spec, transport.size()));
  size_t elements = 0;
  for (const size_t each : tensors) elements += each;
  if (transport.size() == 1 || elements == 0) {
    ReduceMany(spec, 1, data, &data, 1, elements);
    return Status::Ok();
  }
  return spec.dtype == DataType::kFloat64
             ? Run<double>(transport, spec, data, elements, tensors, scratch, deadline)
             : Run<float>(transport, spec, data, elements, tensors, scratch, deadline);
}

}  // namespace hororing
