// One event loop over the ssh processes. Launchers meet by themselves; here they are only started and told of signals.
#include "serried/launch/fleet.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <set>

#include "serried/base/cores.h"
#include "serried/launch/control.h"
#include "serried/launch/error.h"
#include "serried/launch/plan.h"
#include "serried/launch/remote.h"
#include "serried/launch/run.h"
#include "serried/launch/signals.h"
#include "serried/launch/socket.h"
#include "serried/launch/token.h"
#include "serried/launch/version.h"

namespace serried::launch {
namespace {

constexpr Seconds kSetupTimeout{600};  // the others begin meanwhile
constexpr Seconds kEndSlack{10};       // for launchers to end, on top of the grace that ranks get

// For a shell: '...' with each ' as '\''.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? "'\\''" : std::string(1, c);
  return result + "'";
}

std::string command_there() {
  return "cd " + quoted(std::filesystem::current_path().string()) + " && exec " +
         quoted(std::filesystem::read_symlink("/proc/self/exe").string()) + " run --as-node";
}

// What is this job's, or a secret, goes another way or nowhere.
bool is_forwarded(const std::string& name, const std::vector<std::string>& exports) {
  static const std::set<std::string> kept = {"SERRIED_BLACK_BOX_FD",    "SERRIED_JOB_SECRET",    "SERRIED_LAUNCHER",
                                             "SERRIED_LAUNCHER_FD",     "SERRIED_LAUNCHER_MARK", "SERRIED_GENERATION",
                                             "SERRIED_MASTER_LISTEN_FD"};
  if (std::find(exports.begin(), exports.end(), name) != exports.end()) return true;
  const std::vector<std::string>& tokens = token_variables();
  if (kept.contains(name) || std::find(tokens.begin(), tokens.end(), name) != tokens.end()) return false;
  return name.starts_with("SERRIED_") || name.starts_with("OMP_");
}

std::vector<std::string> forwarded_environment(const std::vector<std::string>& exports) {
  for (const std::string& name : exports) {
    if (std::getenv(name.c_str()) != nullptr) continue;
    throw LaunchError(kExitUsage, "-x " + name + " is given, but " + name + " is not set",
                      "export it, or leave it out");
  }
  std::vector<std::string> result;
  for (const std::string& entry : inherited_environment()) {
    if (is_forwarded(entry.substr(0, entry.find('=')), exports)) result.push_back(entry);
  }
  return result;
}

// The name by which the others reach the first host: without "me@".
std::string name_to_meet_at(const Options& options, const FleetOptions& fleet) {
  if (!options.rendezvous.empty()) return options.rendezvous;
  const std::string& name = fleet.hosts[0].name;
  const std::string host = name.substr(name.find('@') + 1);  // npos + 1 is 0
  return (host.find(':') == host.npos ? host : "[" + host + "]") + ":0";
}

class Fleet {
 public:
  Fleet(const Options& options, const FleetOptions& fleet, Signals& signals, Screen& screen)
      : options_(options),
        fleet_(fleet),
        signals_(signals),
        screen_(screen),
        environment_(forwarded_environment(fleet.exports)),
        rendezvous_(name_to_meet_at(options, fleet)),
        ready_by_(after(options.join_timeout)),
        notice_at_(after(kNoticeAfter)) {
    const std::string command = command_there();
    for (const Host& host : fleet.hosts) {
      remotes_.push_back(std::make_unique<Remote>(host, fleet.ssh, command, screen));
    }
  }

  int run();

 private:
  void turn();
  void look();
  void set_up();
  NodeSetup setup_of(size_t node) const;
  void check_ready();
  void pass_on(int signal);
  void tell_all(int signal);
  void begin_to_end(int signal);
  void end_late();
  int exit_code() const;

