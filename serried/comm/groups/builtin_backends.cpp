// The table of built-in backends, and "auto", which chooses one of them.
#include "serried/comm/groups/builtin_backends.h"

#include <algorithm>
#include <array>

#include "serried/base/log.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/backends/fake/fake.h"
#include "serried/comm/backends/gloo/gloo.h"
#include "serried/comm/backends/mpi/mpi.h"
#include "serried/comm/backends/nccl/nccl.h"
#include "serried/comm/backends/shm/shm.h"
#include "serried/comm/backends/threads/threads.h"

namespace serried::detail {
namespace {

std::string works_everywhere() {
  return "";
}

// Every rank sees the same texts, so all choose alike; a rank that cannot use shared memory says so in its text.
Group make_auto_group(const FactoryArgs& args) {
  const std::string unavailable = why_shm_unavailable();
  const std::string mine = unavailable.empty() ? host_identity() : "no shm: " + unavailable;
  const std::vector<std::string> hosts =
      exchange({args.store, args.rank, args.world_size, args.timeout}, "new_group", "auto/host", mine);
  const bool one_host = std::all_of(hosts.begin(), hosts.end(), [&](const std::string& h) { return h == hosts[0]; });
  const bool share_memory = one_host && unavailable.empty();
  log::line(log::Topic::comm, "auto takes ", share_memory ? "shm" : "gloo", " for ", args.name, ": ",
            !unavailable.empty() ? unavailable
            : one_host           ? "all ranks share this host"
                                 : "ranks are on several hosts");
  return share_memory ? make_shm_group(args) : make_gloo_group(args);
}

constexpr std::array kBuiltins{
    BuiltinBackend{"auto", make_auto_group, works_everywhere},
    BuiltinBackend{"fake", make_fake_group, works_everywhere},
    BuiltinBackend{"gloo", make_gloo_group, works_everywhere},
    BuiltinBackend{"mpi", make_mpi_group, why_mpi_unavailable},
    BuiltinBackend{"nccl", make_nccl_group, why_nccl_unavailable},
    BuiltinBackend{"shm", make_shm_group, why_shm_unavailable},
    BuiltinBackend{"threads", make_threads_group, works_everywhere},
};

}  // namespace

std::span<const BuiltinBackend> builtin_backends() {
  return kBuiltins;
}

}  // namespace serried::detail
