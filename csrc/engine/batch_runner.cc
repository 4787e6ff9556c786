#include "engine/batch_runner.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "base/recorder.h"
#include "base/text.h"
#include "collective/segments.h"
#include "engine/finite_watch.h"

namespace hororing {
namespace {

size_t RowBytes(const TensorView& view) {
  size_t bytes = ElementSize(view.dtype);
  for (size_t i = 1; i < view.shape.size(); ++i) bytes *= static_cast<size_t>(view.shape[i]);
  return bytes;
}

// The bytes of `count` row counts from `first` on.
std::vector<size_t> InBytes(const std::vector<int64_t>& rows, size_t first, size_t count,
                            size_t row_bytes) {
  std::vector<size_t> bytes;
  for (size_t i = first; i < first + count; ++i) {
    bytes.push_back(static_cast<size_t>(rows[i]) * row_bytes);
  }
  return bytes;
}

// Fills in the bytes of a tensor that each rank sends or receives, according to the agreement.
void SetSizes(const TensorEntry& of, size_t index, const std::vector<int64_t>& rows,
              const Communicator& communicator, BatchEntry* entry) {
  const TensorView& view = of.views[index];
  const size_t size = communicator.ranks.size();
  switch (of.request.kind) {
    case Collective::kAllgather:
      entry->receive_bytes = InBytes(rows, index * size, size, RowBytes(view));
      break;
    case Collective::kAlltoall:
      entry->send_bytes = InBytes(of.request.splits, 0, size, RowBytes(view));
      entry->receive_bytes = InBytes(rows, 1, size, RowBytes(view));
      break;
    case Collective::kReducescatter:
      for (int rank = 0; rank < communicator.size(); ++rank) {
        const size_t row_elements = RowBytes(view) / ElementSize(view.dtype);
        const size_t part =
            Chunk(static_cast<size_t>(view.shape[0]), communicator.size(), rank).size;
        entry->parts.push_back(part * row_elements);
      }
      break;
    default: break;
  }
}

// Every rank must compute the same description.
FusionItem Describe(const TensorEntry& entry, size_t index, const std::vector<int64_t>& rows,
                    size_t ranks) {
  const Request& request = entry.request;
  const TensorView& view = entry.views[index];
  FusionItem described;
  described.key.process_set = request.process_set;
  described.key.kind = request.kind;
  described.key.root = request.root;
  described.key.on_device = request.on_device();
  if (request.kind == Collective::kAllgather) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      described.bytes += rows[index * ranks + rank] * static_cast<int64_t>(RowBytes(view));
    }
  } else if (request.kind == Collective::kAlltoall) {
    described.bytes = rows[0] * static_cast<int64_t>(RowBytes(view));
  } else {
    described.bytes = static_cast<int64_t>(view.bytes());
  }
  described.reduce.dtype = view.dtype;
  if (IsReduction(request.kind)) {
    described.reduce = {view.dtype, request.op, request.prescale, request.postscale};
    const bool only = request.kind == Collective::kReducescatter || request.op == ReduceOp::kAdasum;
    if (only) described.key.only = described.reduce;
  }
  return described;
}

// REQUIRES: a weighted average. Combines the two factors, so that prescale can hold the weight.
void SetWeights(const Work& work, int rank, ReduceSpec* reduce) {
  reduce->postscale *= reduce->prescale;
  reduce->prescale = (*work.weights)[static_cast<size_t>(rank)];
  reduce->weights = work.weights;
}

// Of the result's bits, and of their order.
int64_t ChecksumOf(const BatchEntry& entry) {
  const auto* from = static_cast<const std::byte*>(entry.output);
  uint64_t sum = 0, word = 0;
  for (size_t left = entry.bytes(); left > 0; left -= std::min(left, sizeof word)) {
    word = 0;
    std::memcpy(&word, from, std::min(left, sizeof word));
    from += sizeof word;
    sum = (sum ^ word) * 0x9E3779B97F4A7C15;  // the golden ratio
    sum ^= sum >> 29;
  }
  return static_cast<int64_t>(sum);
}

// The last two of a communicator's backends support every batch.
Backend& BackendFor(const Communicator& communicator, const Batch& batch) {
  return **std::find_if(communicator.backends.begin(), communicator.backends.end(),
                        [&](const auto& each) {
                          return each->on_device() == batch.on_device && each->Supports(batch);
                        });
}

std::string NamesOf(const Batch& batch) {
  constexpr size_t kShown = 8;
  return Listed(batch.entries, [](const BatchEntry& entry) { return entry.name; }, kShown);
}

}  // namespace

std::string TensorName(const Request& request, size_t index) {
  if (request.tensors.size() <= 1) return request.name;
  return request.name + "_" + std::to_string(index + 1) + "of" +
         std::to_string(request.tensors.size());
}

