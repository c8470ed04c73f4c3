// Hosts without hosts: ranks that are threads, and wires between threads, or through the loopback device.
#pragma once

#include <memory>
#include <string>

#include "serried/comm/backends/hierarchical/group.h"
#include "tests/support/thread_wire.h"

namespace serried::testing {

/// Which host a rank is on.
struct HostLayout {
  const char* backend;
  int (*host_of)(int rank, int world_size);
};

/// Every rank alone, hosts of two, one rank alone beside a host of all others, hosts whose ranks alternate.
inline constexpr HostLayout kHostLayouts[] = {
    {"hierarchical_alone", [](int rank, int) { return rank; }},
    {"hierarchical_pairs", [](int rank, int) { return rank / 2; }},
    {"hierarchical_uneven", [](int rank, int world_size) { return int(rank + 1 == world_size); }},
    {"hierarchical_mixed", [](int rank, int) { return rank % 2; }},
};

/// A wire of this rank, connected.
std::unique_ptr<ThreadWire> connected_thread_wire(const shm::ConnectArgs& args);

/// The same of any kind of `make_wires`; of the kind that SERRIED_TEST_WIRE names, or "threads".
std::unique_ptr<net::Wire> connected_wire(const shm::ConnectArgs& args, const std::string& kind);
std::unique_ptr<net::Wire> connected_wire(const shm::ConnectArgs& args);

Group make_group_of_hosts(const FactoryArgs& args, const HostLayout& layout);

/// While it lives, new_group knows the backends of kHostLayouts.
class HostLayoutBackends {
 public:
  HostLayoutBackends();
  ~HostLayoutBackends();
};

}  // namespace serried::testing
