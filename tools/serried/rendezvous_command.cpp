// Options of `serried rendezvous`: those of `serried run` that the leader decides.
#include "tools/serried/rendezvous_command.h"

#include <CLI/CLI.hpp>

#include "serried/launch/lead.h"
#include "serried/launch/token.h"

namespace serried::tools {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  serried rendezvous --listen head:29500 --nnodes 2:4 --max-restarts 3      (on head)\n"
    "  serried run --nnodes 2:4 --rendezvous head:29500 -n 4 ./train             (on every node)\n"
    "\n"
    "Ranks are on other machines, or beside it, so any node may be lost. It leads one job, and ends with its code.\n"
    "It needs the token of the nodes: SERRIED_TOKEN_FILE=FILE.\n";

}  // namespace

RendezvousCommand::RendezvousCommand(CLI::App& app)
    : command_(app.add_subcommand(kName, "Lead a job without having ranks, on a machine that stays.")),
      grace_seconds_(options_.grace.count()),
      join_seconds_(options_.join_timeout.count()),
      last_call_seconds_(options_.last_call.count()),
      lost_seconds_(options_.lost_after.count()),
      sit_out_seconds_(options_.sit_out.count()),
      slow_seconds_(options_.slow_after.count()) {
  CLI::App& it = *command_;
  it.footer(kExamples);
  it.add_option("--listen", options_.rendezvous, "host:port of this machine where the nodes meet");
  it.add_option("--nnodes", nodes_, "Nodes of the job, or min:max; the same on each");
  it.add_option("--max-restarts", options_.max_restarts, "How often all ranks start again after one failed")
      ->capture_default_str();
  it.add_flag("--keep-going", options_.keep_going, "Ranks that use serried::Elastic live on when others are lost");
  it.add_option("--grace", grace_seconds_, "Seconds that the nodes' ranks get to end")->capture_default_str();
  it.add_option("--join-timeout", join_seconds_, "Seconds to wait for the nodes")->capture_default_str();
  it.add_option("--last-call", last_call_seconds_, "Seconds to wait for more nodes when min of min:max are there")
      ->capture_default_str();
  it.add_option("--lost-after", lost_seconds_, "Seconds of silence after which a node is lost; the same on all nodes")
      ->capture_default_str();
  it.add_option("--sit-out", sit_out_seconds_,
                "Seconds that a node sits out whose ranks failed 3 times within them; 0: never")
      ->capture_default_str();
  it.add_option("--slow-after", slow_seconds_,
                "Seconds after which ranks that wait for others in a call are told of; 0: they are not")
      ->capture_default_str();
  it.add_flag("--insecure", options_.insecure, "Let nodes meet without a token");
}

bool RendezvousCommand::chosen() const {
  return command_->parsed();
}

int RendezvousCommand::execute() {
  options_.grace = launch::Seconds(grace_seconds_);
  options_.join_timeout = launch::Seconds(join_seconds_);
  options_.last_call = launch::Seconds(last_call_seconds_);
  options_.lost_after = launch::Seconds(lost_seconds_);
  options_.sit_out = launch::Seconds(sit_out_seconds_);
  options_.slow_after = launch::Seconds(slow_seconds_);
  const launch::NodeRange nodes = launch::parse_nodes(nodes_);
  options_.min_nodes = nodes.min;
  options_.max_nodes = nodes.max;
  options_.token = launch::read_token();
  return launch::lead(options_);
}

}  // namespace serried::tools
