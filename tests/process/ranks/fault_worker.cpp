// A rank that makes one kind of call over and over, while one of the ranks is killed, stopped, slowed or starved:
// `fault_worker <call> <fault> <backend> <victim> <step> <delay_us> <timeout_ms>`, started by `serried run`.
#include <dirent.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>

#include "serried/serried.h"
#include "tests/process/ranks/fault_steps.h"

namespace serried::testing {
namespace {

using namespace std::chrono_literals;

constexpr int kStepsAfterFault = 5;  // where nothing has to fail
constexpr auto kPause = 200ms;       // of a slow rank, less than any timeout

struct Plan {
  std::string call, fault, backend;
  int victim;
  int step;
  std::chrono::microseconds delay;  // from the beginning of the step to the fault
  std::chrono::milliseconds timeout;

  bool must_fail() const { return fault == "kill" || fault == "stop"; }
};

/// One line, one write: lines of several ranks never mix.
void say(std::string text, int fd = STDOUT_FILENO) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  text += '\n';
  if (write(fd, text.data(), text.size()) < 0) _exit(9);
}

int open_files() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

/// How many more there are than `before`, once the connections of ranks that look at rank 0's store have come and gone.
int files_left_open(int before) {
  const auto deadline = std::chrono::steady_clock::now() + 5s;
  int left = open_files() - before;
  while (left > 0 && std::chrono::steady_clock::now() < deadline) left = open_files() - before;
  return left;
}

void limit_memory(rlim_t bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = std::min(bytes, limit.rlim_max);
  setrlimit(RLIMIT_AS, &limit);
}

constexpr size_t kLargeBytes = 1 << 16;

/// Before any thread is there. All are to feel the lack of memory, so they share one heap; and the stack, which cannot
/// grow then either, is made as large as it will be.
void prepare_lack_of_memory() {
  mallopt(M_ARENA_MAX, 1);
  constexpr size_t kStackBytes = 1 << 20;
  volatile char stack[kStackBytes];
  for (size_t i = 0; i < kStackBytes; i += 1024) stack[i] = 0;
}

/// From now on the system gives nothing, and the heap has no room for tensors of more than kLargeBytes.
void lack_memory() {
  limit_memory(0);
  static void* taken = nullptr;  // a list through the blocks themselves
  while (void* block = std::malloc(kLargeBytes)) taken = new (block) void*(taken);
}

void begin(const std::string& fault) {
  if (fault == "kill") kill(getpid(), SIGKILL);
  if (fault == "stop") kill(getpid(), SIGSTOP);
  if (fault == "memory") lack_memory();
  if (fault != "slow") return;
  const pid_t self = getpid();
  if (fork() == 0) {
    // Only calls that are safe in the child of a process with threads.
    usleep(useconds_t(std::chrono::microseconds(kPause).count()));
    kill(self, SIGCONT);
    _exit(0);
  }
  kill(self, SIGSTOP);
}

/// The text of the error that ends the steps; empty where none does.
std::string run_steps(const Plan& plan) {
  std::thread injector;
  std::string text;
  try {
    const Group group = new_group(plan.backend, {.timeout = plan.timeout});
    const FaultStep step = make_fault_step(plan.call, group);
    for (int i = 0; plan.must_fail() || i < plan.step + kStepsAfterFault; ++i) {
      if (group->getRank() == plan.victim && i == plan.step) {
        injector = std::thread([&] {
          std::this_thread::sleep_for(plan.delay);
          begin(plan.fault);
        });
      }
      step(i);
    }
    if (injector.joinable()) injector.join();
    limit_memory(RLIM_INFINITY);
    // Of a rank that fails after the last step has communicated the others hear here.
    barrier(group);
  } catch (const WrongResult& error) {
    say(c10::str("WRONG: ", error.what()));
    _exit(9);
  } catch (const c10::Error& error) {
    limit_memory(RLIM_INFINITY);
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    limit_memory(RLIM_INFINITY);
    text = error.what();
  }
  if (injector.joinable()) injector.join();
  limit_memory(RLIM_INFINITY);
  return text;
}

int run(const Plan& plan) {
  // The rendezvous keeps its connection to the store while the process lives; all else must go with the group.
  barrier(new_group(plan.backend, {.timeout = 20s}));
  const int before = open_files();
  const std::string text = run_steps(plan);
  const int left = files_left_open(before);
  if (left > 0) say(c10::str("LEFT OPEN: ", left, " files"));
  if (text.empty()) {
    say("fine");
    return 0;
  }
  say("raised: " + text);
  say(text, STDERR_FILENO);
  return 4;
}

}  // namespace
}  // namespace serried::testing

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  signal(SIGTERM, SIG_IGN);  // the launcher ends the others as soon as one has failed: these are to be heard first
  serried::testing::prepare_lack_of_memory();
  at::set_num_threads(1);
  return serried::testing::run({.call = argv[1],
                                .fault = argv[2],
                                .backend = argv[3],
                                .victim = std::stoi(argv[4]),
                                .step = std::stoi(argv[5]),
                                .delay = std::chrono::microseconds(std::stoi(argv[6])),
                                .timeout = std::chrono::milliseconds(std::stoi(argv[7]))});
}