  const Options& options_;
  const FleetOptions& fleet_;
  Signals& signals_;
  Screen& screen_;
  std::vector<std::string> environment_;
  std::string rendezvous_;
  std::vector<std::unique_ptr<Remote>> remotes_;
  std::set<size_t> set_up_;
  std::set<size_t> told_;  // failures
  std::optional<Remote::Failure> failure_;
  Time ready_by_;
  Time notice_at_;
  Time let_go_at_ = kNever;
  Time kill_at_ = kNever;
  bool ending_ = false;
  int num_interrupts_ = 0;
  int signal_ = 0;  // the last of them
};

int Fleet::run() {
  const auto has_ended = [](const auto& remote) { return remote->ended(); };
  while (!std::all_of(remotes_.begin(), remotes_.end(), has_ended)) turn();
  if (failure_) throw LaunchError(kExitFailure, failure_->what, failure_->fix);
  screen_.flush(after(Seconds(5)));
  return exit_code();
}

void Fleet::turn() {
  std::vector<Watch> watches;
  watches.push_back({signals_.fd(), POLLIN, [this] {
                       for (const Caught& caught : signals_.take()) {
                         if (is_ending(caught.signal)) pass_on(caught.signal);
                         if (caught.signal == SIGUSR1 || caught.signal == SIGUSR2) tell_all(caught.signal);
                       }
                     }});
  screen_.watch(watches);
  for (const auto& remote : remotes_) remote->watch(watches);
  poll_once(watches, std::min({ready_by_, notice_at_, let_go_at_, kill_at_}));
  if (screen_.reader_gone() && num_interrupts_ == 0) pass_on(SIGPIPE);
  look();
  set_up();
  check_ready();
  end_late();
}

// One that fails before all are set up ends all; later on the launchers know what a lost node means.
void Fleet::look() {
  for (size_t node = 0; node < remotes_.size(); ++node) {
    Remote& remote = *remotes_[node];
    remote.look();
    const auto failure = remote.failure();
    if (!failure || num_interrupts_ > 0 || !told_.insert(node).second) continue;
    if (set_up_.size() == remotes_.size()) {
      screen_.write(Stream::err, "[run] " + failure->what + "\n  fix: " + failure->fix + "\n");
    } else if (!failure_) {
      failure_ = failure;
      begin_to_end(SIGTERM);
    }
  }
  const bool is_set_up = set_up_.size() == remotes_.size();
  const auto has_ended = [](const auto& remote) { return remote->ended(); };
  if (!is_set_up && !ending_ && std::any_of(remotes_.begin(), remotes_.end(), has_ended)) begin_to_end(SIGTERM);
  // Node 0 ends last, unless it is lost: the others have no reason to stay.
  if (remotes_[0]->ended() && let_go_at_ == kNever && kill_at_ == kNever)
    let_go_at_ = after(options_.grace + kEndSlack);
}

NodeSetup Fleet::setup_of(size_t node) const {
  NodeSetup setup{.options = options_, .environment = environment_};
  const Host& host = fleet_.hosts[node];
  if (fleet_.counts_cores) setup.options.num_ranks = 0;  // only that host knows
  if (host.num_ranks > 0) setup.options.num_ranks = host.num_ranks;
  setup.options.node_rank = static_cast<int>(node);
  if (options_.max_nodes > 1) setup.options.rendezvous = rendezvous_;
  setup.options.reports = node == 0;
  return setup;
}

void Fleet::set_up() {
  if (ending_) return;
  for (size_t node = 0; node < remotes_.size(); ++node) {
    const Remote& remote = *remotes_[node];
    if (remote.version().empty() || set_up_.contains(node)) continue;
    if (remote.version() != version_text()) {
      failure_ = {
          remote.host().name + " has " + remote.version() + ", and this host, " + host_name() + ", " + version_text(),
          "install the same version on every node: serried --version"};
      return begin_to_end(SIGTERM);
    }
    // The others are told where node 0 listens.
    if (node > 0 && remotes_[0]->port() == 0) continue;
    if (node > 0)
      rendezvous_.replace(rendezvous_.rfind(':') + 1, std::string::npos, std::to_string(remotes_[0]->port()));
    remotes_[node]->tell(to_message(setup_of(node)));
    set_up_.insert(node);
  }
}

void Fleet::check_ready() {
  if (set_up_.size() == remotes_.size() || ending_) {
    ready_by_ = notice_at_ = kNever;
    return;
  }
  std::string missing;
  for (const auto& remote : remotes_) {
    if (remote->version().empty()) missing += (missing.empty() ? "" : ", ") + remote->host().name;
  }
  if (Clock::now() >= notice_at_) {
    notice_at_ = kNever;
    if (!missing.empty()) screen_.write(Stream::err, "[run] waiting for a launcher on " + missing + "\n");
  }
  if (Clock::now() < ready_by_) return;
  failure_ = {"no launcher began on " + missing + " within " + to_text(options_.join_timeout),
              "see what hinders " + fleet_.ssh[0] + " there, or raise --join-timeout"};
  begin_to_end(SIGTERM);
}

void Fleet::pass_on(int signal) {
  signal_ = signal;
  ++num_interrupts_;
  if (num_interrupts_ > 2) kill_at_ = Clock::now();
  begin_to_end(signal == SIGPIPE ? SIGTERM : signal);
}

void Fleet::tell_all(int signal) {
  for (const auto& remote : remotes_) remote->tell({"signal", std::to_string(signal)});
}

void Fleet::begin_to_end(int signal) {
  ending_ = true;
  tell_all(signal);
  for (size_t node = 0; node < remotes_.size(); ++node) {
    if (set_up_.contains(node)) continue;
    remotes_[node]->let_go();  // it has no ranks
    if (remotes_[node]->version().empty()) remotes_[node]->kill();
  }
  if (let_go_at_ == kNever) let_go_at_ = after(options_.grace + kEndSlack);
}

void Fleet::end_late() {
  if (Clock::now() >= let_go_at_) {
    for (const auto& remote : remotes_) remote->let_go();
    let_go_at_ = kNever;
    kill_at_ = std::min(kill_at_, after(options_.grace + kEndSlack));
  }
  if (Clock::now() < kill_at_) return;
  for (const auto& remote : remotes_) remote->kill();
  kill_at_ = kNever;
}

// That of the job, which node 0's launcher knows.
int Fleet::exit_code() const {
  const bool has_gone = remotes_[0]->failure().has_value();
  if (signal_ != 0 && has_gone) return kExitSignalBase + signal_;
  return has_gone ? kExitFailure : remotes_[0]->exit_code();
}

// Beside the environment that a login on that host has.
void take_environment(const std::vector<std::string>& entries) {
  for (const std::string& entry : entries) {
    const size_t end = entry.find('=');
    if (end != entry.npos) ::setenv(entry.substr(0, end).c_str(), entry.c_str() + end + 1, 1);
  }
}

void say(const std::string& line) {
  std::cout << line << std::endl;
}

}  // namespace

