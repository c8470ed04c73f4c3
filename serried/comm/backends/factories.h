// The functions that make groups of the built-in backends, and say where one does not work.
#pragma once

#include "serried/comm/groups/group.h"

namespace serried {

/// A group of any size without peers: shapes are checked, nothing moves, values mean nothing. Plans a run of thousands
/// of ranks in one process. Option "error_on_collective" (bool): every call raises.
///     Group g = new_group("fake", {.rank = 0, .world_size = 4096});
Group make_fake_group(const FactoryArgs& args);

/// c10d's Gloo with the watch around it. Options: "threads" (int, 2), "interface" (a network interface), "hostname" (a
/// name or address of this host). Without an address it takes loopback where all ranks share a host, else
/// GLOO_SOCKET_IFNAME or the host's own name.
Group make_gloo_group(const FactoryArgs& args);

/// MPI's collectives with the watch around them, for ranks that mpirun has started; from the plug-in libserried_mpi.so.
/// NotImplementedError where that is not there or does not fit. Option: "piece_bytes" (int, 2^30): no call of MPI is
/// asked for more.
Group make_mpi_group(const FactoryArgs& args);
std::string why_mpi_unavailable();

/// c10d's NCCL for args.device, connected before it returns. NotImplementedError where LibTorch lacks NCCL.
Group make_nccl_group(const FactoryArgs& args);
std::string why_nccl_unavailable();

/// Ranks of one host talk through memory they share. Options: "heap_mb" (int, SERRIED_SHM_HEAP_MB): address space per
/// rank for `allocateTensor`; memory is taken on use. "always_stage" (bool, false): copy through the segment also where
/// ranks are threads that could reach each other.
Group make_shm_group(const FactoryArgs& args);
std::string why_shm_unavailable();

/// Ranks of one host talk as in shm, hosts through messages (net/make_wire.h). All ranks get the same bits, whatever
/// the size. Options: those of shm; "order" (text, SERRIED_ORDER): "ranks" adds as ranks of one host do, "hosts" the
/// sums of hosts, with fewer bytes between more than two hosts; "wire" (text, "auto"): "gloo" where UCX is not wanted;
/// "host" (text), for tests: ranks that name different ones do as if they could not share memory.
Group make_hierarchical_group(const FactoryArgs& args);
/// Every rank has a part of each host's memory, and a link to every rank of other hosts.
inline constexpr int kMostHierarchicalRanks = 512;

/// Ranks are threads of one process: shm's engine, where every rank can reach every tensor of its peers, so that
/// nothing is staged.
Group make_threads_group(const FactoryArgs& args);

}  // namespace serried
