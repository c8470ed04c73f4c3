// The event loop of a launcher: signals, output, ranks, and the other nodes.
#include "serried/launch/run.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "serried/base/text.h"
#include "serried/launch/control.h"
#include "serried/launch/dump.h"
#include "serried/launch/error.h"
#include "serried/launch/latecomers.h"
#include "serried/launch/leader.h"
#include "serried/launch/lookout.h"
#include "serried/launch/member.h"
#include "serried/launch/orphans.h"
#include "serried/launch/program.h"
#include "serried/launch/ranks.h"
#include "serried/launch/signals.h"
#include "serried/launch/socket.h"
#include "serried/launch/token.h"

namespace serried::launch {
namespace {

// A launcher started with closed standard streams would get its own sockets under their numbers.
void open_standard_streams() {
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY);
  }
}

constexpr Seconds kStackPatience{2};  // the job ends only after

std::string first_line(const std::string& text) {
  const size_t begin = text.starts_with("[run] ") ? 6 : 0;
  return text.substr(begin, text.find('\n') - begin);
}

class Job {
 public:
  Job(const Options& options, Signals& signals, Screen& screen)
      : options_(options),
        signals_(signals),
        screen_(screen),
        lines_(screen),
        program_(find_program(options.command[0])),
        mark_(make_token()),
        link_(make_link(options, screen)),
        lookout_(options.slow_after) {}

  int run();

 private:
  using Link = std::variant<std::unique_ptr<Leader>, std::unique_ptr<Member>>;

  static Link make_link(const Options& options, Screen& screen);

  template <class Fn>
  auto with_link(Fn fn) {
    return std::visit([&](auto& link) { return fn(*link); }, link_);
  }

  void turn();
  void carry_questions();
  void tell_of_leader();
  bool advance();
  void obey(const Order& order);
  void start(Assignment assignment);
  void change(const Order& order);
  bool tell_of_ranks();
  bool keeps_going() const { return assignment_.keep_going && !ending_; }
  void watch_over(const Assignment& assignment);
  void on_signal(const Caught& caught);
  void hear_control(const std::vector<Message>& messages);
  void interrupt(int signal);
  void end_ranks(int signal);
  bool end_orphans();
  void kill_late();
  void tell_who_is_late();
  void tell_who_waits();
  std::optional<HostSeen> take_dump(const Cause& cause);
  void keep(const std::optional<HostSeen>& dump);
  Orphans::IsKept kept() const;
  void report();
  void show_rest();

  const Options& options_;
  Signals& signals_;
  Screen& screen_;
  Lines lines_;
  std::string program_;
  const std::string mark_;  // in the environments of all that ranks start
  Link link_;
  std::optional<Orphans> orphans_;  // of the last attempt, as the guard
  std::optional<Guard> guard_;
  std::optional<LocalRanks> ranks_;
  Assignment assignment_{.world_size = 0};  // no ranks until the first start
  std::optional<Cause> stop_ordered_;
  std::optional<int> exit_code_;
  std::optional<int> exit_after_;  // what ranks have left behind
  int num_interrupts_ = 0;
  std::string told_away_;  // the address of the leader that is away
  bool ending_ = false;    // the ranks have been told to end
  Time kill_at_ = kNever;
  Lookout lookout_;
  Time tell_at_ = kNever;  // who is late at the start
  Seconds tell_after_{};
  bool grace_is_over_ = false;  // of this attempt: ranks and what they leave behind have one between them
};

// Whoever can listen at the rendezvous is node 0: the address decides, not a comparison of names.
Job::Link Job::make_link(const Options& options, Screen& screen) {
  if (options.max_nodes == 1) return std::make_unique<Leader>(options, screen, Fd());
  const Address address = parse_address(options.rendezvous);
  Fd listener;
  if (options.node_rank == 0) listener = options.listen_fd < 0 ? listen_on(address) : Fd(::dup(options.listen_fd));
  if (options.node_rank < 0) listener = listen_if_mine(address);
  if (listener) return std::make_unique<Leader>(options, screen, std::move(listener));
  return std::make_unique<Member>(options, screen);
}

int Job::run() {
  if (options_.control != nullptr) hear_control(options_.control->rest());  // came with the options
  while (!exit_code_) {
    with_link([](auto& link) { link.tick(); });
    carry_questions();
    tell_of_leader();
    const std::vector<Order> orders = with_link([](auto& link) { return link.take_orders(); });
    for (const Order& order : orders) obey(order);
    if (orders.empty() && !advance()) turn();
  }
  ranks_.reset();
  show_rest();
  return *exit_code_;
}

