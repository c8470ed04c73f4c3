// `serried top` beside real ranks: hung, stopped, dying, several jobs, another user, a real terminal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include <nlohmann/json.hpp>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

std::vector<std::string> job(int num_ranks, std::vector<std::string> arguments) {
  std::vector<std::string> words = {"run", "-n", std::to_string(num_ranks), "--grace", "1", SERRIED_WORKER};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

Result top(const Command& job, std::vector<std::string> options) {
  options.insert(options.begin(), {"top", "--interval", "0.1", std::to_string(job.pid())});
  return serried(options);
}

/// What top says of the job once `is_so`; looks again until then, at most 20 s.
json look_until(const Command& job, const std::function<bool(const json&)>& is_so) {
  json seen;
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (Clock::now() < deadline) {
    const Result result = top(job, {"--json"});
    if (result.exit_code != 0) continue;  // no rank has started yet
    seen = json::parse(result.out);
    if (is_so(seen)) return seen;
  }
  ADD_FAILURE() << "still " << seen.dump(2);
  return seen;
}

bool is_waiting(const json& seen, int rank) {
  return int(seen["ranks"].size()) > rank && seen["ranks"][size_t(rank)]["state"] == "waiting";
}

class TopOnBackends : public ::testing::TestWithParam<const char*> {};

TEST_P(TopOnBackends, NamesTheRankThatDoesNotCome) {
  Command running(job(4, {"leave_out", GetParam(), "2"}));
  running.wait_for("ready", 4);
  const json seen = look_until(
      running, [](const json& now) { return is_waiting(now, 0) && is_waiting(now, 1) && is_waiting(now, 3); });
  EXPECT_EQ(seen["launcher"], running.pid());
  EXPECT_EQ(seen["world_size"], 4);
  ASSERT_EQ(seen["ranks"].size(), 4u);
  for (const size_t rank : {0, 1, 3}) {
    const json& row = seen["ranks"][rank];
    EXPECT_EQ(row["rank"], rank);
    EXPECT_EQ(row["call"], "#2 all_reduce f32[512] sum");
    EXPECT_EQ(row["bytes"], 2048);
    EXPECT_EQ(row["waits_on"], json::array({2}));
    EXPECT_GT(row["waits_seconds"], 0.05);
    EXPECT_THAT(std::string(row["group"]), StartsWith(std::string(GetParam()) + "/"));
    EXPECT_GT(row["resident_bytes"], 1 << 20);
  }
  EXPECT_EQ(seen["ranks"][2]["state"], "running");
  EXPECT_EQ(seen["ranks"][2]["call"], "#1 barrier");
  const Result table = top(running, {"--once"});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  EXPECT_EQ(table.err, "");
  EXPECT_THAT(table.out,
              AllOf(HasSubstr("ranks 0, 1, 3 wait in #2 all_reduce f32[512] sum (2.0 KiB) of group "),
                    HasSubstr(" for rank 2, "), HasSubstr("; rank 2 is at #1 barrier\n"), Not(HasSubstr("\x1b"))));
}

INSTANTIATE_TEST_SUITE_P(Top, TopOnBackends, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Top, ShowsAStoppedRankAndWhoWaitsForIt) {
  Command running(job(3, {"run_for_ever"}));
  running.wait_for("running", 3);
  const json before = look_until(running, [](const json& now) {
    return now["ranks"].size() == 3 && now["ranks"][1]["calls_per_second"].is_number() &&
           now["ranks"][1]["calls_per_second"] > 0;
  });
  EXPECT_THAT(std::string(before["ranks"][0]["call"]), HasSubstr(" all_reduce f32[1000] avg"));
  const pid_t stopped = before["ranks"][1]["pid"];
  ::kill(stopped, SIGSTOP);
  const json seen = look_until(running, [](const json& now) {
    return now["ranks"][1]["state"] == "stopped" && is_waiting(now, 0) && is_waiting(now, 2);
  });
  EXPECT_EQ(seen["ranks"][0]["waits_on"], json::array({1}));
  EXPECT_EQ(seen["ranks"][2]["waits_on"], json::array({1}));
  EXPECT_THAT(std::string(seen["notes"][0]),
              HasSubstr("rank 1 is stopped: kill -CONT " + std::to_string(stopped) + " lets it go on"));
  ::kill(stopped, SIGCONT);
  look_until(running, [](const json& now) { return now["ranks"][1]["state"] == "running"; });
}

TEST(Top, ShowsWhoIsMissingInNewGroup) {
  Command running(job(3, {"stay_away", "1"}));
  running.wait_for("ready", 3);
  const json seen = look_until(running, [](const json& now) { return is_waiting(now, 0) && is_waiting(now, 2); });
  EXPECT_EQ(seen["ranks"][0]["call"], "new_group");
  EXPECT_EQ(seen["ranks"][0]["waits_on"], json::array({1}));
  EXPECT_THAT(std::string(seen["notes"][0]),
              AllOf(StartsWith("ranks 0, 2 wait in new_group for rank 1, "), HasSubstr("rank 1 shows no group yet")));
}

TEST(Latecomers, AreNamedByTheLauncherWhereProgressIsAskedFor) {
  Command running({"run", "-n", "3", "--grace", "1", "--progress", SERRIED_WORKER, "stay_away", "1"});
  running.wait_for(" s: ranks 0, 2 wait in new_group for rank 1 (pid ");
  running.send(SIGTERM);
  running.finish();
  EXPECT_TRUE(running.nothing_left());
}

TEST(Latecomers, WhoHasEndedIsWaitedForInVain) {
  const std::string rank = std::string("[ $RANK = 1 ] && exit 0; exec ") + SERRIED_WORKER + " stay_away 3";
  Command running({"run", "-n", "3", "--grace", "1", "--progress", "sh", "-c", rank});
  running.wait_for(" s: ranks 0, 2 wait in new_group for rank 1 (has ended)");
  running.send(SIGTERM);
  running.finish();
  EXPECT_TRUE(running.nothing_left());
}

TEST_P(TopOnBackends, ShowsAReceive) {
  Command running(job(2, {"receive", GetParam()}));
  running.wait_for("ready", 2);
  const json seen = look_until(running, [](const json& now) { return is_waiting(now, 0); });
  EXPECT_EQ(seen["ranks"][0]["call"], "recv from rank 1");
  EXPECT_EQ(seen["ranks"][0]["waits_on"], json::array({1}));
}

TEST(Top, ShowsRanksThatAreThreads) {
  Command running(job(1, {"leave_out_a_thread"}));
  const json seen = look_until(running, [](const json& now) { return is_waiting(now, 0) && is_waiting(now, 1); });
  ASSERT_EQ(seen["ranks"].size(), 3u);
  EXPECT_EQ(seen["ranks"][0]["thread"], 0);
  EXPECT_EQ(seen["ranks"][0]["waits_on"], json::array({2}));
  EXPECT_EQ(seen["ranks"][2]["state"], "running");
}

TEST(Top, SaysWhyAGroupHasFailed) {
  Command running(job(2, {"fail_and_stay"}));
  running.wait_for("ready", 2);
  const json seen = look_until(running, [](const json& now) { return !now["notes"].empty(); });
  EXPECT_THAT(std::string(seen["notes"][0]),
              HasSubstr(" has failed: ranks called different collectives: rank 0 #1 all_reduce f32[3] sum, rank 1 #1"));
}

TEST(Top, OfSeveralJobsAsksForOne) {
  Command first(job(2, {"run_for_ever"}));
  Command second(job(2, {"run_for_ever"}));
  first.wait_for("running", 2);
  second.wait_for("running", 2);
  const Result result = serried({"top", "--once"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, AllOf(HasSubstr(" jobs run here:\n"), HasSubstr("launcher " + std::to_string(first.pid())),
                                HasSubstr("launcher " + std::to_string(second.pid())),
                                HasSubstr("\n  fix: name one: serried top ")));
}

TEST(Top, AJobThatHasEndedIsUnknown) {
  Command running(job(2, {"sum", "shm"}));
  const std::string launcher = std::to_string(running.pid());
  running.finish();
  const Result result = serried({"top", "--once", launcher});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, StartsWith("[top] no job here is called \"" + launcher + "\""));
}

TEST(Top, AJobThatIsKilledMeanwhileLeavesNothing) {
  for (int round = 0; round < 5; ++round) {
    Command running(job(2, {"run_for_ever"}));
    running.wait_for("running", 2);
    Command looking({"top", "--once", "--interval", "0.3", std::to_string(running.pid())});
    running.send(SIGKILL);
    const Result result = looking.finish();
    EXPECT_TRUE(result.exit_code == 0 || result.exit_code == 1) << result.exit_code;
    EXPECT_TRUE(looking.nothing_left());
    EXPECT_TRUE(running.nothing_left());
  }
}

TEST(Top, MistakesAreNamed) {
  const Result option = serried({"top", "--twice"});
  EXPECT_EQ(option.exit_code, 2);
  EXPECT_THAT(option.err, HasSubstr("fix: serried top --help lists the options"));
  for (const std::string seconds : {"0", "-1", "nan", "inf", "1e9", "soon"}) {
    const Result interval = serried({"top", "--interval", seconds});
    EXPECT_EQ(interval.exit_code, 2) << seconds;
    EXPECT_THAT(interval.err, HasSubstr("--interval: takes 0.1 to 3600 seconds, not " + seconds));
  }
  EXPECT_EQ(serried({"top", "one", "two"}).exit_code, 2);
  EXPECT_THAT(serried({"top", "--help"}).out, HasSubstr("q or Ctrl-C ends it"));
}

/// `serried top` on a terminal of its own.
class OnTerminal {
 public:
  explicit OnTerminal(const std::string& job, const char* kind = "xterm")
      : master_(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
    EXPECT_EQ(::grantpt(master_.get()), 0);
    EXPECT_EQ(::unlockpt(master_.get()), 0);
    resize(80, 24);
    terminal_.reset(::open(::ptsname(master_.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
    EXPECT_EQ(::tcgetattr(terminal_.get(), &before_), 0);
    const std::string path = ::ptsname(master_.get());
    pid_ = ::fork();
    if (pid_ == 0) {
      ::setsid();
      const int fd = ::open(path.c_str(), O_RDWR);  // becomes the controlling terminal
      for (int standard : {0, 1, 2}) ::dup2(fd, standard);
      ::setenv("TERM", kind, 1);
      ::execl(SERRIED_BINARY, "serried", "top", "--interval", "0.1", job.c_str(), nullptr);
      ::_exit(127);
    }
  }
  ~OnTerminal() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }

  void resize(unsigned short width, unsigned short height) {
    const winsize size{.ws_row = height, .ws_col = width, .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(::ioctl(master_.get(), TIOCSWINSZ, &size), 0);
  }

  void press(char key) { EXPECT_EQ(::write(master_.get(), &key, 1), 1); }

  /// Reads until `text` has come since the last call; at most 20 s.
  void wait_for(const std::string& text) {
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    while (drawn_.find(text) == std::string::npos && Clock::now() < deadline) read_some();
    EXPECT_THAT(drawn_, HasSubstr(text));
    drawn_.erase(0, drawn_.find(text));
  }

  /// Its exit code.
  int finish() {
    int status = 0;
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    pid_t ended = 0;
    while ((ended = ::waitpid(pid_, &status, WNOHANG)) == 0 && Clock::now() < deadline) read_some();
    EXPECT_EQ(ended, pid_);
    if (ended == pid_) pid_ = -1;
    while (read_some()) continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  const std::string& drawn() const { return drawn_; }

  bool is_as_before() const {
    termios now{};
    return ::tcgetattr(terminal_.get(), &now) == 0 && now.c_lflag == before_.c_lflag && now.c_iflag == before_.c_iflag;
  }

 private:
  bool read_some() {
    pollfd entry{.fd = master_.get(), .events = POLLIN, .revents = 0};
    if (::poll(&entry, 1, 20) <= 0) return false;
    char buffer[4096];
    const ssize_t count = ::read(master_.get(), buffer, sizeof buffer);
    if (count > 0) drawn_.append(buffer, size_t(count));
    return count > 0;
  }

  launch::Fd master_;
  launch::Fd terminal_;
  termios before_{};
  pid_t pid_ = -1;
  std::string drawn_;
};

TEST(TopOnATerminal, DrawsOnTheOtherScreenUntilQ) {
  Command running(job(2, {"run_for_ever"}));
  running.wait_for("running", 2);
  OnTerminal screen(std::to_string(running.pid()));
  screen.wait_for("\x1b[?1049h\x1b[?25l");
  screen.wait_for("all_reduce f32[1000]");
  EXPECT_FALSE(screen.is_as_before());
  screen.resize(200, 50);
  screen.wait_for("group");
  screen.press('q');
  EXPECT_EQ(screen.finish(), 0);
  EXPECT_THAT(screen.drawn(), HasSubstr("\x1b[?25h\x1b[?1049l"));
  EXPECT_TRUE(screen.is_as_before());
}

TEST(TopOnATerminal, CtrlCGivesTheTerminalBack) {
  Command running(job(2, {"run_for_ever"}));
  running.wait_for("running", 2);
  OnTerminal screen(std::to_string(running.pid()));
  screen.wait_for("all_reduce f32[1000]");
  screen.press('\x03');
  EXPECT_EQ(screen.finish(), 0);
  EXPECT_THAT(screen.drawn(), HasSubstr("\x1b[?1049l"));
  EXPECT_TRUE(screen.is_as_before());
}

TEST(TopOnATerminal, EndsWithTheJob) {
  Command running(job(2, {"run_for_ever"}));
  running.wait_for("running", 2);
  OnTerminal screen(std::to_string(running.pid()));
  screen.wait_for("all_reduce f32[1000]");
  running.send(SIGINT);
  running.finish();
  EXPECT_EQ(screen.finish(), 0);
  EXPECT_THAT(screen.drawn(), HasSubstr(" has ended\r\n"));
  EXPECT_TRUE(screen.is_as_before());
}

TEST(TopOnATerminal, OneWithoutEscapesGetsOneTable) {
  Command running(job(2, {"run_for_ever"}));
  running.wait_for("running", 2);
  OnTerminal screen(std::to_string(running.pid()), "dumb");
  EXPECT_EQ(screen.finish(), 0);
  EXPECT_THAT(screen.drawn(), AllOf(HasSubstr("all_reduce f32[1000]"), Not(HasSubstr("\x1b"))));
}

/// Runs `serried top` as the user nobody: its exit code and what it printed to stderr.
std::pair<int, std::string> top_as_nobody(const std::string& job) {
  // The build folder may be closed to others: the open file is not.
  const launch::Fd binary(::open(SERRIED_BINARY, O_RDONLY));
  const std::string program = "/proc/self/fd/" + std::to_string(binary.get());
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(99);
    ::execl(program.c_str(), "serried", "top", "--once", job.c_str(), nullptr);
    ::_exit(98);
  }
  ::close(ends[1]);
  const launch::Fd read(ends[0]);
  std::string text;
  char buffer[4096];
  for (ssize_t count; (count = ::read(read.get(), buffer, sizeof buffer)) > 0;) text.append(buffer, size_t(count));
  int status = 0;
  ::waitpid(child, &status, 0);
  return {WEXITSTATUS(status), text};
}

TEST(Top, AnotherUserSeesNothing) {
  Command running(job(2, {"run_for_ever"}));
  running.wait_for("running", 2);
  const auto [exit_code, said] = top_as_nobody(std::to_string(running.pid()));
  if (::geteuid() != 0) {  // who is not root cannot become another user: only that it cannot is checked
    EXPECT_EQ(exit_code, 99);
    return;
  }
  EXPECT_EQ(exit_code, 1);
  EXPECT_EQ(said, "[top] process " + std::to_string(running.pid()) +
                      " belongs to user 0, and this is user 65534\n"
                      "  fix: ask that user, or root: nobody else can look at a job\n");
}

}  // namespace
}  // namespace serried::testing
