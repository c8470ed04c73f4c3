// The machine that a job is simulated on: hosts, ranks on them, and what moving and adding bytes takes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace serried::simulation {

/// A number that was measured, with an interval that holds it; or one that somebody wrote.
struct Fitted {
  double value = 0;
  double low = 0;
  double high = 0;

  static Fitted exactly(double value) { return {value, value, value}; }
  bool has_interval() const { return low < high; }
  bool operator==(const Fitted&) const = default;
};

/// The memory of a host, which its ranks share.
struct MemoryLevel {
  Fitted alpha_us;           // of a step: until all ranks of the host have seen each other
  Fitted beta_ns_per_byte;   // copied by any of its ranks
  Fitted gamma_ns_per_byte;  // added by one rank
  bool operator==(const MemoryLevel&) const = default;
};

/// One direction of a host's network interface.
struct NicLevel {
  Fitted alpha_us;  // of a step
  Fitted beta_ns_per_byte;
  Fitted message_us;  // of each message, which holds the interface
  bool operator==(const NicLevel&) const = default;
};

/// What joins `hosts` hosts to all others.
struct Uplink {
  int64_t hosts = 0;
  double oversubscription = 1;  // what its hosts may send in all, by what goes through it
  Fitted alpha_us = {};         // more than inside, of a step
  bool operator==(const Uplink&) const = default;
};

/// How long a rank takes for ops: op_us + max(flops * ns_per_flop, bytes * ns_per_byte).
struct Compute {
  Fitted op_us;
  Fitted ns_per_flop;
  Fitted ns_per_byte;  // read and written
  bool operator==(const Compute&) const = default;
};

struct Machine {
  int64_t ranks_per_host = 1;
  int64_t cores_per_host = 0;         // 0: as many as ranks
  std::optional<int64_t> hosts = {};  // none: as many as the ranks need
  MemoryLevel memory;
  NicLevel nic_out, nic_in;
  std::optional<Uplink> uplink = {};
  std::optional<Compute> compute = {};
  double jitter_sigma = 0;  // standard deviation of what a rank computes in a step, by its mean

  int64_t cores() const { return cores_per_host > 0 ? cores_per_host : ranks_per_host; }
  bool operator==(const Machine&) const = default;
};

/// What `to_json` wrote, or somebody else; strictly: all that is there is known, and possible. `name` is that of the
/// file, for the SimulationError that says what is wrong in which line.
Machine parse_machine(std::string_view text, const std::string& name);

/// Hosts of 8 ranks with 25 Gbit/s, 16 of them on an uplink of a third of that: numbers to begin with, not measured.
Machine example_machine();

/// As `parse_machine` of what is in the file.
Machine read_machine(const std::string& path);

/// Text that `parse_machine` takes, with intervals where there are any.
std::string to_json(const Machine& machine);

}  // namespace serried::simulation