// Between the ranks and who keeps the store.
void Job::carry_questions() {
  with_link([this](auto& link) {
    for (const Asked& asked : lines_.take_asked()) {
      asked.question.empty() ? link.forget(asked.number) : link.ask(asked.number, asked.question);
    }
    for (const auto& [number, answer] : link.take_answers()) lines_.answer(number, answer);
  });
}

// So that who asks in vain for the store knows why.
void Job::tell_of_leader() {
  const std::string away = with_link([](auto& link) { return link.leader_away(); });
  if (away == told_away_) return;
  told_away_ = away;
  lines_.tell_of_leader(away);
}

void Job::turn() {
  std::vector<Watch> watches;
  watches.push_back({signals_.fd(), POLLIN, [this] {
                       for (const Caught& caught : signals_.take()) on_signal(caught);
                     }});
  screen_.watch(watches);
  if (options_.control != nullptr && !options_.control->ended()) {
    watches.push_back({options_.control->fd(), POLLIN, [this] { hear_control(options_.control->take()); }});
  }
  if (ranks_) ranks_->watch(watches);
  lines_.watch(watches);
  with_link([&](auto& link) { link.watch(watches); });
  const Time deadline = with_link([](auto& link) { return link.deadline(); });
  poll_once(watches,
            std::min({deadline, kill_at_, tell_at_, lookout_.deadline(), ranks_ ? ranks_->deadline() : kNever}));
  if (ranks_) ranks_->decide();
  tell_who_waits();
  if (screen_.reader_gone() && num_interrupts_ == 0) interrupt(SIGPIPE);
  kill_late();
  tell_who_is_late();
}

// Draws the conclusions from the ranks' state; true if something was told to the link.
bool Job::advance() {
  if (exit_after_ && !ranks_) {
    exit_code_ = exit_after_;
    return true;
  }
  if (ranks_ && keeps_going()) return tell_of_ranks();
  if (ranks_ && ranks_->failure() && !ending_) {
    std::optional<HostSeen> dump = take_dump(*ranks_->failure());
    with_link([&](auto& link) {
      link.failed(*ranks_->failure());
      if (dump) link.tick();  // the others need not wait for stacks
    });
    if (dump) add_stacks(*dump, kStackPatience);
    end_ranks(SIGTERM);
    keep(dump);
    return true;
  }
  if (ranks_ && ranks_->all_ended()) {
    if (!end_orphans()) return false;
    ranks_.reset();
    lookout_.end();
    kill_at_ = kNever;
    if (ending_) return true;
    with_link([](auto& link) { link.done(); });
    return true;
  }
  if (!stop_ordered_ || ranks_) return false;
  report();
  stop_ordered_.reset();
  with_link([](auto& link) { link.ended(); });
  return true;
}

void Job::obey(const Order& order) {
  if (order.kind == Order::Kind::start) return start(order.assignment);
  if (order.kind == Order::Kind::over || order.kind == Order::Kind::table) return change(order);
  if (order.kind == Order::Kind::wait) {
    if (options_.reports) screen_.write(Stream::err, "[run] " + order.assignment.news + "\n");
    return;
  }
  if (order.kind == Order::Kind::exit && ranks_ && assignment_.keep_going) {
    exit_after_ = order.exit_code;
    if (!ending_) end_ranks(SIGTERM);
    return;
  }
  if (order.kind == Order::Kind::exit) {
    if (stop_ordered_) report();
    exit_code_ = order.exit_code;
    return;
  }
  stop_ordered_ = order.cause;
  std::optional<HostSeen> dump = take_dump(order.cause);
  if (dump) add_stacks(*dump, kStackPatience);
  const bool forwarded = order.cause.kind == Cause::Kind::interrupted && order.cause.signal != SIGPIPE;
  if (!ending_) end_ranks(forwarded ? order.cause.signal : SIGTERM);
  keep(dump);
}