BatchRunner::BatchRunner(Shared& shared, Communicator world) : shared_(shared) {
  AddSet(kWorldSet, std::move(world));
}

void BatchRunner::Abort() {
  shared_.devices->AbortTogether([this] {
    for (const auto& [id, communicator] : communicators_) {
      for (const auto& backend : communicator.backends) backend->Abort();
    }
  });
}

void BatchRunner::FreeBackends() {
  for (auto& [id, communicator] : communicators_) communicator.backends.clear();
}

Status BatchRunner::Run(const std::vector<Work>& work) {
  const TimeNs plan_begin = NowNs();
  items_.clear();
  described_.clear();
  std::vector<TensorEntry*> barriers;
  for (const Work& each : work) {
    TensorEntry* entry = each.entry;
    entry->unfinished = entry->views.size();
    if (entry->unfinished == 0) {
      barriers.push_back(entry);
      continue;
    }
    entry->stage = "PLAN";
    const Communicator& communicator = communicators_.at(entry->request.process_set);
    size_t ranks = 0;
    if (IsGathering(entry->request.kind)) {
      HORORING_RETURN_IF_ERROR(Allocate(each));
      ranks = communicator.ranks.size();
    }
    const bool plans_once = entry->request.kind == Collective::kAllreduce && entry->unfinished == 1;
    if (plans_once && !entry->planned_as)
      entry->planned_as = Describe(*entry, 0, *each.rows, ranks);
    for (size_t i = 0; i < entry->unfinished; ++i) {
      items_.push_back({entry, i, each.rows});
      described_.push_back(plans_once ? *entry->planned_as
                                      : Describe(*entry, i, *each.rows, ranks));
      if (each.weights != nullptr) SetWeights(each, communicator.rank, &described_.back().reduce);
    }
  }
  const std::vector<std::vector<size_t>> plan = PlanFusion(described_, shared_.config.fusion_bytes);
  if (shared_.trace.enabled() && !items_.empty()) {
    shared_.trace.Span(Stage::kPlan, Track::kLoop, std::to_string(items_.size()) + " tensors",
                       plan_begin, NowNs());
  }
  for (const std::vector<size_t>& items : plan) {
    const int32_t process_set = described_[items[0]].key.process_set;
    Communicator& communicator = communicators_.at(process_set);
    const int64_t bytes = Fill(items, communicator);
    HORORING_RETURN_IF_ERROR(RunBatch(communicator, bytes));
    // Entries may hold names, events and lists. Entries of a host allreduce hold none of them
    // unless a timeline is written, so they are reused.
    const bool bare = batch_.kind == Collective::kAllreduce && !batch_.on_device;
    if (!bare || shared_.trace.enabled()) batch_.entries.clear();
  }
  // At the end: when a barrier returns, everything that a rank submitted before it is complete.
  for (TensorEntry* barrier : barriers) Complete(barrier);
  return Status::Ok();
}

// Fills the batch with these items; finds what it completes. Returns the bytes of the inputs.
int64_t BatchRunner::Fill(const std::vector<size_t>& items, const Communicator& communicator) {
  const FusionKey& key = described_[items[0]].key;
  batch_.kind = key.kind;
  batch_.on_device = key.on_device;
  batch_.root = 0;
  if (key.kind == Collective::kBroadcast) {
    const auto root = std::find(communicator.ranks.begin(), communicator.ranks.end(), key.root);
    batch_.root = static_cast<int>(root - communicator.ranks.begin());
  }
  batch_.entries.resize(items.size());
  entries_.clear();
  complete_.clear();
  persistent_.clear();
  ending_.clear();
  size_t bytes = 0;
  for (size_t i : items) {
    const Item& item = items_[i];
    TensorEntry& of = *item.entry;
    const TensorView& view = of.views[item.index];
    BatchEntry& entry = batch_.entries[entries_.size()];
    if (key.kind != Collective::kAllreduce) {
      SetSizes(of, item.index, *item.rows, communicator, &entry);
    }
    if (shared_.trace.enabled() || batch_.on_device)
      entry.name = TensorName(of.request, item.index);
    entry.input = view.input;
    entry.output = IsGathering(key.kind) ? of.results[item.index].data() : view.output;
    entry.elements = static_cast<size_t>(view.elements());
    entry.reduce = described_[i].reduce;
    if (batch_.on_device && !of.ready.empty()) entry.ready = of.ready[item.index];
    bytes += entry.bytes();
    entries_.push_back(&of);
    of.stage = "REDUCE";
    if (--of.unfinished > 0) continue;
    const bool persists =
        of.cache_id != 0 && of.results.empty() && !of.request.on_device() && !of.neutral();
    if (persists) {
      complete_.push_back(of.handle);
      persistent_.push_back(&of);
    } else {
      ending_.push_back(&of);
    }
  }
  return static_cast<int64_t>(bytes);
}

