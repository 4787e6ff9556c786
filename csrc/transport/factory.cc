#include "transport/factory.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "transport/routed_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp_transport.h"

namespace hororing {
namespace {

std::mutex mpi_mutex;
// Of the loaded layer for MPI, which stays loaded, because MPI cannot be unloaded.
const MpiFunctions* loaded_mpi = nullptr;  // GUARDED_BY(mpi_mutex)

Status LoadMpi(const std::string& path, const MpiFunctions** mpi) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  if (loaded_mpi == nullptr) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      return Status(Code::kTransport,
                    std::string("the MPI transport cannot be loaded: ") + dlerror());
    }
    loaded_mpi = static_cast<const MpiFunctions*>(dlsym(handle, "hororing_mpi_functions"));
    if (loaded_mpi == nullptr) {
      return Status(Code::kTransport, path + " is not the MPI transport of this version");
    }
  }
  *mpi = loaded_mpi;
  return Status::Ok();
}

// Ranks with equal ids can map the same shared memory and see one another's processes: the ids
// contain the host's name, the boot id of the kernel, /dev/shm and the namespace of process ids
// (containers on one machine may differ). The part before the first '|' is the host's name.
std::string HostId() {
  char host[128] = {}, boot[64] = {}, pids[64] = {};
  gethostname(host, sizeof host - 1);
  if (std::FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
    if (std::fgets(boot, sizeof boot, file) != nullptr) boot[std::strcspn(boot, "\n")] = '\0';
    std::fclose(file);
  }
  struct stat shm = {};
  const bool has_shm = stat("/dev/shm", &shm) == 0;
  // Without /proc, all ranks that lack it count as equal.
  if (readlink("/proc/self/ns/pid", pids, sizeof pids - 1) < 0) pids[0] = '\0';
  return std::string(host) + "|" + boot + "|" + pids + "|" +
         (has_shm ? std::to_string(shm.st_dev) + ":" + std::to_string(shm.st_ino) : "none");
}

// The first of the ranks' errors; ok if all are empty.
Status FirstOf(const std::vector<std::string>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank].empty()) continue;
    return Status(Code::kTransport, "rank " + std::to_string(rank) + ": " + errors[rank],
                  static_cast<int>(rank));
  }
  return Status::Ok();
}

// Makes the transport among the ranks of a host, over a segment that its first rank creates and all
// map. On failure every rank of the job gets the same error, and `refused` is set if a rank has no
// right to the segment: then they must not talk in another way either.
Status ShareMemory(Bootstrap& bootstrap, const Topology& topology, const WorldOptions& options,
                   TimeNs deadline, std::unique_ptr<Transport>* transport, bool* refused) {
  size_t most = 0;
  for (const std::vector<int>& ranks : topology.ranks_on()) most = std::max(most, ranks.size());
  const ShmSegment::Geometry geometry =
      topology.hosts.size() == 1
          ? ShmSegment::Geometry::For(topology.size)
          : ShmSegment::Geometry::OfHost(topology.local_size, static_cast<int>(most));
  const int host = topology.host_of[static_cast<size_t>(topology.rank)];
  const int first = topology.ranks_on()[static_cast<size_t>(host)][0];
  std::shared_ptr<ShmSegment> segment;
  Status mine;
  std::string name;
  if (bootstrap.rank() == first) {
    mine = ShmSegment::Create(geometry, &segment);
    if (mine.ok()) name = segment->name();
  }
  std::vector<std::string> texts;
  HORORING_RETURN_IF_ERROR(bootstrap.Share(name, deadline, &texts));
  const std::string& created = texts[static_cast<size_t>(first)];
  if (bootstrap.rank() != first && !created.empty()) {
    mine = ShmSegment::Attach(created, geometry, &segment);
  }
  // Before the next exchange of texts: after it, each rank can check whether the others are alive.
  std::unique_ptr<Transport> shared;
  if (segment != nullptr) {
    shared = std::make_unique<ShmTransport>(segment, topology.local_rank, options.spin_ns);
  }
  const char mark = mine.code() == Code::kInvalidArgument ? '!' : ' ';
  const Status met = bootstrap.Share(mine.ok() ? "" : mark + mine.message(), deadline, &texts);
  if (segment != nullptr) segment->Unlink();
  HORORING_RETURN_IF_ERROR(met);
  for (std::string& text : texts) {
    *refused = *refused || text[0] == '!';
    text.erase(0, 1);
  }
  HORORING_RETURN_IF_ERROR(FirstOf(texts));
  *transport = std::move(shared);
  return Status::Ok();
}

