// Engine: small allreduces through shared memory, without the coordinator (ADR 0033).
//
// A report and an agreement ensure that all ranks make the same request at the same time. The
// exchange ensures both, because a rank's signature contains its whole request. If the signatures
// differ, every rank sees that and submits the request as usual, and the coordinator reports the
// error.
#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "base/recorder.h"
#include "base/reduce.h"
#include "engine/engine.h"

namespace hororing {
namespace {

// Every rank reads all payloads. Above this size, reducing in slices is faster.
constexpr size_t kMaxRead = 64 << 10;

// A request as bytes, which are equal on two ranks if and only if their requests are.
class Signature {
 public:
  // False if the request has no signature, or one that is too long.
  bool Write(const Request& request) {
    const Request::Tensor& tensor = request.tensors[0];
    const size_t name = request.name.size();
    const size_t shape = tensor.shape.size() * sizeof(int64_t);
    if (name == 0 || sizeof(Fixed) + name + shape > bytes_.size()) return false;
    Fixed fixed;
    fixed.prescale = request.prescale;
    fixed.postscale = request.postscale;
    fixed.dimensions = static_cast<uint32_t>(tensor.shape.size());
    fixed.op = static_cast<uint16_t>(request.op);
    fixed.dtype = static_cast<uint16_t>(tensor.dtype);
    Put(&fixed, sizeof fixed);
    Put(tensor.shape.data(), shape);
    Put(request.name.data(), name);
    return true;
  }
  const void* data() const { return bytes_.data(); }
  size_t size() const { return size_; }

 private:
  struct Fixed {
    double prescale, postscale;
    uint32_t dimensions;
    uint16_t op, dtype;
  };
  static_assert(sizeof(Fixed) == 24, "no padding, whose bytes would differ");

  void Put(const void* data, size_t bytes) {
    if (bytes > 0) std::memcpy(bytes_.data() + size_, data, bytes);
    size_ += bytes;
  }

  std::array<char, OneShotExchange::kMaxSignature> bytes_;
  size_t size_ = 0;
};

// The number of elements of the tensor; 0: none, or more than a payload holds.
size_t FewElements(const TensorView& view) {
  size_t elements = 1;
  for (const int64_t dimension : view.shape) {
    if (dimension <= 0 || dimension > static_cast<int64_t>(OneShotExchange::kMaxPayload)) return 0;
    elements *= static_cast<size_t>(dimension);
    if (elements > OneShotExchange::kMaxPayload) return 0;
  }
  return elements;
}

}  // namespace

bool Engine::AllreduceOneShot(const TensorEntry& entry, int64_t* handle) {
  const Request& request = entry.request;
  if (exchange_ == nullptr || request.kind != Collective::kAllreduce ||
      request.tensors.size() != 1 || request.on_device() || request.process_set != kWorldSet ||
      request.op == ReduceOp::kAdasum || request.weight) {
    return false;
  }
  const int size = exchange_->size();
  const TensorView& view = entry.views[0];
  const size_t elements = FewElements(view);
  const size_t bytes = elements * ElementSize(view.dtype);
  if (bytes == 0 || bytes > OneShotExchange::kMaxPayload ||
      bytes * static_cast<size_t>(size) > kMaxRead)
    return false;
  const ReduceSpec spec{view.dtype, request.op, request.prescale, request.postscale};
  Signature signature;
  // Only if nothing else is in flight: no request of that name, no join, and no barrier.
  if (!signature.Write(request) || shared_.trace.enabled() || exchange_disabled_ ||
      shared_.mailbox.stopping() || state() != State::kRunning ||
      shared_.stats.submitted.load() != shared_.stats.completed.load()) {
    return false;
  }
  const std::unique_lock<std::mutex> alone(exchange_mutex_, std::try_to_lock);
  if (!alone.owns_lock() ||
      !exchange_->Try(signature.data(), signature.size(), view.input, bytes)) {
    return false;
  }
  std::array<const void*, OneShotExchange::kMaxRanks> payloads;
  for (int rank = 0; rank < size; ++rank) {
    payloads[static_cast<size_t>(rank)] = exchange_->payload(rank);
  }
  ReduceMany(spec, size, view.output, payloads.data(), size, elements);
  ++shared_.stats.submitted;
  ++shared_.stats.completed;
  ++shared_.stats.batches;
  ++shared_.stats.tensors;
  shared_.stats.bytes += static_cast<int64_t>(bytes);
  if (size > 1) ++shared_.stats.allreduces[static_cast<size_t>(AlgorithmUsed::kOneShot)];
  Record(Event::kDone, CoarseNowNs(), request.kind, request.name);
  shared_.handles->Create(handle, 1, /*done=*/true);
  return true;
}

}  // namespace hororing
