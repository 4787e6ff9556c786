#include "engine/applier.h"

#include <algorithm>
#include <string>

#include "base/log.h"
#include "base/recorder.h"
#include "kernels/reduce.h"
#include "transport/subgroup.h"

namespace hororing {
Applier::Applier(Shared& shared, World& world, const BackendOptions& options, BatchRunner& runner,
                 Timeline& timeline, const std::vector<int>& group)
    : shared_(shared),
      world_(world),
      backend_options_(options),
      runner_(runner),
      timeline_(timeline),
      group_(group) {}

Status Applier::Apply(const Agreement& agreement) {
  const TimeNs now = NowNs();
  shared_.trace.CycleStart(now);
  if (agreement.sequence <= applied_) {
    return Status(Code::kInternal, "agreement " + std::to_string(agreement.sequence) +
                                       " came after " + std::to_string(applied_));
  }
  for (const Decision& decision : agreement.decisions) {
    switch (decision.kind) {
      case Decision::Kind::kRun:
        for (uint64_t i = 0; i < decision.count; ++i) {
          HORORING_RETURN_IF_ERROR(Carry(decision, decision.cache_id + i, now));
        }
        break;
      case Decision::Kind::kFail: Fail(decision); break;
      case Decision::Kind::kTimeline:
        HORORING_RETURN_IF_ERROR(Run());
        timeline_.Switch(decision.details().timeline_on, decision.details().timeline_cycles);
        break;
      case Decision::Kind::kLeave:
      case Decision::Kind::kAbort:
        HORORING_RETURN_IF_ERROR(Run());
        rank_left_ = decision.kind == Decision::Kind::kLeave;
        end_agreed_ = true;
        return decision.details().status;
    }
  }
  HORORING_RETURN_IF_ERROR(Run());
  neutral_entries_.clear();
  alltoall_rows_.clear();
  for (uint64_t id : agreement.evicted) shared_.tensors.Forget(id);
  applied_ = agreement.sequence;
  return Status::Ok();
}

// Runs what has been agreed on so far.
Status Applier::Run() {
  if (work_.empty()) return Status::Ok();
  const TimeNs now = NowNs();
  Add(Total::kWaitedNs, std::max<TimeNs>(now - std::max(reported_ns_, ran_ns_), 0));
  const Status status = runner_.Run(work_);
  reported_ns_ = kForever;
  ran_ns_ = NowNs();
  work_.clear();
  return status;
}

// `id`: the cache id of the request, if it is cached.
Status Applier::Carry(const Decision& decision, uint64_t id, TimeNs now) {
  std::optional<Work> agreed;
  HORORING_RETURN_IF_ERROR(Agreed(decision, id, &agreed));
  if (!agreed) return Status::Ok();
  const Request& request = agreed->entry->request;
  if (!agreed->entry->neutral()) {
    Record(Event::kAgreed, now, request.kind, request.process_set, request.name);
  }
  // A barrier changes nothing: ranks outside its process set must compute the same batches.
  if (!agreed->entry->views.empty() || request.kind == Collective::kBarrier) {
    work_.push_back(*agreed);
    reported_ns_ = std::min(reported_ns_, agreed->entry->reported_ns);
    return Status::Ok();
  }
  HORORING_RETURN_IF_ERROR(Run());
  return Settle(*agreed);
}

// Finds this rank's part of a decision. Nothing if it does not take part.
Status Applier::Agreed(const Decision& decision, uint64_t id, std::optional<Work>* agreed) {
  if (!shared_.sets->Contains(decision.process_set, world_.topology.rank)) return Status::Ok();
  Work work;
  const Decision::Details& details = decision.details();
  const bool cached = details.name.empty();
  RequestRecord* const known = cached ? shared_.tensors.FindRecord(id) : nullptr;
  if (known != nullptr) {
    work.entry = std::exchange(known->reported, nullptr);
  } else if (!cached) {
    work.entry = shared_.tensors.Find(Key(decision.process_set, details.name));
  }
  if (work.entry == nullptr && details.neutral) {
    HORORING_RETURN_IF_ERROR(NeutralEntry(*details.neutral, &work.entry));
  } else if (work.entry == nullptr && known != nullptr) {
    HORORING_RETURN_IF_ERROR(NeutralEntry(known->agreed, &work.entry));
  } else if (work.entry == nullptr) {
    return Status(Code::kInternal, "agreement on a request that this rank does not have: '" +
                                       details.name + "', id " + std::to_string(id));
  }
  if (!details.weights.empty()) work.weights = &details.weights;
  work.rows = known != nullptr ? &known->rows : &details.rows;
  if (!cached) {
    if (work.entry->request.kind == Collective::kAlltoall) {
      work.rows = &alltoall_rows_.emplace_back(OwnRows(decision));
      if (work.rows->empty()) {
        return Status(Code::kInternal, "agreement without the rows of '" + details.name + "'");
      }
    }
    ClearReported(work.entry->cache_id);  // a new request replaces this id
    if (id != 0) shared_.tensors.Define(id, work.entry->request, *work.rows);
    work.entry->cache_id = id;
  }
  if (shared_.trace.enabled()) TraceNegotiation(*work.entry);
  *agreed = work;
  return Status::Ok();
}

// The sum of an alltoall's splits, and what this rank receives. The agreement has the rows of all
// members among the ranks that it was sent to. Empty if they are missing.
std::vector<int64_t> Applier::OwnRows(const Decision& decision) const {
  const std::vector<int64_t>& rows = decision.details().rows;
  const ProcessSet* const set = shared_.sets->Find(decision.process_set);
  const auto members = static_cast<std::ptrdiff_t>(set->ranks.size());
  std::ptrdiff_t first = 1;
  for (const int rank : group_) {
    if (rank == world_.topology.rank) break;
    if (set->IndexOf(rank) >= 0) first += members;
  }
  if (static_cast<std::ptrdiff_t>(rows.size()) < first + members) return {};
  std::vector<int64_t> own(rows.begin() + first, rows.begin() + first + members);
  own.insert(own.begin(), rows[0]);
  return own;
}

void Applier::ClearReported(uint64_t id) {
  RequestRecord* const known = shared_.tensors.FindRecord(id);
  if (known != nullptr) known->reported = nullptr;
}

Status Applier::NeutralEntry(const Request& request, TensorEntry** made) {
  auto entry = std::make_unique<TensorEntry>();
  entry->request = request;
  entry->reported_ns = NowNs();
  for (const Request::Tensor& tensor : request.tensors) {
    TensorView view;
    view.dtype = tensor.dtype;
    view.shape = tensor.shape;
    view.device = tensor.on_device ? 0 : TensorView::kHost;  // the number is not used
    ResultBuffer memory;
    if (!memory.Allocate(view.bytes(), 0)) {
      return Status(Code::kInternal, "no memory to take part in " + request.Title() +
                                         " after join, " + std::to_string(view.bytes()) + " bytes");
    }
    view.input = view.output = memory.data();
    FillNeutral({tensor.dtype, request.op, request.prescale, request.postscale}, memory.data(),
                static_cast<size_t>(view.elements()));
    if (tensor.on_device && view.elements() > 0) {
      const Status moved = ToDevice(view.bytes(), &memory);
      if (!moved.ok()) {
        return Status(moved.code(), request.Title() + " after join: " + moved.message());
      }
      view.input = view.output = memory.data();
    }
    entry->views.push_back(std::move(view));
    entry->results.push_back(std::move(memory));
  }
  *made = neutral_entries_.emplace_back(std::move(entry)).get();
  return Status::Ok();
}

Status Applier::ToDevice(size_t bytes, ResultBuffer* memory) {
  std::shared_ptr<Device> device;
  HORORING_RETURN_IF_ERROR(shared_.devices->Any(&device));
  ResultBuffer moved;
  HORORING_RETURN_IF_ERROR(moved.AllocateOn(*device, bytes, 0));
  HORORING_RETURN_IF_ERROR(device->CopyToDevice(moved.data(), memory->data(), bytes));
  *memory = std::move(moved);
  return Status::Ok();
}

// Completes a request without tensors. Usually the agreement is all that it needs.
Status Applier::Settle(const Work& work) {
  const Request& request = work.entry->request;
  if (request.kind == Collective::kAddProcessSet) {
    AddSet(static_cast<int32_t>((*work.rows)[0]), request);
  } else if (request.kind == Collective::kRemoveProcessSet && (*work.rows)[0] != 0) {
    const Status removed = RemoveSet(request.root);
    if (!removed.ok()) {
      FailSettled(*work.entry, removed);
      return Status::Ok();
    }
  }
  if (!work.rows->empty()) {
    work.entry->results.emplace_back();
    if (!work.entry->results.back().CopyNumbers(*work.rows)) {
      return Status(Code::kInternal, "no memory for the result of " + request.Title());
    }
  }
  runner_.Complete(work.entry);
  return Status::Ok();
}

void Applier::AddSet(int32_t id, const Request& request) {
  shared_.sets->Add(id, request.ranks, request.scope() != SetScope::kPublic);
  ++sets_added_;
  const ProcessSet& set = *shared_.sets->Find(id);
  const int rank = set.IndexOf(world_.topology.rank);
  if (rank < 0) return;
  auto transport = std::make_unique<Subgroup>(*world_.transport, set.ranks);
  auto backends = MakeBackends(backend_options_, world_, *transport, {set.ranks, id, sets_added_});
  runner_.AddSet(id, {set.ranks, std::move(transport), std::move(backends), rank});
}

Status Applier::RemoveSet(int32_t id) {
  shared_.sets->Remove(id);
  for (std::unique_ptr<TensorEntry>& entry : shared_.tensors.RemoveSet(id)) {
    FailRemoved(std::move(entry));
  }
  return runner_.RemoveSet(id);
}

// The engine continues.
void Applier::FailSettled(TensorEntry& entry, const Status& why) {
  Log(LogLevel::kError, why.message());
  if (entry.neutral()) return;
  const std::unique_ptr<TensorEntry> owned = shared_.tensors.Remove(Key(entry.request));
  owned->stage = "COMPLETE";
  ++shared_.stats.completed;
  shared_.handles->Complete(owned->handle, WithStage(*owned, why), {});
}

void Applier::Fail(const Decision& decision) {
  const std::string key = Key(decision.process_set, decision.details().name);
  const TensorEntry* failed = shared_.tensors.Find(key);
  // RemoveSet fails those requests of a removed set that are not reported yet.
  if (failed == nullptr || failed->reported_ns == 0) return;
  if (shared_.trace.enabled()) TraceNegotiation(*failed);
  Record(Event::kFailed, NowNs(), failed->request.kind, failed->request.process_set,
         failed->request.name);
  ClearReported(failed->cache_id);
  const std::unique_ptr<TensorEntry> entry = shared_.tensors.Remove(key);
  ++shared_.stats.completed;
  shared_.handles->Complete(entry->handle, decision.details().status, {});
}

void Applier::FailRemoved(std::unique_ptr<TensorEntry> entry) {
  const Status removed(Code::kInvalidArgument, "the process set has been removed");
  ++shared_.stats.completed;
  shared_.handles->Complete(entry->handle, WithStage(*entry, removed), {});
}

void Applier::TraceNegotiation(const TensorEntry& entry) {
  const TimeNs end = NowNs();
  const std::string name = std::string("NEGOTIATE_") + UpperName(entry.request.kind);
  for (size_t i = 0; i < std::max<size_t>(entry.views.size(), 1); ++i) {
    shared_.trace.Add({name, TensorName(entry.request, i), Track::kNegotiate, false,
                       entry.reported_ns, end,
                       entry.views.empty() ? 0 : static_cast<int64_t>(entry.views[i].bytes()),
                       entry.request.process_set, entry.neutral()});
  }
}

}  // namespace hororing
