// Which machine this process runs on, and who listens where.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace serried::detail {

/// Equal for two processes exactly if they share kernel, host name and pid namespace, so that one can map the other's
/// memory.
std::string host_identity();

/// Waits until something listens at the address and says where, of the several addresses a name may have; "" if nothing
/// does within `timeout`. Opens no lasting connection. c10d's own client prints a warning and waits about half a second
/// after each refusal; this asks again in milliseconds.
std::string wait_for_listener(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

/// Whether something listens at the address now; `timeout` bounds the one attempt.
bool is_listening(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

}  // namespace serried::detail
