// The one place that decides which transport a job gets, and works out its topology.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/bootstrap.h"
#include "transport/mpi_library.h"
#include "transport/transport.h"

namespace hororing {

// How the ranks are placed. Hosts are numbered in the order of their lowest rank.
struct Topology {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  int cross_rank = 0, cross_size = 1;  // among the ranks with this local rank
  bool homogeneous = true;             // the same number of ranks on each host
  std::vector<int> host_of;            // per rank
  std::vector<std::string> hosts;      // names, per host

  std::vector<std::vector<int>> ranks_on() const;  // per host, ascending: by local rank
};

// `host_ids[r]` identifies the host of rank r; equal ids share memory.
Topology MakeTopology(int rank, const std::vector<std::string>& host_ids);

struct World {
  // MPI, if only the rendezvous used it. Destroyed after the transport.
  std::unique_ptr<Transport> bootstrap;
  std::unique_ptr<Transport> transport;  // the engine's connection to all ranks
  // With several hosts: this host's shared memory, by local rank, for slots and control messages
  // (RoutedTransport). Null if some host has none, or if no host has two ranks.
  std::unique_ptr<Transport> local;
  Topology topology;
  // By rank: the processes of the other ranks of this host; pid 0 for all others.
  std::vector<ProcessIdentity> local_processes;
  std::string note;  // why the expected transport is not used; empty if it is
  std::string why;   // why MPI was chosen or not; empty if there was no choice
};

struct WorldOptions {
  bool launched = false;  // there may be other ranks
  std::string transport;  // "auto", "shm", "tcp" or "mpi"
  // How the ranks meet; null: through MPI. Borrowed.
  Bootstrap* bootstrap = nullptr;
  std::string address;           // of this host, as other hosts reach it; "": unknown
  std::string key;               // of the job, secret: for TCP; "": one that `bootstrap` shares
  std::string fabric;            // a network of this host that is faster with MPI; "": none
  std::string mpi_library_path;  // the layer for the MPI that is loaded
  MpiWorld mpi;
  TimeNs spin_ns = 0;
  TimeNs timeout_ns = kForever;  // for the exchange at start
  TimeNs silent_ns = 0;          // over TCP, a network cut for this long loses a peer; 0: default
  std::function<void(int peer)> unreachable = [](int) {};  // called for each peer so lost
};

// "auto" chooses inproc for one rank, shared memory if all ranks are on one host, and TCP between
// several hosts. It chooses MPI between hosts if MPI has started the job and all hosts have a
// fabric for it. Within each of several hosts, messages go through shared memory. If shared memory
// fails, MPI or TCP replaces it, with a note. "tcp" and "mpi" choose the transport between hosts,
// and exclude shared memory on one host. "shm" over several hosts is an error that names the hosts.
// All ranks decide alike, and fail with the same text, as long as the bootstrap connects them.
Status MakeWorld(const WorldOptions& options, World* world);

// Several hosts: from now on, control messages between ranks of one host go through `world.local`.
void RouteControl(const WorldOptions& options, World* world);

// N ranks inside this process, for tests: element r belongs to the thread of rank r.
std::vector<std::unique_ptr<Transport>> MakeInprocWorld(int size, TimeNs spin_ns);

// Ends MPI if MakeWorld has started it; see MpiFunctions.
void FinalizeMpi();
Status DescribeMpi(const std::string& mpi_library_path, MpiInfo* info);

}  // namespace hororing