int run_on_hosts(const Options& options, const FleetOptions& fleet) {
  check_one_node(options);
  if (!options.rendezvous.empty()) parse_address(options.rendezvous, 0);
  Signals signals;
  Screen screen(STDOUT_FILENO, STDERR_FILENO);
  try {
    return Fleet(options, fleet, signals, screen).run();
  } catch (const LaunchError&) {
    screen.flush(after(Seconds(1)));
    throw;
  }
}

int run_as_node() {
  say(kNodeIsReady + version_text());
  Control control(STDIN_FILENO);
  NodeSetup setup;
  try {
    const Message message = control.wait(after(kSetupTimeout));
    if (message.empty() || message[0] == "signal") return kExitFailure;  // who started this launcher has gone, or ends
    setup = node_setup_from(message);
  } catch (const LaunchError&) {
    throw;
  } catch (const std::exception&) {
    throw LaunchError(kExitUsage, "what comes to --as-node is no job", "use --hosts, which starts launchers with it");
  }
  take_environment(setup.environment);
  Options& options = setup.options;
  options.control = &control;
  if (options.num_ranks == 0) options.num_ranks = num_usable_cores();
  Fd listener;
  if (options.node_rank == 0 && options.max_nodes > 1) {
    Address address = parse_address(options.rendezvous, 0);  // 0: any free port
    listener = listen_on(address);
    address.port = port_of(listener);
    options.rendezvous = to_text(address);
    options.listen_fd = listener.get();
    say(kNodeListens + std::to_string(address.port));
  }
  return run(options);
}

}  // namespace serried::launch
