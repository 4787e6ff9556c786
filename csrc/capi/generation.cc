// The C interface: this process as a member of an elastic job.
#include "capi/generation.h"

#include <mutex>
#include <utility>

#include "capi/process.h"
#include "membership/membership.h"

namespace hororing {
namespace {

struct State {
  std::mutex mutex;
  std::shared_ptr<Membership> membership;  // GUARDED_BY(mutex), as all below
  std::weak_ptr<Engine> engine;            // to be revoked
  int64_t generation = 0;                  // its generation
};

// Never destroyed: in a forked child there is no thread that could be joined.
State& state = *new State();

std::shared_ptr<Membership> Exchange(std::shared_ptr<Membership> next) {
  std::lock_guard<std::mutex> lock(state.mutex);
  return std::exchange(state.membership, std::move(next));
}

std::shared_ptr<Membership> Current() {
  if (InForkedChild()) return nullptr;
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.membership;
}

// Generations up to this one are over.
void Revoke(int64_t generation, const Status& why) {
  std::shared_ptr<Engine> engine;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.generation != 0 && state.generation <= generation) engine = state.engine.lock();
  }
  if (engine != nullptr) engine->Revoke(why);
}

}  // namespace

void WatchGeneration(int64_t generation, const std::shared_ptr<Engine>& engine) {
  std::shared_ptr<Membership> membership;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.engine = engine;
    state.generation = generation;
    membership = state.membership;
  }
  if (generation == 0 || engine == nullptr || membership == nullptr) return;
  // It may have ended before there was an engine to revoke.
  const Status over = membership->Check(generation);
  if (!over.ok()) engine->Revoke(over);
}

}  // namespace hororing

using namespace hororing;  // the functions below are the only ones outside the namespace

HR_EXPORT int hr_membership_begin(int32_t socket, double interval_s) try {
  hr_membership_end();
  Exchange(std::make_shared<Membership>(socket, Scaled(interval_s, kSecond), Revoke));
  return HR_OK;
}
HR_OR(Caught())

// The old membership is destroyed here, without the lock: its thread may be about to revoke.
HR_EXPORT void hr_membership_end(void) try {
  if (!InForkedChild()) Exchange(nullptr);
}
HR_OR(static_cast<void>(Caught()))

HR_EXPORT int64_t hr_membership_updates(int64_t generation, int32_t* what) try {
  const std::shared_ptr<Membership> membership = Current();
  const Membership::Updates updates =
      membership == nullptr ? Membership::Updates() : membership->UpdatesSince(generation);
  *what = updates.what;
  return updates.stamp;
}
HR_OR((Caught(), 0))
