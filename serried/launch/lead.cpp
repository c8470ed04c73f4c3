// The event loop of a leader without ranks: signals, the nodes, and what there is to say of the job.
#include "serried/launch/lead.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>

#include "serried/launch/error.h"
#include "serried/launch/leader.h"
#include "serried/launch/lookout.h"
#include "serried/launch/output.h"
#include "serried/launch/signals.h"
#include "serried/launch/socket.h"

namespace serried::launch {
namespace {

class Head {
 public:
  Head(const Options& options, Signals& signals, Screen& screen)
      : options_(options),
        signals_(signals),
        screen_(screen),
        leader_(options, screen, listen_on(parse_address(options.rendezvous))),
        lookout_(options.slow_after) {}

  int run();

 private:
  void turn();
  void obey(const Order& order);
  void on_signal(int signal);
  void say(const std::string& line) { screen_.write(Stream::err, "[run] " + line + "\n"); }

  const Options& options_;
  Signals& signals_;
  Screen& screen_;
  Leader leader_;
  Lookout lookout_;
  Assignment assignment_{.world_size = 0};  // no ranks until the first start
  std::optional<int> exit_code_;
  bool interrupted_ = false;
};

int Head::run() {
  const std::string nodes = range_text(options_.min_nodes, options_.max_nodes);
  say(host_name() + " leads the job that meets at " + options_.rendezvous + ", for --nnodes " + nodes);
  while (!exit_code_) {
    leader_.tick();
    leader_.take_answers();  // of the store, to the nodes: no rank is here
    const std::vector<Order> orders = leader_.take_orders();
    for (const Order& order : orders) obey(order);
    if (orders.empty()) turn();
  }
  screen_.flush(after(Seconds(1)));
  return *exit_code_;
}

void Head::turn() {
  std::vector<Watch> watches;
  watches.push_back({signals_.fd(), POLLIN, [this] {
                       for (const Caught& caught : signals_.take()) on_signal(caught.signal);
                     }});
  screen_.watch(watches);
  leader_.watch(watches);
  poll_once(watches, std::min(leader_.deadline(), lookout_.deadline()));
  for (const std::string& line : lookout_.turn_without_ranks(leader_)) say(line);
}

// What every node prints of it, where its ranks' output is.
void Head::obey(const Order& order) {
  switch (order.kind) {
    case Order::Kind::start:
    case Order::Kind::table:
      assignment_ = order.assignment;
      lookout_.begin(assignment_);
      if (!assignment_.news.empty()) say(assignment_.news);
      return;
    case Order::Kind::over:
      return screen_.write(Stream::err, describe(order.cause, assignment_.world_size, options_.max_nodes));
    case Order::Kind::stop:
      lookout_.end();
      return screen_.write(Stream::err, describe(order.cause, assignment_.world_size, options_.max_nodes));
    case Order::Kind::exit: exit_code_ = order.exit_code; return;
    case Order::Kind::wait: return;  // told to nodes alone
  }
}

void Head::on_signal(int signal) {
  if (signal == SIGTSTP) {
    leader_.pause();
    ::kill(::getpid(), SIGSTOP);
  }
  if (!is_ending(signal)) return;
  if (interrupted_) exit_code_ = kExitSignalBase + signal;  // do not wait for the nodes
  interrupted_ = true;
  leader_.interrupt(signal);
}

}  // namespace

int lead(const Options& options) {
  check_leader(options);
  Signals signals;
  Screen screen(STDOUT_FILENO, STDERR_FILENO);
  if (options.insecure && options.token.empty()) {
    screen.write(Stream::err, "[run] --insecure: whoever reaches " + options.rendezvous + " can join this job\n");
  }
  try {
    return Head(options, signals, screen).run();
  } catch (const LaunchError&) {
    screen.flush(after(Seconds(1)));
    throw;
  }
}

}  // namespace serried::launch