// Allocates gathered results, of known size only now. An alltoall's is followed by rows per rank.
Status BatchRunner::Allocate(const Work& work) {
  TensorEntry* entry = work.entry;
  const Request& request = entry->request;
  const std::vector<int64_t>& agreed = *work.rows;
  const Communicator& communicator = communicators_.at(request.process_set);
  const size_t size = communicator.ranks.size();
  entry->results.resize(entry->views.size());
  for (size_t i = 0; i < entry->views.size(); ++i) {
    std::vector<int64_t> received;
    for (size_t rank = 0; rank < size; ++rank) {
      received.push_back(request.kind == Collective::kAllgather ? agreed[i * size + rank]
                                                                : agreed[1 + rank]);
    }
    const int64_t rows = std::accumulate(received.begin(), received.end(), int64_t{0});
    const size_t bytes = static_cast<size_t>(rows) * RowBytes(entry->views[i]);
    bool allocated = true;
    if (request.on_device()) {
      std::shared_ptr<Device> device;
      HORORING_RETURN_IF_ERROR(shared_.devices->Any(&device));
      HORORING_RETURN_IF_ERROR(entry->results[i].AllocateOn(*device, bytes, rows));
    } else {
      allocated = entry->results[i].Allocate(bytes, rows);
    }
    if (request.kind == Collective::kAlltoall) {
      entry->results.emplace_back();
      allocated = allocated && entry->results.back().CopyNumbers(received);
    }
    if (!allocated) {
      return Status(Code::kInternal, "no memory for the result of '" + request.name + "', " +
                                         std::to_string(bytes) + " bytes; gather less at a time");
    }
  }
  return Status::Ok();
}

Status BatchRunner::RunBatch(Communicator& communicator, int64_t bytes) {
  const Batch& batch = batch_;
  const TimeNs begin = NowNs();
  Backend& backend = BackendFor(communicator, batch);
  Set(Total::kBatchBeganAt, begin);
  const TimeNs deadline = After(begin, shared_.config.timeout_ns);
  Findings findings;
  const bool looks = finite_watch.on && batch.kind == Collective::kAllreduce && !batch.on_device;
  const bool looks_here = looks && !backend.LooksAt(batch);
  batch_.findings = looks ? &findings : nullptr;
  for (size_t i = 0; looks_here && i < batch.entries.size(); ++i) {
    const BatchEntry& entry = batch.entries[i];  // whose input may be overwritten
    const NonFinite found = CountNonFinite(entry.reduce.dtype, entry.input, entry.elements);
    if (found) findings.inputs.push_back({entry.output, communicator.rank, found});
  }
  Status status = backend.Run(batch, deadline, shared_.trace);
  if (status.ok() && (looks_here || findings.any)) NoteNonFinite(communicator, findings);
  const bool alike = batch.kind == Collective::kAllreduce && !batch.on_device;
  if (shared_.config.verify > 0 && status.ok() && alike && communicator.size() > 1 &&
      ++communicator.allreduces % shared_.config.verify == 0) {
    status = Verify(communicator, deadline);
  }
  const TimeNs end = NowNs();
  Set(Total::kBatchBeganAt, 0);
  Add(Total::kBatches, 1);
  Add(Total::kTensors, static_cast<int64_t>(batch.entries.size()));
  Add(Total::kBatchNs, end - begin);
  Add(BytesBy(backend.algorithm_used()), bytes);
  if (shared_.trace.enabled()) {
    shared_.trace.Add(
        {UpperName(batch.kind), NamesOf(batch), Track::kLoop, false, begin, end, bytes});
  }
  ++shared_.stats.batches;
  shared_.stats.tensors += static_cast<int64_t>(batch.entries.size());
  shared_.stats.bytes += bytes;
  ++shared_.stats.allreduces[static_cast<size_t>(backend.algorithm_used())];
  size_t scratch = 0;
  for (const auto& [id, each] : communicators_) {
    for (const auto& holder : each.backends) scratch += holder->scratch_bytes();
  }
  shared_.stats.scratch_bytes = static_cast<int64_t>(scratch);

  if (!status.ok()) return status;
  if (batch.on_device) {
    for (TensorEntry* entry : entries_) entry->done_event = backend.done();
  }
  Complete();
  if (shared_.trace.enabled()) {
    shared_.trace.Span(Stage::kComplete, Track::kLoop, NamesOf(batch), end, NowNs());
  }
  return Status::Ok();
}