bool IsKnown(const std::string& transport) {
  return transport == "auto" || transport == "shm" || transport == "mpi" || transport == "tcp";
}

Status UnknownTransport(const std::string& transport) {
  return Status(Code::kInvalidArgument,
                "HORORING_TRANSPORT=" + transport + " is unknown; choose auto, shm, tcp or mpi");
}

// All ranks must ask for the same transport, or they would wait for one another forever.
Status CheckSameOptions(const std::vector<std::string>& options_texts) {
  std::string listed;
  bool differ = false;
  for (size_t rank = 0; rank < options_texts.size(); ++rank) {
    differ = differ || options_texts[rank] != options_texts[0];
    listed += (rank == 0 ? "rank " : "; rank ") + std::to_string(rank) + ": " + options_texts[rank];
  }
  if (!differ) return IsKnown(options_texts[0]) ? Status::Ok() : UnknownTransport(options_texts[0]);
  return Status(Code::kMismatch, "HORORING_TRANSPORT differs between the ranks (" + listed +
                                     "); set the same value on every rank");
}

// MPI does not report the end of a process, but this host can see it. `mpi` may be null.
Status WatchLocalProcesses(Bootstrap& bootstrap, const std::vector<std::string>& host_ids,
                           TimeNs deadline, Transport* mpi,
                           std::vector<ProcessIdentity>* local_processes) {
  const ProcessIdentity self = ThisProcess();
  std::vector<std::string> texts;
  HORORING_RETURN_IF_ERROR(bootstrap.Share(
      std::to_string(self.pid) + " " + std::to_string(self.start_time), deadline, &texts));
  std::vector<ProcessIdentity> processes(texts.size());
  std::vector<bool> here;
  local_processes->assign(texts.size(), {});
  const size_t own = static_cast<size_t>(bootstrap.rank());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream(texts[rank]) >> processes[rank].pid >> processes[rank].start_time;
    here.push_back(host_ids[rank] == host_ids[own] && rank != own);
    if (here.back()) (*local_processes)[rank] = processes[rank];
  }
  if (mpi != nullptr) mpi->WatchProcesses(std::move(processes), std::move(here));
  return Status::Ok();
}

// Connects all ranks over TCP; every rank gets the same error.
Status MakeTcp(Bootstrap& bootstrap, const Topology& topology, const WorldOptions& options,
               TimeNs deadline, std::unique_ptr<Transport>* transport) {
  const std::string host = topology.hosts.size() == 1 ? "127.0.0.1" : options.address;
  Socket listener;
  std::string address;
  const Status mine =
      host.empty() ? Status(Code::kTransport,
                            "it has no address that other hosts reach; set HORORING_INTERFACE")
                   : Listen(host, &listener, &address);
  std::vector<std::string> addresses, errors, keys;
  HORORING_RETURN_IF_ERROR(bootstrap.Share(address, deadline, &addresses));
  HORORING_RETURN_IF_ERROR(bootstrap.Share(mine.message(), deadline, &errors));
  HORORING_RETURN_IF_ERROR(FirstOf(errors));
  TcpOptions tcp;
  tcp.key = options.key;
  if (tcp.key.empty()) {  // a process that can read this can read everything else
    HORORING_RETURN_IF_ERROR(bootstrap.Share(RandomKey(), deadline, &keys));
    tcp.key = keys[0];
  }
  tcp.spin_ns = options.spin_ns;
  // They are for the usual limit of all waits, and follow it.
  constexpr TimeNs kUsual = 300 * kSecond;
  for (TimeNs* each : {&tcp.silent_ns, &tcp.connect_ns}) {
    *each = options.timeout_ns == kForever ? kForever
                                           : std::max(std::min(*each, options.timeout_ns),
                                                      options.timeout_ns / (kUsual / *each));
  }
  if (options.silent_ns > 0) tcp.silent_ns = options.silent_ns;
  tcp.unreachable = options.unreachable;
  for (const int each : topology.host_of) {
    tcp.here.push_back(each == topology.host_of[static_cast<size_t>(topology.rank)]);
  }
  return TcpTransport::Make(topology.rank, std::move(addresses), std::move(listener), tcp,
                            transport);
}

