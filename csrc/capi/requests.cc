// Converts requests of the C interface to the engine's, and finds errors that one rank sees alone.

#include <algorithm>

#include "capi/process.h"
#include "collective/allreduce.h"
#include "kernels/reduce.h"
#include "negotiation/validate.h"

namespace hororing {
static_assert(HR_OP_COUNT == kReduceOpCount);

namespace {

Status Invalid(const Request& request, const std::string& what) {
  return Status(Code::kInvalidArgument, request.Title() + ": " + what);
}

std::string DeviceText(const TensorView& view) {
  return view.on_device() ? "CUDA device " + std::to_string(view.device) : "the CPU";
}

Status CheckSet(const Request& request, const ProcessSet* set, int rank) {
  if (set == nullptr)
    return Invalid(request, "there is no such process set, or it has been removed");
  if (set->IndexOf(rank) >= 0) return Status::Ok();
  return Invalid(request, "rank " + std::to_string(rank) +
                              " is not a member of the process set, which has " +
                              (set->ranks.empty() ? "no ranks" : RanksText(set->ranks)));
}

// Fills in the splits of an alltoall.
Status Split(const hr_request& from, const ProcessSet& set, TensorEntry* entry) {
  Request& request = entry->request;
  if (request.kind != Collective::kAlltoall) return Status::Ok();
  if (entry->views.size() != 1) return Invalid(request, "takes one tensor");
  TensorView& view = entry->views[0];
  if (view.shape.empty()) {
    return Invalid(request, "a tensor without dimensions has no rows to send; reshape it to [1]");
  }
  const int64_t rows = view.shape[0], size = set.size();
  const std::string shape = "a tensor of shape " + ShapeText(view.shape);
  if (from.integers == nullptr) {
    if (rows % size != 0) {
      return Invalid(request, shape + " cannot be split evenly over " + std::to_string(size) +
                                  " ranks; pass splits");
    }
    request.splits.assign(set.ranks.size(), rows / size);
    return Status::Ok();
  }
  request.splits.assign(from.integers, from.integers + from.integers_count);
  const std::string splits = "splits " + ShapeText(request.splits);
  if (from.integers_count != size) {
    return Invalid(request,
                   splits + " must have one entry for each of " + std::to_string(size) + " ranks");
  }
  int64_t sum = 0;
  for (int64_t split : request.splits) {
    if (split < 0) return Invalid(request, splits + " must not be negative");
    if (split > rows - sum) {
      return Invalid(request, splits + " ask for more rows than there are in " + shape);
    }
    sum += split;
  }
  view.shape[0] = request.tensors[0].shape[0] = sum;
  return Status::Ok();
}

Status CheckReduction(const Request& request, const TensorView& view, int size) {
  const ReduceSpec spec{view.dtype, request.op, request.prescale, request.postscale};
  if (request.weight && (request.op != ReduceOp::kAverage || !IsFloating(view.dtype))) {
    return Invalid(request, std::string("weight is for op=Average of floats only, not op=") +
                                Name(request.op) + " of " + Name(view.dtype) +
                                "; scale or convert the tensor before the call");
  }
  if (request.kind == Collective::kReducescatter) {
    if (view.shape.empty()) {
      return Invalid(request, "a tensor without dimensions has no rows to scatter; use allreduce");
    }
    if (request.op != ReduceOp::kAverage && request.op != ReduceOp::kSum) {
      return Invalid(request, std::string("op=") + Name(request.op) +
                                  " is not supported; use Average or Sum, or allreduce");
    }
  }
  const Status status = request.op == ReduceOp::kAdasum ? CheckAdasum(spec, size) : Check(spec);
  return status.ok() ? status : Invalid(request, status.message());
}

// Finds errors that this rank can see alone.
Status CheckLocally(const TensorEntry& entry, const ProcessSet& set) {
  const Request& request = entry.request;
  for (const TensorView& view : entry.views) {
    for (int64_t dimension : view.shape) {
      if (dimension < 0) return Invalid(request, "shape " + ShapeText(view.shape) + " is negative");
    }
    // A reduce-scatter may leave nothing for this rank.
    const bool written = !IsGathering(request.kind) && request.kind != Collective::kReducescatter;
    if (view.elements() > 0 && (view.input == nullptr || (written && view.output == nullptr))) {
      return Invalid(request, "a tensor with elements has no memory");
    }
    if (request.kind == Collective::kAllgather && view.shape.empty()) {
      return Invalid(request, "a tensor without dimensions cannot be gathered; reshape it to [1]");
    }
    if (IsReduction(request.kind)) {
      HORORING_RETURN_IF_ERROR(CheckReduction(request, view, set.size()));
    }
  }
  if (request.kind == Collective::kBroadcast && set.IndexOf(request.root) < 0) {
    return Invalid(request, "root rank " + std::to_string(request.root) +
                                (request.process_set == kWorldSet
                                     ? " is not a rank of this job, which has ranks 0 to " +
                                           std::to_string(set.size() - 1)
                                     : " is not a member of the process set, which has " +
                                           RanksText(set.ranks)));
  }
  const bool takes_tensors =
      request.kind != Collective::kBarrier && request.kind < Collective::kJoin;
  if (takes_tensors && entry.views.empty()) return Invalid(request, "there is no tensor");
  if (!takes_tensors && !entry.views.empty()) return Invalid(request, "takes no tensors");
  return Status::Ok();
}

// A reduction reads each input while results are written: no result may lie in the memory of
// another tensor of the group. (A broadcast may name a tensor twice: both copies are the same.)
Status CheckMemory(const TensorEntry& entry) {
  const Request& request = entry.request;
  if (!IsReduction(request.kind) || entry.views.size() < 2) return Status::Ok();
  struct Range {
    uintptr_t begin, end;
    size_t index;
    bool written;
  };
  std::vector<Range> ranges;
  for (size_t i = 0; i < entry.views.size(); ++i) {
    const TensorView& view = entry.views[i];
    const auto begin = reinterpret_cast<uintptr_t>(view.input);
    const bool in_place = view.output == view.input;
    ranges.push_back({begin, begin + view.bytes(), i, in_place});
    if (in_place || request.kind != Collective::kAllreduce) continue;
    const auto result = reinterpret_cast<uintptr_t>(view.output);
    ranges.push_back({result, result + view.bytes(), i, true});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  Range any{}, written{};  // those that end last so far
  for (const Range& range : ranges) {
    if (range.begin == range.end) continue;
    const Range& other = range.begin < written.end || !range.written ? written : any;
    if (range.begin < other.end) {
      const auto [one, two] = std::minmax(other.index, range.index);
      return Invalid(request, "tensors " + std::to_string(one) + " and " + std::to_string(two) +
                                  " of the group share memory, which the result of one would "
                                  "change while the other is read; pass each tensor once (tied "
                                  "weights, views), or reduce copies");
    }
    if (range.end > any.end) any = range;
    if (range.written && range.end > written.end) written = range;
  }
  return Status::Ok();
}

// Fills in an entry. It may have been used before, so that its memory is reused.
Status EntryFrom(const hr_request& from, TensorEntry* entry) {
  Request& request = entry->request;
  request.name = from.name != nullptr ? from.name : "";
  request.op = ReduceOp::kSum;
  request.root = 0;
  request.prescale = request.postscale = 1.0;
  request.weight.reset();
  request.splits.clear();
  request.ranks.clear();
  if (from.collective < HR_ALLREDUCE || from.collective > HR_REMOVE_PROCESS_SET) {
    return Status(Code::kInvalidArgument,
                  "there is no collective number " + std::to_string(from.collective));
  }
  request.kind = static_cast<Collective>(from.collective);
  if (request.name.empty()) return Invalid(request, "the name is empty");
  request.process_set = from.process_set;
  if (IsReduction(request.kind)) {
    if (from.op < 0 || from.op >= kReduceOpCount) {
      return Invalid(request, "there is no reduce operation number " + std::to_string(from.op));
    }
    request.op = static_cast<ReduceOp>(from.op);
    request.prescale = from.prescale;
    request.postscale = from.postscale;
    if (request.kind == Collective::kAllreduce) request.weight = WeightOf(from);
  }
  if (request.kind == Collective::kBroadcast || request.kind >= Collective::kAddProcessSet) {
    request.root = from.root;
  }
  if (request.kind == Collective::kAddProcessSet) {
    for (int32_t i = 0; i < from.integers_count; ++i) {
      const int64_t rank = from.integers[i];
      if (rank != static_cast<int32_t>(rank)) {
        return Invalid(request, "there is no rank " + std::to_string(rank));
      }
      request.ranks.push_back(static_cast<int32_t>(rank));
    }
    std::sort(request.ranks.begin(), request.ranks.end());
  }
  const size_t count = static_cast<size_t>(from.tensors_count);
  request.tensors.resize(count);
  entry->views.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const hr_tensor& tensor = from.tensors[i];
    if (tensor.dtype < 0 || tensor.dtype >= kCopiedTypeCount) {
      return Invalid(request, "there is no data type number " + std::to_string(tensor.dtype));
    }
    if (IsReduction(request.kind) && tensor.dtype >= kDataTypeCount) {
      const std::string name = Name(static_cast<DataType>(tensor.dtype));
      return Invalid(request, name + " can be copied, not reduced; cast it to " +
                                  (name[0] == 'f' ? "bfloat16, as compression=Compression.bf16 does"
                                                  : "int64"));
    }
    TensorView& view = entry->views[i];
    view.input = reinterpret_cast<const void*>(tensor.input);
    view.output = reinterpret_cast<void*>(tensor.output);
    view.dtype = static_cast<DataType>(tensor.dtype);
    view.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
    view.device = tensor.device > 0 ? tensor.device - 1 : TensorView::kHost;
    if (view.device != entry->views[0].device) {
      return Invalid(request, "the tensors of a group must be on the same device; this one has " +
                                  DeviceText(entry->views[0]) + " and " + DeviceText(view));
    }
    request.tensors[i].dtype = view.dtype;
    request.tensors[i].shape = view.shape;
    request.tensors[i].on_device = view.on_device();
  }
  return Status::Ok();
}

}  // namespace

Status MakeEntry(const hr_request& from, const ProcessSets& sets, int rank, TensorEntry* entry) {
  HORORING_RETURN_IF_ERROR(EntryFrom(from, entry));
  const std::shared_ptr<const ProcessSet> set = sets.Share(entry->request.process_set);
  HORORING_RETURN_IF_ERROR(CheckSet(entry->request, set.get(), rank));
  HORORING_RETURN_IF_ERROR(Split(from, *set, entry));
  HORORING_RETURN_IF_ERROR(CheckLocally(*entry, *set));
  return CheckMemory(*entry);
}

}  // namespace hororing
