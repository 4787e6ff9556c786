// Makes ranks of one machine see different host names. This library is preloaded and gives a
// process the host name that PRETEND_HOSTS lists for its rank ("a,a,b,b"). Ranks with the same
// name share memory, and those with different names do not.
//
// Unlike hosts.sh it needs no privileges and adds no time to the start of a job. But all ranks have
// the /dev/shm and the addresses of one host, and MPI connects them as it does within a machine.

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

// From the environment, since MPI may not be initialized yet.
int Rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "HORORING_RANK"}) {
    if (const char* rank = std::getenv(name)) return std::atoi(rank);
  }
  return 0;
}

}  // namespace

extern "C" int gethostname(char* name, size_t room) {
  const char* at = std::getenv("PRETEND_HOSTS");
  if (at == nullptr || room == 0) return -1;
  for (int left = Rank(); left > 0; --left) {
    at = std::strchr(at, ',');
    if (at == nullptr) return -1;
    ++at;
  }
  const size_t length = std::strcspn(at, ",");
  const size_t copied = length < room ? length : room - 1;
  std::memcpy(name, at, copied);
  name[copied] = '\0';
  return 0;
}