void Job::start(Assignment assignment) {
  if (num_interrupts_ > 0) return;  // node 0 has been told and will order the stop
  if (assignment.keep_going) assignment.mark = mark_;
  assignment_ = assignment;
  ending_ = false;
  grace_is_over_ = false;
  tell_after_ = kLateAfter;
  tell_at_ = options_.says_who_is_late ? after(tell_after_) : kNever;
  if (!assignment.news.empty() && options_.reports) screen_.write(Stream::err, "[run] " + assignment.news + "\n");
  try {
    watch_over(assignment);
    ranks_.emplace(Surroundings{options_, program_, screen_, *guard_, lines_}, assignment);
    lookout_.begin(assignment);
  } catch (const LaunchError& error) {
    const Cause cause{.kind = Cause::Kind::launch_failed, .exit_code = error.exit_code(), .text = error.what()};
    with_link([&](auto& link) { link.failed(cause); });
  }
  with_link([](auto& link) { link.started(); });
}

// --keep-going: ranks come and go while the others live on.
void Job::change(const Order& order) {
  if (ending_) return;
  if (order.kind == Order::Kind::over) {
    const std::string report = describe(order.cause, assignment_.world_size, options_.max_nodes);
    if (options_.reports) screen_.write(Stream::err, report);
    constexpr size_t kHead = 6;  // "[run] "
    if (ranks_) ranks_->say_over(order.assignment.attempt, report.substr(kHead, report.find('\n') - kHead));
    return;
  }
  if (!ranks_) return start(order.assignment);
  assignment_ = order.assignment;
  assignment_.mark = mark_;
  if (!assignment_.news.empty() && options_.reports) screen_.write(Stream::err, "[run] " + assignment_.news + "\n");
  try {
    ranks_->change(Surroundings{options_, program_, screen_, *guard_, lines_}, assignment_);
    lookout_.begin(assignment_);
  } catch (const LaunchError& error) {
    const Cause cause{.kind = Cause::Kind::launch_failed, .exit_code = error.exit_code(), .text = error.what()};
    with_link([&](auto& link) { link.failed(cause); });
  }
}

bool Job::tell_of_ranks() {
  const std::vector<int> elastic = ranks_->take_elastic();
  for (const int seat : elastic) with_link([&](auto& link) { link.rank_is_elastic(seat); });
  const std::vector<LocalRanks::Ended> ended = ranks_->take_ended();
  for (const auto& [seat, failure] : ended) {
    with_link([&, seat = seat, &failure = failure](auto& link) {
      failure ? link.rank_lost(seat, *failure) : link.rank_done(seat);
    });
  }
  return !elastic.empty() || !ended.empty();
}

// Of the attempt before nothing is left by now.
void Job::watch_over(const Assignment& assignment) {
  guard_.reset();
  orphans_.reset();
  orphans_.emplace(assignment);
  guard_.emplace(mark_of(assignment));
}

void Job::on_signal(const Caught& caught) {
  if (is_ending(caught.signal)) return interrupt(caught.signal);
  if (caught.signal == SIGCHLD) {
    if (ranks_) ranks_->look();
    if (orphans_) orphans_->reap(caught.from, kept());
    return;
  }
  if (!ranks_) return;
  if (caught.signal != SIGTSTP) return ranks_->send(caught.signal);
  // Ctrl-Z reaches only the launcher's process group: stop and continue the ranks with it.
  ranks_->send(SIGSTOP);
  with_link([](auto& link) { link.pause(); });
  ::kill(::getpid(), SIGSTOP);
  ranks_->send(SIGCONT);
}

// Who started this launcher on this host may pass on signals. If it goes, the node is lost to the job.
void Job::hear_control(const std::vector<Message>& messages) {
  for (const Message& message : messages) {
    if (message[0] != "signal" || message.size() != 2) continue;
    const int signal = number_in(message[1]);
    if (is_ending(signal)) interrupt(signal);
    if (!is_ending(signal) && ranks_) ranks_->send(signal);
  }
  if (!options_.control->ended() || num_interrupts_ > 0) return;
  end_ranks(SIGTERM);
  with_link([](auto& link) { link.leave(); });
}

void Job::interrupt(int signal) {
  ++num_interrupts_;
  if (num_interrupts_ == 1) {
    end_ranks(signal == SIGPIPE ? SIGTERM : signal);
    with_link([&](auto& link) { link.failed({.kind = Cause::Kind::interrupted, .signal = signal}); });
    return;
  }
  if (ranks_) return ranks_->send(SIGKILL);
  exit_code_ = kExitSignalBase + signal;  // nothing left here; do not wait for the other nodes
}

void Job::end_ranks(int signal) {
  ending_ = true;
  lookout_.end();
  if (!ranks_) return;
  ranks_->send(signal);
  ranks_->send(SIGCONT);  // a stopped rank hears nothing else
  kill_at_ = std::min(kill_at_, after(options_.grace));
}

