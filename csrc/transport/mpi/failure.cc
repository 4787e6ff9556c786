#include "transport/mpi/failure.h"

#include <mpi.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace hororing {

std::atomic<bool> broken_here{false};

Status MpiError(const char* call, int error, int peer) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int bytes = 0;
  MPI_Error_string(error, text, &bytes);
  const std::string what = std::string(call) + ": " + std::string(text, static_cast<size_t>(bytes));
  // What MPIs with fault tolerance (ULFM) say when a process has died.
  if (std::strstr(text, "PROC_FAILED") == nullptr) return Status(Code::kTransport, what, peer);
  const std::string who = peer < 0 ? "a rank" : "rank " + std::to_string(peer);
  return Status(Code::kPeerLost, who + " died (" + what + ")", peer);
}

void Bury(std::shared_ptr<void> memory) {
  static auto* const graveyard = new std::vector<std::shared_ptr<void>>;
  graveyard->push_back(std::move(memory));
}

}  // namespace hororing
