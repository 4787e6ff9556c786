#include "gpu/library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>

namespace hororing {
namespace {

std::string FileOf(void* handle, const std::string& otherwise) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map->l_name[0] == '\0') return otherwise;
  return map->l_name;
}

}  // namespace

Status Library::Open(const std::string& what, const std::vector<std::string>& paths,
                     Library* library) {
  std::string tried;
  for (const int loaded : {RTLD_NOLOAD, 0}) {
    for (const std::string& path : paths) {
      if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | loaded)) {
        library->handle_ = handle;
        library->path_ = FileOf(handle, path);
        return Status::Ok();
      }
      const char* why = dlerror();
      if (loaded != 0) continue;
      tried += (tried.empty() ? "" : "; ") + std::string(why != nullptr ? why : path);
    }
  }
  return Status(Code::kInvalidArgument, what + " cannot be loaded: " + tried);
}

void* Library::Symbol(const char* name) const { return dlsym(handle_, name); }

std::vector<std::string> SplitPaths(const std::string& paths) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= paths.size();) {
    const size_t end = std::min(paths.find(':', begin), paths.size());
    if (end > begin) parts.push_back(paths.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace hororing
