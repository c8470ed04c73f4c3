// Several hosts on one machine, for tests of what happens between hosts and when one is lost.
#pragma once

#include <string>
#include <vector>

#include "serried/launch/fd.h"
#include "tests/process/command.h"

namespace serried::testing {

struct HostsOptions {
  bool trap = false;  // a host's own name resolves to 127.0.1.1, as Debian has it
};

/// What becomes of frames on a link.
struct BadLink {
  int loss_percent = 0;
  int reorder_percent = 0;  // of frames that overtake others
  int delay_ms = 0;
  int megabits = 0;  // per second; 0: no limit
};

/// Hosts that only TCP connects, made of namespaces by hosts.sh, which says what each word does. They end with the
/// object, or with the process if it is killed. A word that fails fails the test.
///     Hosts hosts(2);
///     Command job = hosts.serried(1, {"run", "-n", "2", "./train"});
///     hosts.freeze(1);
class Hosts {
 public:
  explicit Hosts(int count, const HostsOptions& options = {});
  ~Hosts();
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  std::string name(int host) const;
  std::string address(int host) const;

  /// Starts `serried <arguments>` in a host. Its signals go to the process outside: only SIGKILL reaches the command.
  Command serried(int host, std::vector<std::string> arguments, const std::vector<std::string>& environment = {}) const;

  /// Starts any program in a host.
  Command start(int host, std::vector<std::string> words) const;

  /// Runs any program in a host to its end.
  Result run(int host, std::vector<std::string> words) const;

  void cut(int host) const { tell({"cut", std::to_string(host)}); }
  void cut(int host, int other) const { tell({"cut", std::to_string(host), std::to_string(other)}); }
  void heal(int host) const { tell({"heal", std::to_string(host)}); }
  void heal(int host, int other) const { tell({"heal", std::to_string(host), std::to_string(other)}); }
  void freeze(int host) const { tell({"freeze", std::to_string(host)}); }
  void thaw(int host) const { tell({"thaw", std::to_string(host)}); }
  void kill(int host) const { tell({"kill", std::to_string(host)}); }
  void off(int host) const { tell({"off", std::to_string(host)}); }
  void on(int host) const { tell({"on", std::to_string(host)}); }
  void link(int host, int megabits) const { tell({"link", std::to_string(host), "rate=" + std::to_string(megabits)}); }
  void link(int host) const { tell({"link", std::to_string(host)}); }

  /// Between hosts 0 and 1, from now on.
  void make_bad(const BadLink& link) const;

  /// Ends all of it before the destructor does.
  void down() const { tell({"down"}); }

  /// The process whose end is that of all hosts.
  pid_t keeper() const { return keeper_; }

 private:
  std::string tell(std::vector<std::string> words) const;

  pid_t keeper_ = 0;
  launch::Fd held_;  // the keeper reads the other end
};

/// Why there can be no hosts here; empty if there can.
std::string why_no_hosts();

}  // namespace serried::testing
