// The C interface: this process as a member of an elastic job.
#include "membership/membership.h"

#include <memory>
#include <mutex>
#include <utility>

#include "capi/hororing.h"
#include "capi/process.h"

namespace hororing {
namespace {

std::mutex mutex;

// Never destroyed: in a forked child there is no thread that could be joined.
std::shared_ptr<Membership>& TheMembership() {  // REQUIRES: mutex
  static auto* const membership = new std::shared_ptr<Membership>();
  return *membership;
}

std::shared_ptr<Membership> Exchange(std::shared_ptr<Membership> next) {
  std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(TheMembership(), std::move(next));
}

std::shared_ptr<Membership> Current() {
  if (InForkedChild()) return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  return TheMembership();
}

}  // namespace

Status CheckGeneration(int64_t generation) {
  const std::shared_ptr<Membership> membership = Current();
  return generation == 0 || membership == nullptr ? Status::Ok() : membership->Check(generation);
}

}  // namespace hororing

using namespace hororing;  // the functions below are the only ones outside the namespace

HR_EXPORT int hr_membership_begin(int32_t socket, double interval_s) try {
  hr_membership_end();
  Exchange(std::make_shared<Membership>(socket, Scaled(interval_s, kSecond), RevokeGeneration));
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
