// The only file that sees gloo's names, and those are stand-ins: it makes the backend and hands it on as a
// c10d::Backend.
#include "serried/comm/backends/gloo/engine.h"

#include <csignal>
#include <cstdlib>
#include <sstream>
#include <vector>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "serried/base/error.h"

namespace serried::gloo {
namespace {

using Engine = c10d::ProcessGroupGloo;
using Devices = decltype(Engine::Options::devices);

// Takes no room in the file; its size in the symbol table is what scripts/check_gloo_layout.py compares with LibTorch.
[[gnu::used]] char serried_gloo_engine_size[sizeof(Engine)];

Devices devices_for_interfaces(const std::string& list, bool lazy) {
  Devices devices;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    if (!name.empty()) devices.push_back(Engine::createDeviceForInterface(name, lazy));
  }
  return devices;
}

Devices make_devices(const EngineOptions& options) {
  const bool lazy = c10d::getDefaultGlooLazyInit();
  if (!options.interface.empty()) return devices_for_interfaces(options.interface, lazy);
  if (!options.hostname.empty()) return {Engine::createDeviceForHostname(options.hostname, lazy)};
  // A variable of gloo's, not of ours: whoever set it means every Gloo of the job.
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  if (interfaces != nullptr && *interfaces != '\0') return devices_for_interfaces(interfaces, lazy);
  if (!options.address.empty()) return {Engine::createDeviceForHostname(options.address, lazy)};
  return {Engine::createDefaultDevice(lazy)};
}

// gloo writes to sockets without MSG_NOSIGNAL: a peer that has closed would end this process by SIGPIPE, silently.
// Ignored, the write fails and the group says who left. A handler of the program's own stays.
void survive_closed_peers() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) != 0) return;
  if ((current.sa_flags & SA_SIGINFO) == 0 && current.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

std::string place_of(const EngineOptions& options) {
  if (!options.interface.empty()) return "interface " + options.interface;
  return options.hostname.empty() ? options.address : options.hostname;
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_engine(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                              const EngineOptions& options) {
  survive_closed_peers();
  auto engine_options = Engine::Options::create(options.timeout);
  engine_options->threads = options.threads;
  try {
    engine_options->devices = make_devices(options);
  } catch (const std::exception& error) {
    raise<c10::ValueError>({"new_group",
                            c10::str("gloo cannot listen on ", place_of(options), ": ", first_line(error.what())),
                            "pass an interface or hostname of this host, or set GLOO_SOCKET_IFNAME"});
  }
  try {
    return c10::make_intrusive<Engine>(store, rank, world_size, engine_options);
  } catch (const std::exception& error) {
    raise<c10::DistBackendError>({"new_group", c10::str("gloo cannot connect the ranks: ", first_line(error.what())),
                                  "check that every rank reaches the others' addresses; the backend options interface "
                                  "and hostname choose the address of this rank"});
  }
}

}  // namespace serried::gloo
