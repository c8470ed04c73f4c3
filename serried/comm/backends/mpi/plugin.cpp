// Options of the mpi backend, the group around it, and the symbol by which the library finds both.
#include "serried/comm/backends/mpi_plugin.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/plugin.h"
#include "serried/base/plugin_abi.h"
#include "serried/comm/backends/mpi/backend.h"

namespace serried {
namespace {

int64_t piece_bytes_option(const BackendOptions& options) {
  const auto found = options.find("piece_bytes");
  if (found == options.end()) return mpi::kPieceBytes;
  constexpr int64_t kLeast = 64;
  if (found->second.isInt() && found->second.toInt() >= kLeast && found->second.toInt() <= mpi::kPieceBytes) {
    return found->second.toInt();
  }
  raise<c10::ValueError>({"new_group", c10::str("backend option \"piece_bytes\" of mpi is ", found->second),
                          c10::str("pass a whole number from ", kLeast, " to ", mpi::kPieceBytes)});
}

Group make_group_on_mpi(const FactoryArgs& args) {
  reject_unknown_options(args, {"piece_bytes"});
  const mpi::MpiOptions options{.timeout = args.timeout, .piece_bytes = piece_bytes_option(args.options)};
  auto backend = c10::make_intrusive<mpi::MpiBackend>(args.store, args.rank, args.world_size, options);
  return make_group(args, backend, c10d::ProcessGroup::BackendType::MPI);
}

const MpiPlugin& plugin() {
  static const MpiPlugin gives{make_group_on_mpi, mpi::why_unavailable};
  return gives;
}

static_assert(std::is_same_v<decltype(&plugin), MpiPluginFunction>);

}  // namespace
}  // namespace serried

extern "C" const serried::detail::PluginSymbol serried_mpi_plugin{serried::detail::kPluginAbi,
                                                                  reinterpret_cast<void*>(&serried::plugin)};
