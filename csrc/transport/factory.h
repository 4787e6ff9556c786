// The one place that decides which transport a job gets, and works out its topology.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/bootstrap.h"
#include "transport/mpi_transport.h"
#include "transport/transport.h"

namespace hororing {

// Where the ranks live. Hosts are numbered in the order of their lowest rank.
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
  // MPI, when it only served to find the other ranks. Destroyed after the transport.
  std::unique_ptr<Transport> bootstrap;
  std::unique_ptr<Transport> transport;  // what the engine talks over
  // Several hosts: shared memory of the ranks of this one, by local rank, for its slots and for
  // control messages (RoutedTransport). Null where some host has none, or none has two ranks.
  std::unique_ptr<Transport> local;
  Topology topology;
  // Per rank, of those on this host but this one itself.
  std::vector<ProcessIdentity> neighbours;
  std::string note;  // why not the transport that one would expect; empty: nothing to say
  std::string why;   // MPI, or not, where there was a choice; else empty
};

struct WorldOptions {
  bool launched = false;  // there may be other ranks
  std::string transport;  // "auto", "shm", "tcp" or "mpi"
  // By which the ranks find one another; null: by MPI. Borrowed.
  Bootstrap* bootstrap = nullptr;
  std::string address;           // of this host, as other hosts reach it; "": not known
  std::string key;               // of the job, secret: for TCP; "": one that `bootstrap` shares
  std::string fabric;            // a network of this host that is faster with MPI; "": none
  std::string congestion;        // control of TCP, by its name; "": the kernel's default
  std::string mpi_library_path;  // the layer for the MPI that is loaded
  MpiWorld mpi;
  TimeNs spin_ns = 0;
  TimeNs timeout_ns = kForever;  // for the exchange at start
};

// auto: one rank -> inproc; all ranks on one host -> shared memory; several hosts -> TCP, or MPI
// where that has started the job and all hosts have a fabric for it, and shared memory on each of
// them for what does not leave it. Where shared memory fails, MPI or TCP with a note. "tcp" and
// "mpi": the same with that one between hosts, and on one host without shared memory. "shm" over
// several hosts is an error that names the hosts. The ranks decide alike, and fail with the same
// text, as long as the bootstrap connects them.
Status MakeWorld(const WorldOptions& options, World* world);

// Several hosts: control messages between neighbours go through `world.local` from now on.
void RouteControl(const WorldOptions& options, World* world);

// N ranks inside this process, for tests: element r belongs to the thread that plays rank r.
std::vector<std::unique_ptr<Transport>> MakeInprocWorld(int size, TimeNs spin_ns);

// Ends what MakeWorld may have begun with MPI; see HororingMpiFinalize.
void FinalizeMpi();
Status DescribeMpi(const std::string& mpi_library_path, MpiInfo* info);

}  // namespace hororing
