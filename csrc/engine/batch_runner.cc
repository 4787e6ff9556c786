#include "engine/batch_runner.h"

#include <algorithm>
#include <utility>

#include "schedule/fusion_planner.h"

namespace hororing {
namespace {

// One tensor of one request, on its way into a batch.
struct Item {
  TensorEntry* entry;
  size_t index;
  std::vector<size_t> receive_bytes;  // allgather
};

size_t RowBytes(const TensorView& view) {
  size_t bytes = ElementSize(view.dtype);
  for (size_t i = 1; i < view.shape.size(); ++i) bytes *= static_cast<size_t>(view.shape[i]);
  return bytes;
}

FusionItem Describe(const Item& item) {
  const Request& request = item.entry->request;
  const TensorView& view = item.entry->views[item.index];
  FusionItem described;
  described.key.kind = request.kind;
  described.key.root = request.root;
  // Every rank must come to the same number, so for an allgather it is the result's size.
  if (request.kind == Collective::kAllgather) {
    for (size_t bytes : item.receive_bytes) described.bytes += static_cast<int64_t>(bytes);
  } else {
    described.bytes = static_cast<int64_t>(view.bytes());
  }
  // The type is part of every key: a batch counts its bytes by one element size.
  described.key.reduce.dtype = view.dtype;
  if (request.kind == Collective::kAllreduce) {
    described.key.reduce = ReduceSpec{view.dtype, request.op, request.prescale, request.postscale};
  }
  return described;
}

std::string NamesOf(const Batch& batch) {
  constexpr size_t kShown = 8;
  std::string names;
  for (size_t i = 0; i < std::min(batch.entries.size(), kShown); ++i) {
    names += (i > 0 ? ", " : "") + batch.entries[i].name;
  }
  if (batch.entries.size() > kShown) {
    names += " and " + std::to_string(batch.entries.size() - kShown) + " more";
  }
  return names;
}

}  // namespace

std::string TensorName(const Request& request, size_t index) {
  if (request.tensors.size() <= 1) return request.name;
  return request.name + "_" + std::to_string(index + 1) + "of" +
         std::to_string(request.tensors.size());
}

BatchRunner::BatchRunner(const Options& options, std::vector<std::unique_ptr<Backend>> backends,
                         TensorTable& tensors, HandleTable& handles, TraceSink& trace, Stats& stats)
    : options_(options),
      backends_(std::move(backends)),
      tensors_(tensors),
      handles_(handles),
      trace_(trace),
      stats_(stats) {}

Status BatchRunner::Run(std::vector<Work> work) {
  const TimeNs plan_begin = NowNs();
  std::vector<Item> items;
  for (Work& each : work) {
    TensorEntry* entry = each.entry;
    entry->unfinished = entry->views.size();
    if (entry->unfinished == 0) {  // a barrier: that all ranks have agreed is all there is to it
      Complete(entry);
      continue;
    }
    entry->stage = "PLAN";
    HORORING_RETURN_IF_ERROR(Allocate(each));
    for (size_t i = 0; i < entry->views.size(); ++i) {
      Item item{entry, i, {}};
      if (entry->request.kind == Collective::kAllgather) {
        const size_t size = static_cast<size_t>(options_.size);
        for (size_t rank = 0; rank < size; ++rank) {
          item.receive_bytes.push_back(static_cast<size_t>(each.rows[i * size + rank]) *
                                        RowBytes(entry->views[i]));
        }
      }
      items.push_back(std::move(item));
    }
  }
  std::vector<FusionItem> described;
  for (const Item& item : items) described.push_back(Describe(item));
  const std::vector<std::vector<size_t>> plan = PlanFusion(described, options_.fusion_bytes);
  if (trace_.enabled()) {
    trace_.Span(Stage::kPlan, Track::kLoop, std::to_string(items.size()) + " tensors", plan_begin,
                NowNs());
  }

  for (const std::vector<size_t>& indices : plan) {
    Batch batch;
    batch.kind = described[indices[0]].key.kind;
    batch.reduce = described[indices[0]].key.reduce;
    batch.root = described[indices[0]].key.root;
    std::vector<TensorEntry*> entries;
    for (size_t i : indices) {
      Item& item = items[i];
      const TensorView& view = item.entry->views[item.index];
      BatchEntry entry;
      entry.name = TensorName(item.entry->request, item.index);
      entry.input = view.input;
      entry.output = batch.kind == Collective::kAllgather ? item.entry->results[item.index].data()
                                                          : view.output;
      entry.elements = static_cast<size_t>(view.elements());
      entry.receive_bytes = std::move(item.receive_bytes);
      batch.reduce.dtype = view.dtype;
      batch.entries.push_back(std::move(entry));
      entries.push_back(item.entry);
    }
    HORORING_RETURN_IF_ERROR(RunBatch(batch, entries));
  }
  return Status::Ok();
}

// The memory of gathered results; its size is known only now.
Status BatchRunner::Allocate(Work& work) {
  TensorEntry* entry = work.entry;
  if (entry->request.kind != Collective::kAllgather) return Status::Ok();
  const size_t size = static_cast<size_t>(options_.size);
  entry->results.resize(entry->views.size());
  for (size_t i = 0; i < entry->views.size(); ++i) {
    int64_t rows = 0;
    for (size_t rank = 0; rank < size; ++rank) rows += work.rows[i * size + rank];
    const size_t bytes = static_cast<size_t>(rows) * RowBytes(entry->views[i]);
    if (!entry->results[i].Allocate(bytes, rows)) {
      return Status(Code::kInternal, "no memory for the result of '" + entry->request.name + "', " +
                                         std::to_string(bytes) + " bytes; gather less at a time");
    }
  }
  return Status::Ok();
}

Status BatchRunner::RunBatch(const Batch& batch, const std::vector<TensorEntry*>& entries) {
  for (TensorEntry* entry : entries) entry->stage = "REDUCE";
  const TimeNs begin = NowNs();
  const auto backend = std::find_if(backends_.begin(), backends_.end(),
                                    [&](const auto& each) { return each->Supports(batch); });
  const Status status = (*backend)->Run(batch, After(begin, options_.timeout_ns), trace_);
  const TimeNs end = NowNs();
  if (trace_.enabled()) {
    trace_.Add({UpperName(batch.kind), NamesOf(batch), Track::kLoop, false, begin, end,
                static_cast<int64_t>(batch.bytes())});
  }
  ++stats_.batches;
  stats_.tensors += static_cast<int64_t>(batch.entries.size());
  stats_.bytes += static_cast<int64_t>(batch.bytes());
  size_t scratch = 0;
  for (const auto& each : backends_) scratch += each->scratch_bytes();
  stats_.scratch_bytes = static_cast<int64_t>(scratch);

  if (!status.ok()) return status;
  for (TensorEntry* entry : entries) {
    if (--entry->unfinished == 0) Complete(entry);
  }
  if (trace_.enabled()) {
    trace_.Span(Stage::kComplete, Track::kLoop, NamesOf(batch), end, NowNs());
  }
  return Status::Ok();
}

void BatchRunner::Complete(TensorEntry* entry) {
  const std::unique_ptr<TensorEntry> owned = tensors_.Remove(entry->request.name);
  ++stats_.completed;
  handles_.Complete(owned->handle, Status::Ok(), std::move(owned->results));
}

}  // namespace hororing