void BatchRunner::NoteNonFinite(const Communicator& communicator, const Findings& findings) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const BatchEntry& entry = batch_.entries[i];
    if (!IsFloatSum(entry.reduce) || AllFinite(entry.reduce.dtype, entry.output, entry.elements))
      continue;
    const Request& request = entries_[i]->request;
    size_t index = 0;
    while (entries_[i]->views[index].output != entry.output) ++index;
    const std::string name = TensorName(request, index);
    finite_watch.Note(request.process_set, name, -1, {static_cast<int64_t>(entry.elements)});
    for (const Findings::Part& part : findings.inputs) {
      const int rank = communicator.ranks[static_cast<size_t>(part.rank)];
      if (part.output != entry.output) continue;
      finite_watch.Note(request.process_set, name, rank, part.elements);
    }
  }
}

Status BatchRunner::Verify(Communicator& communicator, TimeNs deadline) {
  const auto all = [&](ReduceOp op, std::vector<int64_t>* numbers) {
    Batch batch;
    BatchEntry entry;
    entry.input = entry.output = numbers->data();
    entry.elements = numbers->size();
    entry.reduce = {DataType::kInt64, op};
    batch.entries.push_back(entry);
    return BackendFor(communicator, batch).Run(batch, deadline, shared_.trace);
  };
  std::vector<int64_t> own, range;
  for (const BatchEntry& entry : batch_.entries) own.push_back(ChecksumOf(entry));
  for (const int64_t sum : own) range.insert(range.end(), {sum, ~sum});  // the minimum, ~maximum
  HORORING_RETURN_IF_ERROR(all(ReduceOp::kMin, &range));
  size_t at = 0;
  while (at < own.size() && range[2 * at] == ~range[2 * at + 1]) ++at;
  if (at == own.size()) return Status::Ok();
  std::vector<int64_t> sums(communicator.ranks.size());
  sums[static_cast<size_t>(communicator.rank)] = own[at];
  HORORING_RETURN_IF_ERROR(all(ReduceOp::kSum, &sums));
  std::string text = "verification of allreduce '" + entries_[at]->request.name +
                     "': ranks have received different sums, by their checksums:";
  int odd = -1;
  for (size_t rank = 0; rank < sums.size(); ++rank) {
    const auto alike = std::count(sums.begin(), sums.end(), sums[rank]);
    if (2 * static_cast<size_t>(alike) > sums.size()) continue;
    text += (odd < 0 ? " rank " : ", ") + std::to_string(communicator.ranks[rank]);
    if (odd < 0) odd = communicator.ranks[rank];
  }
  return Status(Code::kTransport,
                text +
                    " unlike most. A memory error, of that host or on the way? Or the script "
                    "changes a tensor that is being reduced",
                odd);
}

// Completes the entries of a batch. The caller may start a persistent one at once: do not read it.
void BatchRunner::Complete() {
  const TimeNs now = NowNs();
  for (const TensorEntry* entry : persistent_) {
    Record(Event::kDone, now, entry->request.kind, entry->request.process_set, entry->request.name);
  }
  for (TensorEntry* entry : ending_) Complete(entry);
  shared_.stats.completed += static_cast<int64_t>(complete_.size());
  shared_.tensors.Deactivate(persistent_);
  shared_.handles->Complete(complete_);
}

void BatchRunner::Complete(TensorEntry* entry) {
  if (entry->neutral()) return;
  const std::unique_ptr<TensorEntry> owned = shared_.tensors.Remove(Key(entry->request));
  ++shared_.stats.completed;
  Record(Event::kDone, NowNs(), owned->request.kind, owned->request.process_set,
         owned->request.name);
  shared_.handles->Complete(owned->handle, Status::Ok(), std::move(owned->results),
                            std::move(owned->done_event));
}

Status BatchRunner::RemoveSet(int32_t id) {
  const auto communicator = communicators_.find(id);
  if (communicator == communicators_.end()) return Status::Ok();
  // Half of the limit: ranks that are not members may be waiting for this one in the next batch.
  const TimeNs deadline = After(NowNs(), shared_.config.timeout_ns / 2);
  Status left;
  for (const auto& backend : communicator->second.backends) {
    const Status status = backend->Leave(deadline);
    if (left.ok()) left = status;
  }
  communicators_.erase(communicator);  // aborts whatever is still pending
  if (left.ok()) return left;
  return Status(left.code(),
                "could not shut down process set " + std::to_string(id) +
                    " cleanly; its pending GPU operations were aborted. Other process sets are "
                    "unaffected: " +
                    left.message(),
                left.rank());
}

Status BatchRunner::CheckDevices() {
  for (const auto& [id, communicator] : communicators_) {
    for (const auto& backend : communicator.backends) HORORING_RETURN_IF_ERROR(backend->Poll());
  }
  return Status::Ok();
}

void BatchRunner::Leave(TimeNs deadline) {
  for (const auto& [id, communicator] : communicators_) {
    for (const auto& backend : communicator.backends) {
      const Status left = backend->Leave(deadline);
      if (!left.ok()) Log(LogLevel::kWarning, left.message());
    }
  }
}

}  // namespace hororing
