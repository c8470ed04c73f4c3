// One attempt to run the job, and the environment each of its ranks gets.
#pragma once

#include <string>
#include <vector>

namespace serried::launch {

/// Under --keep-going: a process of a node, by a number that is used once, and its place in a table of ranks.
struct Seat {
  int number = 0;
  int rank = 0;
  bool fresh = true;  // it is to be started
  bool operator==(const Seat&) const = default;
};

/// This node's part of one attempt, or of one table of ranks.
struct Assignment {
  int attempt = 0;  // the generation: 0, then one more each time that all ranks start again
  int max_restarts = 0;
  int num_local = 1;
  int first_rank = 0;  // of this node
  int world_size = 1;
  int node_rank = 0;
  int num_nodes = 1;
  std::string master_host = "127.0.0.1";  // on its way to a launcher, "": that of the rendezvous
  int master_port = 0;
  std::string run_id = {};
  std::string job_secret = {};   // known to the job's ranks and launchers only
  std::string news = {};         // why all ranks start again
  bool keep_going = false;       // ranks that use Elastic live on when others are lost
  std::vector<Seat> seats = {};  // then: those of this node, by rank
  std::string mark = {};         // then: of this launcher, in the environments of all its ranks
  int listen_fd = -1;            // already bound to master_port; for rank 0 to inherit
  // --keep-going, for a leader that may have to be told of the job by those that it leads:
  int restarts = 0;         // that the job has used up
  int next_seat = 0;        // the number of the next process
  int num_with_leader = 0;  // ranks of this table that are the leader's own
};

/// `inherited` ("NAME=value" texts) with the variables of one rank put in: those torchrun sets, so that any
/// c10d program understands them, SERRIED_JOB_SECRET, SERRIED_LAUNCHER_FD for the rank's end of its line, and
/// SERRIED_MASTER_LISTEN_FD for rank 0 where the launcher opened the port.
std::vector<std::string> rank_environment(const Assignment& assignment, int local_rank,
                                          const std::vector<std::string>& inherited, int line_fd = -1);

/// What the environments of this node's ranks in this attempt have in common and no other process has, save those that
/// ranks start.
std::vector<std::string> mark_of(const Assignment& assignment);

/// This process's environment as "NAME=value" texts.
std::vector<std::string> inherited_environment();

}  // namespace serried::launch
