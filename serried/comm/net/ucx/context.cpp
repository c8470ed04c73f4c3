// What is set otherwise than UCX sets it, and why.
#include "serried/comm/net/ucx/context.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "serried/base/error.h"
#include "serried/base/fork.h"

namespace serried::net {
namespace {

bool user_sets(const std::string& name) {
  return std::getenv(("UCX_" + name).c_str()) != nullptr;
}

/// What is of one transport has its name in front as a variable, UCX_TCP_RX_SEG_SIZE, and not here: UCX takes a name
/// that it does not know for fine, and lets it be.
void set(ucp_config_t* config, const char* name, const std::string& value, const std::string& transport = "") {
  if (user_sets(transport + name) || value.empty()) return;
  check_ucx(ucp_config_modify(config, name, value.c_str()), name);
}

std::string text_of(const sockaddr* address) {
  std::array<char, NI_MAXHOST> name{};
  const socklen_t size = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  ::getnameinfo(address, size, name.data(), name.size(), nullptr, 0, NI_NUMERICHOST);
  return name.data();
}

/// Whether UCX has found any way to other hosts. It only prints which, and takes a device that is not there for none.
bool has_network(ucp_context_h context) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const out = ::open_memstream(&text, &size);
  if (out == nullptr) return true;
  ucp_context_print_info(context, out);
  std::fclose(out);
  const std::unique_ptr<char, decltype(&std::free)> owner(text, std::free);
  std::istringstream lines(std::string(text, size));
  for (std::string line; std::getline(lines, line);) {
    if (line.find(" resource ") != std::string::npos && line.find(" self/") == std::string::npos) return true;
  }
  return false;
}

std::string names_of_devices() {
  std::string names;
  struct if_nameindex* const all = ::if_nameindex();
  for (const struct if_nameindex* one = all; one != nullptr && one->if_name != nullptr; ++one) {
    names += (names.empty() ? "" : ", ") + std::string(one->if_name);
  }
  if (all != nullptr) ::if_freenameindex(all);
  return names;
}

}  // namespace

void check_ucx(ucs_status_t status, const char* what) {
  if (status == UCS_OK) return;
  raise<c10::DistBackendError>({"new_group", c10::str("UCX: ", what, ": ", ucs_status_string(status)),
                                "see what UCX_LOG_LEVEL=warn prints; UCX_NET_DEVICES names the devices to use"});
}

std::string device_of_address(const std::string& address) {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, ::freeifaddrs);
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    const sockaddr* its = entry->ifa_addr;
    if (its == nullptr || (its->sa_family != AF_INET && its->sa_family != AF_INET6)) continue;
    const std::string name = entry->ifa_name;
    if (text_of(its) == address) return name.substr(0, name.find(':'));  // "eth0:1" is a second address of eth0
  }
  return "";
}

UcxContext::UcxContext(const std::string& device) {
  ucp_config_t* config = nullptr;
  check_ucx(ucp_config_read(nullptr, nullptr, &config), "its settings");
  const std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)> owner(config, ucp_config_release);
  set(config, "NET_DEVICES", device);
  // What is registered with a fabric has to be forgotten when it is unmapped, which nobody tells: see load_ucx.cpp.
  if (!user_sets("NET_DEVICES")) set(config, "RCACHE_ENABLE", "n");
  // Ranks of one host have memory of their own to share, and a killed rank would leave UCX's behind.
  set(config, "TLS", "^sm");
  // By rendezvous the answer to a request waits in the one stream behind our own data.
  set(config, "RNDV_THRESH", "inf");
  // The kernel tries for two minutes, which UCX would do 25 times.
  set(config, "MAX_CONN_RETRIES", "1", "TCP_");
  // Chunks of 256 KiB in one piece, with their header.
  set(config, "RX_SEG_SIZE", "272K", "TCP_");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;  // workers of several threads, each under a mutex of its own
  check_ucx(ucp_init(&params, config, &context_), c10::str("device ", device).c_str());
  if (!user_sets("NET_DEVICES") || has_network(context_)) return;
  ucp_cleanup(context_);
  raise<c10::ValueError>(
      {"new_group",
       c10::str("UCX_NET_DEVICES is \"", std::getenv("UCX_NET_DEVICES"), "\", and UCX finds no such device here"),
       c10::str("name devices of this host, of which are ", names_of_devices(), ", or unset it")});
}

UcxContext::~UcxContext() {
  ucp_cleanup(context_);
}

std::shared_ptr<UcxContext> ucx_context(const std::string& address) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<UcxContext>> contexts;  // by device
  const std::string device = device_of_address(address);
  if (device.empty() && !address.empty()) {
    raise<c10::DistBackendError>({"new_group", c10::str("UCX: no device of this host has the address ", address),
                                  "UCX_NET_DEVICES names the devices to use"});
  }
  const std::scoped_lock lock(mutex);
  std::shared_ptr<UcxContext> context = contexts[device].lock();
  if (context == nullptr) contexts[device] = context = make_shared_at_home<UcxContext>(device);
  return context;
}

}  // namespace serried::net
