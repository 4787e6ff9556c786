#include "backend/device_wait.h"

#include "base/clock.h"

namespace hororing {
namespace {

constexpr TimeNs kEventInterval = 50 * kMicrosecond;
constexpr TimeNs kLookInterval = 20 * kMillisecond;

}  // namespace

Status WaitFor(const DeviceEvent& event, Transport& transport,
               const std::function<Status()>& look) {
  TimeNs next_look = After(NowNs(), kLookInterval);
  for (;;) {
    bool reached = false;
    HORORING_RETURN_IF_ERROR(event.Look(&reached));
    if (reached) return Status::Ok();
    const TimeNs now = NowNs();
    if (now >= next_look) {
      HORORING_RETURN_IF_ERROR(look());
      next_look = After(now, kLookInterval);
    }
    transport.Sleep(After(now, kEventInterval));
  }
}

Status TookTooLong(const std::string& label) {
  return Status(Code::kTransport,
                "the device did not come to an end with '" + label +
                    "' in time (HORORING_TIMEOUT_S sets the limit); another rank may be stuck");
}

}  // namespace hororing
