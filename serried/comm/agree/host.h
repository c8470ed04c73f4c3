// Which machine this process runs on, how its processes are, and who listens where.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace serried::detail {

/// Equal for two processes exactly if they share kernel, host name and pid namespace, so that one can map the other's
/// memory.
std::string host_identity();

/// Whether no process of this host has that number any more, or only what its parent has yet to reap.
bool process_has_ended(int pid);

/// "; rank 1 (pid 1234) is stopped: SIGCONT lets it go on", given each rank's process on this host (0: not known);
/// nothing where none is stopped: such ranks are there, but do not come.
std::string stopped_text(const std::vector<int>& pids);

/// Waits until something listens at the address and says where, of the several addresses a name may have; "" if nothing
/// does within `timeout`. Opens no lasting connection. c10d's own client prints a warning and waits about half a second
/// after each refusal; this asks again in milliseconds.
std::string wait_for_listener(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

/// The address of this machine that packets to `host`, a name or an address, leave from; "" where there is no way.
/// Sends nothing.
std::string address_towards(const std::string& host);

/// Whether only this machine reaches `address`: "127.0.1.1", "::1".
bool is_loopback(const std::string& address);

/// Whether something listens at the address now; `timeout` bounds the one attempt.
bool is_listening(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

}  // namespace serried::detail
