// UCX in this process: its settings, its devices, its log.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

namespace serried::net {

/// DistBackendError with UCX's own words unless `status` is fine.
void check_ucx(ucs_status_t status, const char* what);

/// The network device that has an address of this host: "eth0" for "10.0.0.7"; "" where none has.
std::string device_of_address(const std::string& address);

class UcxContext {
 public:
  explicit UcxContext(const std::string& device);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  ucp_context_h get() const { return context_; }

 private:
  ucp_context_h context_ = nullptr;
};

/// The one of the process for the device with `address`, for all devices where that is empty; lives as long as somebody
/// has it. Variables UCX_* of the environment come before what is set here.
std::shared_ptr<UcxContext> ucx_context(const std::string& address);

}  // namespace serried::net
