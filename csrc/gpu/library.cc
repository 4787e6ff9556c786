#include "gpu/library.h"

#include <dlfcn.h>
#include <link.h>

#include <sstream>

namespace hororing {

Status Library::Open(const std::string& what, const std::vector<std::string>& paths,
                     Library* library) {
  std::string tried;
  for (const int loaded : {RTLD_NOLOAD, 0}) {
    for (const std::string& path : paths) {
      if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | loaded)) {
        library->handle_ = handle;
        link_map* map = nullptr;
        const bool known = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0';
        library->path_ = known ? map->l_name : path;
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
  std::istringstream listed(paths);
  for (std::string path; std::getline(listed, path, ':');) {
    if (!path.empty()) parts.push_back(path);
  }
  return parts;
}

}  // namespace hororing
