// Loop: how a rank carries out an agreement.
#include <algorithm>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/recorder.h"
#include "engine/backends.h"
#include "engine/loop.h"
#include "kernels/reduce.h"
#include "transport/subgroup.h"

namespace hororing {

void Loop::Apply(const Agreement& agreement) {
  const TimeNs now = NowNs();
  shared_.trace.CycleStart(now);
  // Not always the next one: agreements that do not concern this rank are not sent to it.
  if (agreement.sequence <= applied_) {
    return End(Status(Code::kInternal, "agreement " + std::to_string(agreement.sequence) +
                                           " came after " + std::to_string(applied_)));
  }
  const auto run = [&] {  // what has been agreed on so far
    if (work_.empty() || final_) return;
    const Status status = runner_.Run(work_);
    work_.clear();
    if (!status.ok()) End(status);
  };
  for (const Decision& decision : agreement.decisions) {
    if (decision.kind != Decision::Kind::kRun && decision.kind != Decision::Kind::kFail) run();
    if (final_) return;
    switch (decision.kind) {
      case Decision::Kind::kRun:
        for (uint64_t i = 0; i < decision.count && !final_; ++i) {
          const std::optional<Work> agreed = Agreed(decision, decision.cache_id + i);
          if (!agreed) continue;
          const Request& request = agreed->entry->request;
          if (!agreed->entry->stands_in()) {
            Record(Event::kAgreed, now, request.kind, request.process_set, request.name);
          }
          if (agreed->entry->views.empty() && request.kind != Collective::kBarrier) {
            // It changes which ranks take part in batches, so it keeps its place among them. A
            // barrier does not: ranks outside its process set must compute the same batches.
            run();
            if (!final_) Settle(*agreed);
          } else {
            work_.push_back(*agreed);
          }
        }
        break;
      case Decision::Kind::kFail: Fail(decision); break;
      case Decision::Kind::kTimeline:
        timeline_.Switch(decision.details().timeline_on, decision.details().timeline_cycles);
        break;
      case Decision::Kind::kLeave: rank_left_ = true; [[fallthrough]];
      case Decision::Kind::kAbort:
        end_agreed_ = true;
        End(decision.details().status);
        break;
    }
  }
  run();
  stand_ins_.clear();
  alltoall_rows_.clear();
  for (uint64_t id : agreement.evicted) shared_.tensors.Forget(id);
  applied_ = agreement.sequence;
}

// Returns this rank's part of a decision, or nothing if it does not take part. `id`: the cache id
// of the request, if it is cached.
std::optional<Work> Loop::Agreed(const Decision& decision, uint64_t id) {
  if (!shared_.sets.Contains(decision.process_set)) return std::nullopt;
  Work work;
  const Decision::Details& details = decision.details();
  const bool cached = details.name.empty();
  RequestRecord* const known = cached ? shared_.tensors.FindRecord(id) : nullptr;
  if (known != nullptr) {
    work.entry = std::exchange(known->reported, nullptr);
  } else if (!cached) {
    work.entry = shared_.tensors.Find(Key(decision.process_set, details.name));
  }
  if (work.entry == nullptr) {
    if (details.stand_in) {
      work.entry = StandIn(*details.stand_in);
    } else if (known != nullptr) {
      work.entry = StandIn(known->agreed);
    } else {
      End(Status(Code::kInternal, "agreement on a request that this rank does not have: '" +
                                      details.name + "', id " + std::to_string(id)));
    }
    if (work.entry == nullptr) return std::nullopt;
  }
  if (!details.weights.empty()) work.weights = &details.weights;
  work.rows = known != nullptr ? &known->rows : &details.rows;
  if (!cached) {
    if (work.entry->request.kind == Collective::kAlltoall) {
      work.rows = &alltoall_rows_.emplace_back(OwnRows(decision));
      if (work.rows->empty()) {
        End(Status(Code::kInternal, "agreement without the rows of '" + details.name + "'"));
        return std::nullopt;
      }
    }
    ClearReported(work.entry->cache_id);  // a new request replaces this id
    if (id != 0) shared_.tensors.Define(id, work.entry->request, *work.rows);
    work.entry->cache_id = id;
  }
  if (shared_.trace.enabled()) TraceNegotiation(*work.entry);
  return work;
}

// The sum of an alltoall's splits, and what this rank receives. The agreement has the rows of all
// members among the ranks that it was sent to. Empty if they are missing.
std::vector<int64_t> Loop::OwnRows(const Decision& decision) const {
  const std::vector<int64_t>& rows = decision.details().rows;
  const std::shared_ptr<const ProcessSet> set = shared_.sets.Find(decision.process_set);
  const auto members = static_cast<std::ptrdiff_t>(set->ranks.size());
  std::ptrdiff_t first = 1;
  for (const int rank : group_) {
    if (rank == topology_.rank) break;
    if (set->IndexOf(rank) >= 0) first += members;
  }
  if (static_cast<std::ptrdiff_t>(rows.size()) < first + members) return {};
  std::vector<int64_t> own(rows.begin() + first, rows.begin() + first + members);
  own.insert(own.begin(), rows[0]);
  return own;
}

void Loop::ClearReported(uint64_t id) {
  RequestRecord* const known = shared_.tensors.FindRecord(id);
  if (known != nullptr) known->reported = nullptr;
}

// This rank has joined. It contributes neutral values, which do not change the result.
TensorEntry* Loop::StandIn(const Request& request) {
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
      End(Status(Code::kInternal, "no memory to take part in " + request.Title() + " after join, " +
                                      std::to_string(view.bytes()) + " bytes"));
      return nullptr;
    }
    view.input = view.output = memory.data();
    FillNeutral({tensor.dtype, request.op, request.prescale, request.postscale}, memory.data(),
                static_cast<size_t>(view.elements()));
    if (tensor.on_device && view.elements() > 0) {
      const Status moved = ToDevice(view.bytes(), &memory);
      if (!moved.ok()) {
        End(Status(moved.code(), request.Title() + " after join: " + moved.message()));
        return nullptr;
      }
      view.input = view.output = memory.data();
    }
    entry->views.push_back(std::move(view));
    entry->results.push_back(std::move(memory));
  }
  stand_ins_.push_back(std::move(entry));
  return stand_ins_.back().get();
}

