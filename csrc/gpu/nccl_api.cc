#include "gpu/nccl_api.h"

namespace hororing {

Status NcclApi::Load(const std::string& paths, NcclApi* api) {
  HORORING_RETURN_IF_ERROR(Library::Open("NCCL", SplitPaths(paths), &api->library));
  std::string missing;
#define HORORING_FIND(member, symbol, parameters) \
  if (!api->library.Find(#symbol, api->member.place())) missing += std::string(" ") + #symbol;
  HORORING_NCCL_FUNCTIONS(HORORING_FIND)
#undef HORORING_FIND
  if (!api->library.Find("ncclGetErrorString", &api->get_error_string)) missing += " errors";
  api->library.Find("ncclGetLastError", &api->get_last_error);
  const std::string where = "NCCL of " + api->library.path();
  if (!missing.empty()) {
    return Status(Code::kInvalidArgument, where + " lacks" + missing + "; NCCL 2.14 has them");
  }
  HORORING_RETURN_IF_ERROR(api->Check(api->get_version(&api->version), "ncclGetVersion", nullptr));
  if (api->version < kMinNcclVersion) {
    return Status(Code::kInvalidArgument,
                  where + " is " + api->version_text() + "; 2.14 is the minimum supported version");
  }
  return Status::Ok();
}

// NCCL_VERSION of nccl.h, for 2.9 and later.
std::string NcclApi::version_text() const {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

Status NcclApi::Check(NcclResult result, const char* call, NcclComm comm) const {
  if (result == kNcclSuccess) return Status::Ok();
  std::string text = std::string(call) + " of NCCL " + version_text() + " (" + library.path() +
                     "): " + get_error_string(result);
  const char* last = get_last_error != nullptr ? get_last_error(comm) : nullptr;
  if (last != nullptr && last[0] != '\0') text += ": " + std::string(last);
  return Status(Code::kTransport,
                text + "; NCCL_DEBUG=WARN tells more, and docs/gpu.md what to do about it");
}

}  // namespace hororing
