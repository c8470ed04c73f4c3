// Options of `serried run`. Everything from the program's name on belongs to the program.
#include "tools/serried/run_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>

#include <iterator>
#include <sstream>

#include "serried/launch/error.h"
#include "serried/launch/run.h"
#include "serried/launch/slurm.h"
#include "serried/launch/token.h"
#include "serried/launch/torchrun.h"
#include "tools/serried/progress_option.h"

namespace serried::tools {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  serried run -n 4 ./train --steps 100\n"
    "  serried run -n 4 --max-restarts 3 --log-dir logs ./train\n"
    "  serried run --nnodes 2 --rendezvous node0:29500 -n 4 ./train   (on both nodes)\n"
    "  serried run --hosts node0:4,node1:4 ./train                    (on one, by ssh)\n"
    "  srun --ntasks-per-node=1 serried run -n 4 ./train              (Slurm)\n"
    "\n"
    "Several nodes need a token: serried token > FILE, on every node SERRIED_TOKEN_FILE=FILE.\n"
    "Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT.\n"
    "The first rank that fails ends the others; its exit code, or 128 + its signal, is that of the command.\n";

// The program and its arguments are no options, so the generated usage line lacks them.
std::string help_text(const CLI::App* app, std::string name, CLI::AppFormatMode mode) {
  std::string text = PlainFlags().make_help(app, std::move(name), mode);
  const std::string generated = "[OPTIONS]";
  const size_t at = text.find(generated);
  if (at != std::string::npos) text.replace(at, generated.size(), "[options] [--] program [arguments]");
  return text;
}

}  // namespace

RunCommand::RunCommand(CLI::App& app)
    : command_(app.add_subcommand(kName, "Start a program as several ranks and watch over them.")),
      grace_seconds_(options_.grace.count()),
      join_seconds_(options_.join_timeout.count()),
      last_call_seconds_(options_.last_call.count()),
      lost_seconds_(options_.lost_after.count()),
      rejoin_seconds_(options_.rejoin_timeout.count()),
      sit_out_seconds_(options_.sit_out.count()),
      slow_seconds_(options_.slow_after.count()) {
  CLI::App& run = *command_;
  run.prefix_command();
  run.footer(kExamples);
  // Names of torchrun's for the same thing stand behind ours, also with its underscores.
  run.add_option("-n,--nproc,--nproc-per-node,--nproc_per_node", options_.num_ranks,
                 "Ranks on this node; auto: one for each core")
      ->capture_default_str()
      ->transform([this](const std::string& text) {
        fleet_.counts_cores = text == "auto" || text == "cpu";
        return launch::number_of_ranks(text);
      });
  run.add_option("--nnodes", nodes_, "Nodes of the job, or min:max; start the same command on each")
      ->capture_default_str();
  run.add_option("--node-rank,--node_rank", options_.node_rank,
                 "Which node this is, where the order of ranks matters; ranks are numbered in node order");
  run.add_option("--rendezvous,--rdzv-endpoint,--rdzv_endpoint", options_.rendezvous,
                 "host:port where node 0's launcher meets the others");
  run.add_option("--max-restarts,--max_restarts", options_.max_restarts,
                 "How often all ranks start again after one failed; node 0's value counts")
      ->capture_default_str();
  run.add_flag("--keep-going", options_.keep_going,
               "Ranks that use serried::Elastic live on when others are lost; node 0's value counts");
  run.add_flag("--numa", options_.numa, "Bind ranks to memory nodes of this machine, neighbours to the same one");
  run.add_option("--log-dir,--log_dir", options_.log_dir, "Also write attempt_<k>/rank_<r>.out and .err there");
  run.add_option("--only-ranks", only_ranks_,
                 "Show output of these alone, for example 0,4-6; a failed rank is told anyway");
  run.add_option("--grace", grace_seconds_,
                 "Seconds between asking ranks, and what they leave behind, to end and killing them")
      ->capture_default_str();
  run.add_option("--join-timeout", join_seconds_, "Seconds to wait for the other nodes")->capture_default_str();
  run.add_option("--last-call", last_call_seconds_, "Seconds to wait for more nodes when min of min:max are there")
      ->capture_default_str();
  run.add_option("--lost-after", lost_seconds_, "Seconds of silence after which a node is lost; the same on all nodes")
      ->capture_default_str();
  run.add_option("--rejoin-timeout", rejoin_seconds_,
                 "Under --keep-going, seconds that ranks live on while the launcher that leads is lost and another one "
                 "is awaited at its address; 0: they end with it")
      ->capture_default_str();
  run.add_option("--sit-out", sit_out_seconds_,
                 "Seconds that a node sits out whose ranks failed 3 times within them; 0: never; node 0's value counts")
      ->capture_default_str();
  run.add_option("--slow-after", slow_seconds_,
                 "Seconds after which ranks that wait for others in a call are told of; 0: they are not")
      ->capture_default_str();
  run.add_flag("--insecure", options_.insecure, "Let launchers of several nodes meet without a token");
  run.add_option("--hosts", hosts_,
                 "host:ranks,host:ranks: start the launchers there by ssh, and show all output here");
  run.add_option("--hostfile", hostfile_, "The same from a file, a host per line");
  run.add_option("--ssh", ssh_, "The command for that, with its options")->capture_default_str();
  run.add_option("-x", fleet_.exports, "A variable that ranks on other hosts get, besides SERRIED_* and OMP_*")
      ->allow_extra_args(false)
      ->type_name("NAME");
  run.add_flag("--as-node", as_node_)->group("");
  add_progress_option(run, progress_);
  run.formatter_fn(help_text);
  run.add_option("--master-port,--master_port", options_.master_port,
                 "A port that rank 0 opens by itself, for programs that do not use serried; default: a free port, "
                 "opened by the launcher and inherited by rank 0");
}

