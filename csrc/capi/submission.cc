// The C interface: requests on their way to the engine.
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "capi/hororing.h"
#include "capi/process.h"
#include "capi/requests.h"
#include "engine/engine.h"

using namespace hororing;

namespace {

Status MarkReady(Engine& engine, const hr_request& from, TensorEntry* entry) {
  if (!entry->request.on_device()) return Status::Ok();
  std::vector<CuStream> streams;
  for (size_t i = 0; i < entry->views.size(); ++i) {
    const uintptr_t stream = from.streams != nullptr ? from.streams[i] : from.stream;
    streams.push_back(reinterpret_cast<CuStream>(stream));
  }
  return engine.MarkReady(entry->views[0].device, streams, entry);
}

Status Submit(const hr_request& from, int64_t* handle) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NotInitialized();
  const bool wait_follows = from.wait_follows != 0;
  OneTensor tensor;
  if (IsOneTensor(from, &tensor)) {
    if (wait_follows && engine->AtOnce(tensor, handle)) return Status::Ok();
    if (engine->SubmitAgain(&tensor, 1, wait_follows, handle) == 1) return Status::Ok();
  }
  auto entry = std::make_unique<TensorEntry>();
  HORORING_RETURN_IF_ERROR(MakeEntry(from, engine->sets(), engine->topology().rank, entry.get()));
  HORORING_RETURN_IF_ERROR(MarkReady(*engine, from, entry.get()));
  return engine->Submit(std::move(entry), wait_follows, handle);
}

// Entries for the requests, each with its tensor at its address. The first that is refused ends
// them. What a stream holds now computes all those of them that name it: one event for them all.
Status MakeEntries(Engine& engine, const hr_request* const* requests, const uintptr_t* addresses,
                   size_t count, std::vector<std::unique_ptr<TensorEntry>>* entries) {
  entries->reserve(count);
  std::map<std::pair<int, uintptr_t>, std::vector<std::shared_ptr<const DeviceEvent>>> ready;
  for (size_t i = 0; i < count; ++i) {
    hr_tensor tensor = requests[i]->tensors[0];
    tensor.input = tensor.output = addresses[i];
    hr_request request = *requests[i];
    request.tensors = &tensor;
    auto entry = std::make_unique<TensorEntry>();
    HORORING_RETURN_IF_ERROR(
        MakeEntry(request, engine.sets(), engine.topology().rank, entry.get()));
    if (entry->request.on_device()) {
      auto& known = ready[{entry->views[0].device, request.stream}];
      if (known.empty()) {
        HORORING_RETURN_IF_ERROR(MarkReady(engine, request, entry.get()));
        known = entry->ready;
      }
      entry->ready = known;
    }
    entries->push_back(std::move(entry));
  }
  return Status::Ok();
}

}  // namespace

HR_EXPORT int64_t hr_submit(const hr_request* request) {
  int64_t handle = 0;
  const Status status = Submit(*request, &handle);
  return status.ok() ? handle : -Remember(status);
}

HR_EXPORT int32_t hr_allreduce_many(const hr_request* const* requests, const uintptr_t* addresses,
                                    int32_t count, int64_t* handles) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) {
    handles[0] = -Remember(NotInitialized());
    return 0;
  }
  const size_t wanted = static_cast<size_t>(count);
  std::vector<OneTensor> tensors(wanted);
  size_t known = 0;
  for (; known < wanted && IsOneTensor(*requests[known], &tensors[known]); ++known) {
    tensors[known].input = tensors[known].output = reinterpret_cast<void*>(addresses[known]);
  }
  const size_t again = engine->SubmitAgain(tensors.data(), known, false, handles);
  if (again == wanted) return count;
  std::vector<std::unique_ptr<TensorEntry>> entries;
  const Status made =
      MakeEntries(*engine, requests + again, addresses + again, wanted - again, &entries);
  size_t submitted = 0;
  Status status = engine->SubmitMany(std::move(entries), handles + again, &submitted);
  submitted += again;
  if (status.ok()) status = made;
  if (!status.ok()) handles[submitted] = -Remember(status);
  return static_cast<int32_t>(submitted);
}
