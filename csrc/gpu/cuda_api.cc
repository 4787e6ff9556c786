#include "gpu/cuda_api.h"

namespace hororing {

Status CudaApi::Load(const std::string& paths, CudaApi* api) {
  HORORING_RETURN_IF_ERROR(Library::Open("NVIDIA's driver", SplitPaths(paths), &api->library));
  std::string missing;
#define HORORING_FIND(member, symbol, parameters) \
  if (!api->library.Find(#symbol, api->member.place())) missing += std::string(" ") + #symbol;
  HORORING_CUDA_FUNCTIONS(HORORING_FIND)
#undef HORORING_FIND
  const std::string where = "NVIDIA's driver " + api->library.path();
  if (!missing.empty()) {
    return Status(Code::kInvalidArgument, where + " lacks" + missing + "; CUDA 11.2 has them");
  }
  Status status = api->Call(api->init, 0);
  if (status.ok()) status = api->Call(api->driver_get_version, &api->version);
  if (status.ok()) status = api->Call(api->device_get_count, &api->devices);
  if (!status.ok()) return Status(Code::kInvalidArgument, where + ": " + status.message());
  if (api->version < kMinCudaVersion) {
    return Status(Code::kInvalidArgument, where + " is made for CUDA " + api->version_text() +
                                              "; 11.2 is the minimum supported version");
  }
  if (api->devices == 0) {
    return Status(Code::kInvalidArgument, where + " finds no device; look at CUDA_VISIBLE_DEVICES");
  }
  return Status::Ok();
}

Status CudaApi::Check(CuResult result, const std::string& call) const {
  if (result == kCuSuccess) return Status::Ok();
  const char *name = nullptr, *text = nullptr;
  if (get_error_name(result, &name) != kCuSuccess || name == nullptr) name = "unknown error";
  if (get_error_string(result, &text) != kCuSuccess || text == nullptr) text = "CUDA failed";
  const std::string what = call.substr(0, call.find('_')) + ": " + text + " (" + name + ", " +
                           std::to_string(result) + ")";
  if (result < kCuFirstCaptureError || result > kCuLastCaptureError) {
    return Status(Code::kTransport, what);
  }
  return Status(Code::kInvalidArgument, CapturedText() + "; " + what);
}

std::string CapturedText() {
  return "the stream is being captured into a CUDA graph, which cannot hold a collective (ranks "
         "agree on each one anew); call it outside of the capture: capture forward and backward "
         "pass, then synchronize gradients and step without it";
}

}  // namespace hororing
