// How the loop waits for a device, where it has to: what comes next is for the host to do.
//
// Thread-safety: loop thread only.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"
#include "device/device.h"
#include "transport/transport.h"

namespace hororing {

// Until the device has come there. `look` is asked now and then whether to go on; its error ends
// the wait.
Status WaitFor(const DeviceEvent& event, Transport& transport, const std::function<Status()>& look);

// kTransport: that a batch has taken longer than it may.
Status TookTooLong(const std::string& label);

}  // namespace hororing