bool RunCommand::chosen() const {
  return command_->parsed();
}

int RunCommand::execute(const std::vector<std::string>& rest) {
  options_.grace = launch::Seconds(grace_seconds_);
  options_.join_timeout = launch::Seconds(join_seconds_);
  options_.last_call = launch::Seconds(last_call_seconds_);
  options_.lost_after = launch::Seconds(lost_seconds_);
  options_.rejoin_timeout = launch::Seconds(rejoin_seconds_);
  options_.sit_out = launch::Seconds(sit_out_seconds_);
  options_.slow_after = launch::Seconds(slow_seconds_);
  const launch::NodeRange nodes = launch::parse_nodes(nodes_);
  options_.min_nodes = nodes.min;
  options_.max_nodes = nodes.max;
  const auto progress = Progress::mode_of(progress_);
  options_.says_who_is_late =
      progress == Progress::Mode::always || (progress == Progress::Mode::automatic && ::isatty(STDERR_FILENO) == 1);
  if (command_->get_option("--only-ranks")->count() > 0) options_.only_ranks = launch::parse_ranks(only_ranks_);
  options_.command = command_->remaining();
  // After a program it is one of its arguments.
  const bool ends_our_options = options_.command.empty() && !rest.empty();
  options_.command.insert(options_.command.end(), rest.begin() + (ends_our_options ? 1 : 0), rest.end());
  if (as_node_) return launch::run_as_node();
  if (!hosts_.empty() || !hostfile_.empty()) return run_on_hosts();
  if (command_->get_option("--nnodes")->count() == 0) take_slurm_nodes();
  if (options_.max_nodes > 1) options_.token = launch::read_token();
  return launch::run(options_);
}

void RunCommand::take_slurm_nodes() {
  const auto nodes = launch::slurm_nodes();
  if (!nodes) return;
  options_.min_nodes = options_.max_nodes = nodes->num_nodes;
  if (options_.node_rank < 0) options_.node_rank = nodes->node_rank;
  if (options_.rendezvous.empty()) options_.rendezvous = nodes->rendezvous;
}

int RunCommand::run_on_hosts() {
  using launch::LaunchError;
  const std::string given = hosts_.empty() ? "--hostfile" : "--hosts";
  if (!hosts_.empty() && !hostfile_.empty()) {
    throw LaunchError(launch::kExitUsage, "--hosts and --hostfile are both given", "leave one of them out");
  }
  if (options_.node_rank >= 0) {
    throw LaunchError(launch::kExitUsage, "--node-rank is given beside " + given,
                      "leave it out: nodes are numbered as the hosts are listed");
  }
  fleet_.hosts = hosts_.empty() ? launch::read_hostfile(hostfile_) : launch::parse_hosts(hosts_);
  std::istringstream words(ssh_);
  fleet_.ssh.assign(std::istream_iterator<std::string>(words), {});
  if (fleet_.ssh.empty()) throw LaunchError(launch::kExitUsage, "--ssh is empty", "leave it out, or pass a command");
  const int num_hosts = static_cast<int>(fleet_.hosts.size());
  const bool is_default = command_->get_option("--nnodes")->count() == 0;
  if (is_default) options_.min_nodes = options_.max_nodes = num_hosts;
  if (options_.max_nodes != num_hosts) {
    throw LaunchError(launch::kExitUsage,
                      "--nnodes is " + launch::range_text(options_.min_nodes, options_.max_nodes) + ", and " + given +
                          " names " + std::to_string(num_hosts),
                      "leave --nnodes out, or pass min:" + std::to_string(num_hosts));
  }
  if (command_->get_option("--rejoin-timeout")->count() > 0) {
    throw LaunchError(launch::kExitUsage, "--rejoin-timeout is given beside " + given,
                      "leave it out: under " + given + " nobody starts a lost leader again, so the job ends with it");
  }
  options_.token = launch::read_token();
  if (options_.token.empty()) options_.token = launch::make_token();
  return launch::run_on_hosts(options_, fleet_);
}

}  // namespace serried::tools