// Whether MPI connects the hosts: the user wants it, or all have a network where it beats TCP.
Status ChooseMpi(Bootstrap& bootstrap, const WorldOptions& options, TimeNs deadline, bool* chosen,
                 std::string* why) {
  *why = "HORORING_TRANSPORT says so";
  *chosen = options.transport == "mpi";
  if (options.transport != "auto") return Status::Ok();
  std::vector<std::string> fabrics;
  HORORING_RETURN_IF_ERROR(bootstrap.Share(options.fabric, deadline, &fabrics));
  const auto none = std::find(fabrics.begin(), fabrics.end(), "");
  *chosen = none == fabrics.end();
  *why = *chosen ? "all hosts have a network for it, such as " + fabrics[0]
                 : "rank " + std::to_string(none - fabrics.begin()) +
                       " has no network that MPI uses better; HORORING_TRANSPORT=mpi chooses MPI";
  return Status::Ok();
}

// For ranks that find one another through `bootstrap`; `over_mpi` is null unless that is MPI.
Status MakeWorld(Bootstrap& bootstrap, const WorldOptions& options, TimeNs deadline,
                 std::unique_ptr<Transport> over_mpi, World* world) {
  const std::string& wish = options.transport;
  // The rest depends only on data that all ranks have, so they make the same decisions.
  std::vector<std::string> host_ids, options_texts;
  HORORING_RETURN_IF_ERROR(bootstrap.Share(HostId(), deadline, &host_ids));
  HORORING_RETURN_IF_ERROR(bootstrap.Share(wish, deadline, &options_texts));
  HORORING_RETURN_IF_ERROR(CheckSameOptions(options_texts));
  HORORING_RETURN_IF_ERROR(
      WatchLocalProcesses(bootstrap, host_ids, deadline, over_mpi.get(), &world->local_processes));
  const Topology topology = world->topology = MakeTopology(bootstrap.rank(), host_ids);
  const bool one_host = topology.hosts.size() == 1;
  if (wish == "mpi" && over_mpi == nullptr) {
    return Status(Code::kInvalidArgument,
                  "HORORING_TRANSPORT=mpi, but MPI did not start this job; use auto, or mpirun");
  }
  if (wish == "mpi" && one_host) {
    world->transport = std::move(over_mpi);
    return Status::Ok();
  }
  if (topology.size == 1) {
    world->transport = std::move(MakeInprocWorld(1, options.spin_ns)[0]);
    world->bootstrap = std::move(over_mpi);
    return Status::Ok();
  }
  if (wish == "shm" && !one_host) {
    std::string hosts;
    for (const std::string& host : topology.hosts) hosts += (hosts.empty() ? "" : ", ") + host;
    return Status(Code::kInvalidArgument,
                  "HORORING_TRANSPORT=shm, but the ranks do not share memory; they are on: " +
                      hosts + "; use auto, tcp or mpi");
  }
  bool by_mpi = over_mpi != nullptr && wish == "auto";  // on one host, without shared memory
  if (over_mpi != nullptr && !one_host) {
    HORORING_RETURN_IF_ERROR(ChooseMpi(bootstrap, options, deadline, &by_mpi, &world->why));
  }
  const bool some_share = topology.hosts.size() < host_ids.size();
  if (some_share && !(one_host && wish == "tcp")) {
    std::unique_ptr<Transport>& shared = one_host ? world->transport : world->local;
    bool refused = false;
    const Status status = ShareMemory(bootstrap, topology, options, deadline, &shared, &refused);
    if (!status.ok() && (refused || wish == "shm" || !bootstrap.CheckPeers().ok())) return status;
    if (!status.ok()) {
      world->note = "ranks of one host talk through " + std::string(by_mpi ? "MPI" : "TCP") +
                    ", which is slower there than shared memory: " + status.message();
    } else if (one_host) {
      world->bootstrap = std::move(over_mpi);
      return Status::Ok();
    }
  }
  if (by_mpi) {
    world->transport = std::move(over_mpi);
  } else {
    HORORING_RETURN_IF_ERROR(MakeTcp(bootstrap, topology, options, deadline, &world->transport));
    world->bootstrap = std::move(over_mpi);
  }
  if (world->local != nullptr) RouteControl(options, world);
  return Status::Ok();
}

}  // namespace

