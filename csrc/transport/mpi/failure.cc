#include <dlfcn.h>

#include <cstring>
#include <numeric>

#include "transport/mpi/mpi_transport.h"

namespace hororing {
std::atomic<bool> broken_here{false};

Status MpiError(const char* call, int error, int peer) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int bytes = 0;
  MPI_Error_string(error, text, &bytes);
  const std::string what = std::string(call) + ": " + std::string(text, static_cast<size_t>(bytes));
  // The text of MPIs with fault tolerance (ULFM) for a dead process.
  if (std::strstr(text, "PROC_FAILED") == nullptr) return Status(Code::kTransport, what, peer);
  const std::string who = peer < 0 ? "a rank" : "rank " + std::to_string(peer);
  return Status(Code::kPeerLost, who + " died (" + what + ")", peer);
}

// Uses a function of Open MPI's fault tolerance (ULFM), which other MPIs lack.
std::vector<int> KnownDead(MPI_Comm communicator) {
  using GetFailed = int (*)(MPI_Comm, MPI_Group*);
  const auto get_failed = reinterpret_cast<GetFailed>(dlsym(RTLD_DEFAULT, "MPIX_Comm_get_failed"));
  std::vector<int> ranks;
  MPI_Group all, dead;
  if (get_failed == nullptr || get_failed(communicator, &dead) != MPI_SUCCESS) return ranks;
  if (MPI_Comm_group(communicator, &all) == MPI_SUCCESS) {
    int count = 0;
    MPI_Group_size(dead, &count);
    std::vector<int> places(static_cast<size_t>(count));
    std::iota(places.begin(), places.end(), 0);
    ranks.resize(places.size());
    MPI_Group_translate_ranks(dead, count, places.data(), all, ranks.data());
    MPI_Group_free(&all);
  }
  MPI_Group_free(&dead);
  return ranks;
}

void AcknowledgeDead(MPI_Comm communicator) {
  using Acknowledge = int (*)(MPI_Comm);
  const auto acknowledge =
      reinterpret_cast<Acknowledge>(dlsym(RTLD_DEFAULT, "MPIX_Comm_failure_ack"));
  if (acknowledge != nullptr) acknowledge(communicator);
}

void LeakUntilExit(std::shared_ptr<void> memory) {
  static auto* const graveyard = new std::vector<std::shared_ptr<void>>;
  graveyard->push_back(std::move(memory));
}

}  // namespace hororing
