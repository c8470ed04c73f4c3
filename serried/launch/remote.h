// One launcher on another host, as the ssh that started it shows it: what it is told, what it prints, how it ends.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "serried/launch/hostfile.h"
#include "serried/launch/output.h"
#include "serried/launch/spawn.h"
#include "serried/launch/wire.h"

namespace serried::launch {

class Remote {
 public:
  /// Starts `ssh` (its words) with `command` for that host's shell.
  Remote(Host host, const std::vector<std::string>& ssh, const std::string& command, Screen& screen);
  /// Kills the ssh.
  ~Remote();
  Remote(const Remote&) = delete;
  Remote& operator=(const Remote&) = delete;

  const Host& host() const { return host_; }

  void watch(std::vector<Watch>& watches);
  void tell(const Message& message);
  /// Ends its stdin: a launcher that loses who started it ends its ranks.
  void let_go() { input_.reset(); }

  void kill();

  /// Takes note of its end; call it on SIGCHLD.
  void look();
  bool ended() const { return exit_code_.has_value(); }
  int exit_code() const { return *exit_code_; }

  /// What the launcher there said first: its version; empty until then.
  const std::string& version() const { return version_; }
  /// Where it listens, if it is node 0; 0 until it has said so.
  int port() const { return port_; }

  /// Why there is no launcher, or none any more: for one that has ended before it was there, or without a word of its
  /// own. LaunchError's two parts.
  struct Failure {
    std::string what;
    std::string fix;
  };
  std::optional<Failure> failure() const;

 private:
  bool pump(Fd& fd, Stream stream, LineSplitter& lines);
  void hear_line(Stream stream, std::string_view line);

  Host host_;
  std::string name_of_ssh_;
  Screen& screen_;
  std::optional<Connection> input_;
  Child child_;
  LineSplitter out_;
  LineSplitter err_;
  std::string version_;
  std::string last_words_;
  int port_ = 0;
  std::optional<int> exit_code_;
};

}  // namespace serried::launch
