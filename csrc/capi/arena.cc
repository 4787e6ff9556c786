// hr_arena_allocate and hr_arena_free, and who owns what in between.
#include "transport/arena.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "capi/hororing.h"
#include "capi/process.h"

namespace hororing {
namespace {

// Allocations outlive the engine: each keeps its arena, and so the mapping, alive.
struct Owners {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Arena>> arenas;  // GUARDED_BY(mutex)
};

// Never destroyed: memory may be freed until the very end of the process.
Owners& TheOwners() {
  static Owners* owners = new Owners();
  return *owners;
}

Status Allocate(int64_t bytes, void** memory) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NotInitialized();
  if (bytes <= 0) {
    return Status(Code::kInvalidArgument,
                  "arena: " + std::to_string(bytes) + " bytes cannot be allocated");
  }
  // Where a batch has failed, a peer may not know yet, and still write to what is freed.
  if (engine->state() != Engine::State::kRunning) {
    return Status(Code::kTransport, "arena: the job has ended or failed");
  }
  const std::shared_ptr<Arena> arena = engine->arena();
  if (arena == nullptr) {
    return Status(Code::kTransport, "arena: the ranks of this job share no memory (transport " +
                                        engine->transport_name() + ", " +
                                        std::to_string(engine->topology().size) + " ranks)");
  }
  HORORING_RETURN_IF_ERROR(arena->Allocate(static_cast<size_t>(bytes), memory));
  std::lock_guard<std::mutex> lock(TheOwners().mutex);
  TheOwners().arenas[*memory] = arena;
  return Status::Ok();
}

}  // namespace
}  // namespace hororing

using namespace hororing;  // the functions below are the only ones outside the namespace

HR_EXPORT uintptr_t hr_arena_allocate(int64_t bytes) {
  void* memory = nullptr;
  Remember(Allocate(bytes, &memory));
  return reinterpret_cast<uintptr_t>(memory);
}

HR_EXPORT void hr_arena_free(uintptr_t memory) {
  if (InForkedChild()) return;
  std::shared_ptr<Arena> arena;
  {
    std::lock_guard<std::mutex> lock(TheOwners().mutex);
    const auto found = TheOwners().arenas.find(reinterpret_cast<void*>(memory));
    if (found == TheOwners().arenas.end()) return;
    arena = std::move(found->second);
    TheOwners().arenas.erase(found);
  }
  arena->Free(reinterpret_cast<void*>(memory));
}