Topology MakeTopology(int rank, const std::vector<std::string>& host_ids) {
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(host_ids.size());
  std::map<std::string, int> numbers;
  for (const std::string& id : host_ids) {
    const auto [host, added] = numbers.try_emplace(id, static_cast<int>(numbers.size()));
    if (added) topology.hosts.push_back(id.substr(0, id.find('|')));
    topology.host_of.push_back(host->second);
  }
  const std::vector<std::vector<int>> ranks_on = topology.ranks_on();
  const size_t my_host = static_cast<size_t>(topology.host_of[static_cast<size_t>(rank)]);
  const std::vector<int>& here = ranks_on[my_host];
  topology.local_rank = static_cast<int>(std::find(here.begin(), here.end(), rank) - here.begin());
  topology.local_size = static_cast<int>(here.size());
  topology.cross_size = 0;
  for (size_t host = 0; host < ranks_on.size(); ++host) {
    if (host == my_host) topology.cross_rank = topology.cross_size;
    if (static_cast<int>(ranks_on[host].size()) > topology.local_rank) ++topology.cross_size;
  }
  topology.homogeneous =
      std::all_of(ranks_on.begin(), ranks_on.end(),
                  [&](const std::vector<int>& ranks) { return ranks.size() == here.size(); });
  return topology;
}

std::vector<std::vector<int>> Topology::ranks_on() const {
  std::vector<std::vector<int>> ranks(hosts.size());
  for (size_t each = 0; each < host_of.size(); ++each) {
    ranks[static_cast<size_t>(host_of[each])].push_back(static_cast<int>(each));
  }
  return ranks;
}

void RouteControl(const WorldOptions& options, World* world) {
  const Topology& topology = world->topology;
  const int host = topology.host_of[static_cast<size_t>(topology.rank)];
  world->transport = std::make_unique<RoutedTransport>(
      std::move(world->transport), dynamic_cast<ShmTransport&>(*world->local),
      topology.ranks_on()[static_cast<size_t>(host)], options.spin_ns);
}

Status MakeWorld(const WorldOptions& options, World* world) {
  if (!options.launched) {
    if (!IsKnown(options.transport)) return UnknownTransport(options.transport);
    world->transport = std::move(MakeInprocWorld(1, options.spin_ns)[0]);
    world->topology = MakeTopology(0, {HostId()});
    return Status::Ok();
  }
  const TimeNs deadline = After(NowNs(), options.timeout_ns);
  std::unique_ptr<Transport> over_mpi;
  if (options.bootstrap != nullptr) {
    return MakeWorld(*options.bootstrap, options, deadline, std::move(over_mpi), world);
  }
  const MpiFunctions* mpi = nullptr;
  HORORING_RETURN_IF_ERROR(LoadMpi(options.mpi_library_path, &mpi));
  Transport* opened = nullptr;
  HORORING_RETURN_IF_ERROR(mpi->open(options.mpi, options.spin_ns, deadline, &opened));
  over_mpi.reset(opened);
  TransportBootstrap bootstrap(opened);
  return MakeWorld(bootstrap, options, deadline, std::move(over_mpi), world);
}

std::vector<std::unique_ptr<Transport>> MakeInprocWorld(int size, TimeNs spin_ns) {
  const std::shared_ptr<ShmSegment> segment = ShmSegment::OnHeap(ShmSegment::Geometry::For(size));
  std::vector<std::unique_ptr<Transport>> world;
  for (int rank = 0; rank < size; ++rank) {
    world.push_back(std::make_unique<ShmTransport>(segment, rank, spin_ns));
  }
  return world;
}

void FinalizeMpi() {
  std::unique_lock<std::mutex> lock(mpi_mutex);
  const MpiFunctions* const mpi = loaded_mpi;
  lock.unlock();
  if (mpi != nullptr) mpi->finalize();
}

Status DescribeMpi(const std::string& mpi_library_path, MpiInfo* info) {
  const MpiFunctions* mpi = nullptr;
  HORORING_RETURN_IF_ERROR(LoadMpi(mpi_library_path, &mpi));
  mpi->describe(info);
  return Status::Ok();
}

}  // namespace hororing
