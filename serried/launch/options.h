// What `serried run` was asked to do.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace serried::launch {

using Seconds = std::chrono::duration<double>;

/// A launcher that has waited so long for others says for whom.
inline constexpr Seconds kNoticeAfter{2};

/// So long after the start, and after twice, four times as long, it says which ranks others wait for in new_group.
inline constexpr Seconds kLateAfter{5};

/// "0.3 s"
std::string to_text(Seconds seconds);

class Control;

struct Options {
  std::vector<std::string> command = {};  // the program and its arguments
  int num_ranks = 1;                      // on this node; 0: a leader alone, which `serried rendezvous` is
  int min_nodes = 1;
  int max_nodes = 1;
  int node_rank = -1;           // -1: whoever can listen at the rendezvous is node 0, the others follow as they come
  std::string rendezvous = {};  // host:port of the leader; for several nodes
  int master_port = 0;          // 0: a free port, opened by the launcher and inherited by rank 0
  int max_restarts = 0;         // node 0's value counts
  Seconds grace{5};             // from SIGTERM to SIGKILL
  Seconds join_timeout{300};
  std::string log_dir = {};
  bool says_who_is_late = true;
  Seconds slow_after{5};             // ranks that wait for longer are told of; 0: they are not
  std::string token = {};            // of all launchers of a job on several nodes; see read_token
  bool insecure = false;             // several nodes may do without
  Seconds lost_after{10};            // a node that says nothing for so long is lost
  Seconds last_call{3};              // from the moment that min_nodes are there
  bool reports = true;               // tell what is told on every node, as why the job ends
  std::vector<int> only_ranks = {};  // whose output is shown; none: all
  Control* control = nullptr;        // of a launcher that `serried run --hosts` started
  bool numa = false;                 // bind ranks to the memory nodes of this machine
  bool keep_going = false;           // ranks that use Elastic live on when others are lost; node 0's value counts
  int listen_fd = -1;                // already bound to the rendezvous; node 0 takes it over
  Seconds sit_out{600};              // of a node whose ranks failed 3 times within that time; the leader's value counts
  Seconds rejoin_timeout{300};       // --keep-going: how long ranks live on without a leader; 0: they end with it
};

/// "2" or "2:4" as numbers of nodes; LaunchError if it is neither.
struct NodeRange {
  int min;
  int max;
};
NodeRange parse_nodes(const std::string& text);

/// The way back: "2", "2:4".
std::string range_text(int min_nodes, int max_nodes);

/// LaunchError that says which option is wrong and how to fix it.
void check(const Options& options);

/// The same for what has nothing to do with other nodes.
void check_one_node(const Options& options);

/// The same for a leader without ranks.
void check_leader(const Options& options);

/// "0,4-6" as numbers; LaunchError if it is no list of ranks.
std::vector<int> parse_ranks(const std::string& text);

/// An address as text: "node7:29500", "[::1]:29500".
struct Address {
  std::string host;
  int port = 0;
};

std::string to_text(const Address& address);

/// LaunchError that names `option` if `text` is not host:port.
Address parse_address(const std::string& text, int least_port = 1, const std::string& option = "--rendezvous");

}  // namespace serried::launch