Status Loop::ToDevice(size_t bytes, ResultBuffer* memory) {
  std::shared_ptr<Device> device;
  HORORING_RETURN_IF_ERROR(shared_.devices->Any(&device));
  ResultBuffer moved;
  HORORING_RETURN_IF_ERROR(moved.AllocateOn(*device, bytes, 0));
  HORORING_RETURN_IF_ERROR(device->CopyToDevice(moved.data(), memory->data(), bytes));
  *memory = std::move(moved);
  return Status::Ok();
}

// Completes a request without tensors. Usually the agreement is all that it needs.
void Loop::Settle(const Work& work) {
  const Request& request = work.entry->request;
  if (request.kind == Collective::kAddProcessSet) {
    AddSet(static_cast<int32_t>((*work.rows)[0]), request);
  } else if (request.kind == Collective::kRemoveProcessSet && (*work.rows)[0] != 0) {
    const Status removed = RemoveSet(request.root);
    if (!removed.ok()) return FailSettled(*work.entry, removed);
  }
  if (!work.rows->empty()) {
    work.entry->results.emplace_back();
    if (!work.entry->results.back().CopyNumbers(*work.rows)) {
      return End(Status(Code::kInternal, "no memory for the result of " + request.Title()));
    }
  }
  runner_.Complete(work.entry);
}

void Loop::AddSet(int32_t id, const Request& request) {
  shared_.sets.Add(id, request.ranks, request.scope() != SetScope::kPublic);
  ++sets_added_;
  const ProcessSet set = *shared_.sets.Find(id);
  const int rank = set.IndexOf(topology_.rank);
  if (rank < 0) return;
  Communicator communicator;
  communicator.ranks = set.ranks;
  communicator.rank = rank;
  communicator.transport = std::make_unique<Subgroup>(transport_, set.ranks);
  communicator.backends =
      MakeBackends(backend_options_, world_, *communicator.transport, {set.ranks, id, sets_added_});
  runner_.AddSet(id, std::move(communicator));
}

Status Loop::RemoveSet(int32_t id) {
  shared_.sets.Remove(id);
  for (std::unique_ptr<TensorEntry>& entry : shared_.tensors.RemoveSet(id)) {
    FailRemoved(std::move(entry));
  }
  return runner_.RemoveSet(id);
}

// The engine continues.
void Loop::FailSettled(TensorEntry& entry, const Status& why) {
  Log(LogLevel::kError, why.message());
  if (entry.stands_in()) return;
  const std::unique_ptr<TensorEntry> owned = shared_.tensors.Remove(Key(entry.request));
  owned->stage = "COMPLETE";
  ++shared_.stats.completed;
  shared_.handles->Complete(owned->handle, WithStage(*owned, why), {});
}

void Loop::Fail(const Decision& decision) {
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

void Loop::FailRemoved(std::unique_ptr<TensorEntry> entry) {
  const Status removed(Code::kInvalidArgument, "the process set has been removed");
  ++shared_.stats.completed;
  shared_.handles->Complete(entry->handle, WithStage(*entry, removed), {});
}

void Loop::TraceNegotiation(const TensorEntry& entry) {
  const TimeNs end = NowNs();
  const std::string name = std::string("NEGOTIATE_") + UpperName(entry.request.kind);
  for (size_t i = 0; i < std::max<size_t>(entry.views.size(), 1); ++i) {
    shared_.trace.Add({name, TensorName(entry.request, i), Track::kNegotiate, false,
                       entry.reported_ns, end,
                       entry.views.empty() ? 0 : static_cast<int64_t>(entry.views[i].bytes()),
                       entry.request.process_set, entry.stands_in()});
  }
}

}  // namespace hororing
