// Which machine this process runs on, and sockets for the store.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace serried::detail {

/// Equal for two processes exactly if they share kernel, host name and pid namespace, so that one can map the other's
/// memory.
std::string host_identity();

/// Waits until something listens at the address; false if nothing does within `timeout`. Opens no lasting connection.
/// c10d's own client prints a warning and waits about half a second after each refusal; this asks again in
/// milliseconds.
bool wait_for_listener(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

/// Whether something listens at the address now; `timeout` bounds the one attempt.
bool is_listening(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

/// A listening socket on `port` of all local addresses (0: any free port); -1 with errno set where that fails.
int listen_on(uint16_t port);

/// The port that a listening socket has; 0 if `fd` is none.
uint16_t port_of(int fd);

}  // namespace serried::detail
