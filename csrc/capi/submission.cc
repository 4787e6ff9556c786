// The C interface: submits requests to the engine.
#include <vector>

#include "capi/process.h"

using namespace hororing;

namespace {

Status MarkReady(Engine& engine, const hr_request& from, StreamEvents* events, TensorEntry* entry) {
  if (!entry->request.on_device()) return Status::Ok();
  std::vector<CuStream> streams;
  for (size_t i = 0; i < entry->views.size(); ++i) {
    const uintptr_t stream = from.streams != nullptr ? from.streams[i] : from.stream;
    streams.push_back(StreamOf(stream));
  }
  return engine.MarkReady(entry->views[0].device, streams, events, entry);
}

// `id`: see Engine::Submit. `events`: shared by all requests of one call.
Status Submit(Engine& engine, const hr_request& from, bool blocking, StreamEvents* events,
              uint64_t* id, int64_t* handle) {
  thread_local std::unique_ptr<TensorEntry> entry;  // its memory is reused
  if (entry == nullptr) entry = std::make_unique<TensorEntry>();
  HORORING_RETURN_IF_ERROR(MakeEntry(from, engine.sets(), engine.topology().rank, entry.get()));
  if (blocking && engine.AllreduceOneShot(*entry, handle)) return Status::Ok();
  Status status = MarkReady(engine, from, events, entry.get());
  if (status.ok()) status = engine.Submit(&entry, blocking, handle, id);
  // Release the events now; the cached entry may live as long as the thread.
  if (entry != nullptr) entry->ready.clear();
  return status;
}

}  // namespace

HR_EXPORT int64_t hr_submit(const hr_request* request) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return -Remember(NotInitialized());
  StreamEvents events;
  uint64_t id = 0;
  int64_t handle = 0;
  const Status status = Submit(*engine, *request, request->blocking != 0, &events, &id, &handle);
  return status.ok() ? handle : -Remember(status);
}
HR_OR(-Caught())

HR_EXPORT int32_t hr_start(hr_request* const* requests, const uintptr_t* addresses, int32_t count,
                           int64_t* handles) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) {
    handles[0] = -Remember(NotInitialized());
    return 0;
  }
  const size_t wanted = static_cast<size_t>(count);
  std::vector<Restart> restarts(wanted);
  for (size_t i = 0; i < wanted; ++i) restarts[i] = {requests[i]->id, WeightOf(*requests[i])};
  StreamEvents events;
  Status status;
  size_t started = 0;
  while (status.ok() && started < wanted) {
    started += engine->Start(restarts.data() + started, addresses + started, wanted - started,
                             handles + started);
    if (started == wanted) break;
    hr_tensor tensor = requests[started]->tensors[0];
    tensor.input = tensor.output = addresses[started];
    hr_request request = *requests[started];
    request.tensors = &tensor;
    status = Submit(*engine, request, false, &events, &requests[started]->id, &handles[started]);
    if (status.ok()) ++started;
  }
  if (!status.ok()) handles[started] = -Remember(status);
  return static_cast<int32_t>(started);
}
HR_OR((handles[0] = -Caught(), 0))