// Whether nothing is left of what the ranks started. Asked when the last rank has ended, since ranks may use it till
// then.
bool Job::end_orphans() {
  if (num_interrupts_ > 1 || grace_is_over_) {
    orphans_->kill(kept());
    return true;
  }
  if (!orphans_->ask_to_end(kept())) return true;
  kill_at_ = std::min(kill_at_, after(options_.grace));
  return false;
}

void Job::kill_late() {
  if (!ranks_ || Clock::now() < kill_at_) return;
  kill_at_ = kNever;
  grace_is_over_ = true;
  const std::string who = ranks_->all_ended() ? "processes that ranks started" : "ranks";
  screen_.write(Stream::err, "[run] not all " + who + " ended within " + to_text(options_.grace) + ": killing them\n");
  ranks_->send(SIGKILL);
  if (ranks_->all_ended()) orphans_->kill(kept());
}

// Ever more seldom: a group may also be made late.
void Job::tell_who_is_late() {
  if (Clock::now() < tell_at_) return;
  const std::string who = ranks_ && !ending_ ? latecomers_text(ranks_->pids()) : "";
  if (!who.empty()) screen_.write(Stream::err, "[run] after " + to_text(tell_after_) + ": " + who + "\n");
  tell_at_ = after(tell_after_);
  tell_after_ *= 2;
}

void Job::tell_who_waits() {
  if (!ranks_ || ending_) return;
  ranks_->tell_clock(with_link([](auto& link) { return link.clock(); }));
  const auto lines = with_link([this](auto& link) { return lookout_.turn(*ranks_, link); });
  for (const std::string& line : lines) screen_.write(Stream::err, "[run] " + line + "\n");
}

// As things are when it happens: ranks that are told to end change them.
std::optional<HostSeen> Job::take_dump(const Cause& cause) {
  const bool is_failure = cause.kind == Cause::Kind::rank_failed || cause.kind == Cause::Kind::node_lost;
  if (options_.log_dir.empty() || !ranks_ || ending_ || !is_failure) return std::nullopt;
  HostSeen dump = lookout_.seen(*ranks_);
  dump.why = detail::printable(first_line(describe(cause, assignment_.world_size, options_.max_nodes)));
  add_calls(dump, ranks_->boxes());
  return dump;
}

void Job::keep(const std::optional<HostSeen>& dump) {
  if (!dump) return;
  try {
    write_dump(*dump, options_.log_dir + "/dump", assignment_.num_nodes);
  } catch (const std::runtime_error& error) {
    screen_.write(Stream::err, "[run] no dump: " + std::string(error.what()) + "\n");
  }
}

Orphans::IsKept Job::kept() const {
  return [this](pid_t child) { return (guard_ && guard_->pid() == child) || (ranks_ && ranks_->has(child)); };
}

void Job::report() {
  const bool is_told_elsewhere = !options_.reports && with_link([](auto& link) { return link.has_leader(); });
  if (is_told_elsewhere) return;
  screen_.write(Stream::err, describe(*stop_ordered_, assignment_.world_size, options_.max_nodes));
}

// The reader may be slow, or stuck: then a signal ends the waiting.
void Job::show_rest() {
  bool interrupted = false;
  const Time deadline = num_interrupts_ > 0 ? after(Seconds(1)) : kNever;
  while (!screen_.empty() && !interrupted && Clock::now() < deadline) {
    std::vector<Watch> watches;
    watches.push_back({signals_.fd(), POLLIN, [&] {
                         for (const Caught& caught : signals_.take())
                           interrupted = interrupted || is_ending(caught.signal);
                       }});
    screen_.watch(watches);
    poll_once(watches, deadline);
  }
}

}  // namespace

int run(const Options& options) {
  open_standard_streams();
  Signals signals;
  check(options);
  // Children of ranks that lose their parent come to the launcher, which can then wait for their end.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Screen screen(STDOUT_FILENO, STDERR_FILENO);
  if (options.insecure && options.max_nodes > 1 && options.token.empty()) {
    screen.write(Stream::err, "[run] --insecure: whoever reaches " + options.rendezvous + " can join this job\n");
  }
  try {
    return Job(options, signals, screen).run();
  } catch (const LaunchError&) {
    screen.flush(after(Seconds(1)));
    throw;
  }
}

}  // namespace serried::launch
