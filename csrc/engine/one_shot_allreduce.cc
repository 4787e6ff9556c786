// Engine: small allreduces through shared memory, without the coordinator (ADR 33).
//
// A report and an agreement ensure that all ranks make the same request at the same time. So does
// the exchange: a rank's signature contains its whole request. If signatures differ, all ranks see
// that and submit the request as usual, and the coordinator reports the error.
#include <array>
#include <mutex>

#include "base/arithmetic.h"
#include "base/recorder.h"
#include "engine/engine.h"
#include "engine/finite_watch.h"
#include "kernels/reduce.h"
#include "negotiation/codec.h"

namespace hororing {
// Every rank reads all payloads. Above this size, reducing in slices is faster.
constexpr size_t kMaxRead = 64 << 10;

bool Engine::AllreduceOneShot(const TensorEntry& entry, int64_t* handle) {
  const Request& request = entry.request;
  if (exchange_ == nullptr || request.kind != Collective::kAllreduce ||
      request.tensors.size() != 1 || request.on_device() || request.process_set != kWorldSet ||
      request.op == ReduceOp::kAdasum || request.weight || shared_.config.verify > 0) {
    return false;
  }
  const int size = exchange_->size();
  const TensorView& view = entry.views[0];
  const size_t bytes = view.bytes();
  if (bytes == 0 || bytes > OneShotExchange::kMaxPayload ||
      bytes * static_cast<size_t>(size) > kMaxRead)
    return false;
  const ReduceSpec spec{view.dtype, request.op, request.prescale, request.postscale};
  // Only if nothing else is in flight: no request of that name, no join, and no barrier.
  if (shared_.trace.enabled() || exchange_disabled_ || shared_.mailbox.stopping() ||
      state() != State::kRunning ||
      shared_.stats.submitted.load() != shared_.stats.completed.load()) {
    return false;
  }
  const std::unique_lock<std::mutex> alone(exchange_mutex_, std::try_to_lock);
  const std::string signature = Encode(request);  // equal on two ranks if their requests are
  if (!alone.owns_lock() || signature.size() > OneShotExchange::kMaxSignature ||
      !exchange_->Try(signature.data(), signature.size(), view.input, bytes)) {
    return false;
  }
  std::array<const void*, OneShotExchange::kMaxRanks> payloads;
  for (int rank = 0; rank < size; ++rank) {
    payloads[static_cast<size_t>(rank)] = exchange_->payload(rank);
  }
  const StandardArithmetic arithmetic;
  ReduceMany(spec, size, view.output, payloads.data(), size, static_cast<size_t>(view.elements()));
  const size_t n = static_cast<size_t>(view.elements());
  if (finite_watch.on && IsFloatSum(spec) && !AllFinite(view.dtype, view.output, n)) {
    const int rank = topology().rank;
    const NonFinite own = CountNonFinite(view.dtype, exchange_->payload(rank), n);
    finite_watch.Note(kWorldSet, request.name, -1, {view.elements()});
    if (own) finite_watch.Note(kWorldSet, request.name, rank, own);
  }
  ++shared_.stats.submitted;
  ++shared_.stats.completed;
  ++shared_.stats.batches;
  ++shared_.stats.tensors;
  shared_.stats.bytes += static_cast<int64_t>(bytes);
  if (size > 1) ++shared_.stats.allreduces[static_cast<size_t>(AlgorithmUsed::kOneShot)];
  Add(Total::kBatches, 1);
  Add(Total::kTensors, 1);
  Add(BytesBy(AlgorithmUsed::kOneShot), static_cast<int64_t>(bytes));
  Record(Event::kDone, CoarseNowNs(), request.kind, request.process_set, request.name);
  shared_.handles->Create(handle, 1, /*done=*/true);
  return true;
}

}  // namespace hororing
