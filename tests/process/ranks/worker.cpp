// A rank for the tests of this folder: `worker <mode> [arguments]`, started by `serried run`.
#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "serried/base/trace.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/group.h"
#include "serried/comm/groups/ranks.h"
#include "tests/process/ranks/worker_output.h"
#include "tests/support/listening.h"

namespace {

using serried::Group;
using namespace std::chrono_literals;
using serried::testing::now_ms;
using serried::testing::say;

int open_files() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

std::map<std::string, std::function<void(const Group&)>> collectives() {
  static const at::Tensor x = at::ones({1 << 20});
  return {
      {"all_reduce", [](const Group& g) { serried::all_reduce_(x, g, c10d::ReduceOp::MAX); }},
      {"all_gather", [](const Group& g) { serried::all_gather(x, g); }},
      {"reduce_scatter", [](const Group& g) { serried::reduce_scatter(x, g); }},
      {"all_to_all", [](const Group& g) { serried::all_to_all(x, g); }},
      {"broadcast", [](const Group& g) { serried::broadcast_(x, g); }},
      {"barrier", [](const Group& g) { serried::barrier(g); }},
  };
}

/// Rank 1 dies while all ranks are in `name`; the others say what they got, and how long after the death.
void die_in(const std::string& name, const std::string& death_note) {
  // The rendezvous keeps its connection to the store while the process lives; all else must go with the group.
  serried::barrier(serried::new_group("shm"));
  const int before = open_files();
  {
    const Group group = serried::new_group("shm", {.timeout = 20s});
    const int rank = group->getRank();
    const auto call = collectives().at(name);
    for (int i = 0; i < 3; ++i) call(group);
    std::thread killer;
    if (rank == 1) {
      killer = std::thread([&] {
        std::ofstream(death_note) << now_ms() << std::flush;
        kill(getpid(), SIGKILL);
      });
    }
    try {
      while (true) call(group);
    } catch (const c10::DistBackendError& error) {
      int64_t died_at = 0;
      std::ifstream(death_note) >> died_at;
      say(c10::str("raised after ", now_ms() - died_at, " ms: ", error.msg()));
    }
    try {
      call(group);
    } catch (const c10::DistBackendError& error) {
      say(c10::str("later: ", error.msg()));
    }
  }
  say(c10::str("files: ", open_files() <= before ? "as before" : "left open"));
}

/// Rank 1 stops; the others time out and say who is missing.
void stop() {
  const Group group = serried::new_group("shm");
  serried::barrier(group);
  if (group->getRank() == 1) raise(SIGSTOP);
  at::Tensor x = at::ones({512});
  try {
    serried::all_reduce_(x, group, {.timeout = 500ms});
  } catch (const c10::DistBackendError& error) {
    say(c10::str("raised: ", error.msg()));
    // Else the launcher would wait for the stopped rank.
    _exit(4);
  }
}

void sum(const std::string& backend) {
  const Group group = serried::new_group(backend);
  at::Tensor x = at::full({5}, group->getRank() + 1);
  serried::all_reduce_(x, group);
  say(c10::str("sum ", x[0].item<int64_t>(), " on ", group->getBackendName()));
}

/// Rank 0 is done first; the others still need the store.
void leave_early() {
  const Group world = serried::new_group();
  const Group rest = serried::split_group(world, {{0}, {1, 2}});
  if (world->getRank() == 0) world->getStore()->add("process of 0", getpid());
  serried::barrier(world);
  if (world->getRank() == 0) return;
  // After rank 0 has returned from main, the store is still there.
  const int process_of_0 = int(world->getStore()->add("process of 0", 0));
  while (!serried::detail::process_has_ended(process_of_0)) std::this_thread::sleep_for(1ms);
  const Group again = serried::split_group(rest, {{0, 1}});
  serried::barrier(again);
  say("still met");
}

/// Fails in the first attempt, after all have met.
void fail_once() {
  const Group group = serried::new_group();
  serried::barrier(group);
  if (std::getenv("TORCHELASTIC_RESTART_COUNT") == std::string("0") && group->getRank() == 2) _exit(5);
  at::Tensor x = at::ones({3});
  serried::all_reduce_(x, group);
  say(c10::str("sum ", x[0].item<float>()));
}

/// All meet, then all but `absent` come to an all_reduce.
void leave_out(const std::string& backend, int absent) {
  const Group group = serried::new_group(backend);
  serried::barrier(group);
  say("ready");
  if (group->getRank() == absent) pause();
  at::Tensor x = at::ones({512});
  serried::all_reduce_(x, group);
}

/// All but `absent` make a group.
void stay_away(const std::string& absent) {
  say("ready");
  if (std::getenv("RANK") == absent) pause();
  serried::new_group();
}

/// Rank 0 waits for what rank 1 does not send.
void receive(const std::string& backend) {
  const Group group = serried::new_group(backend);
  say("ready");
  if (group->getRank() == 1) pause();
  at::Tensor x = at::ones({3});
  serried::recv(x, group, {.peer = 1});
}

/// Ranks of one process; the last does not come.
void leave_out_a_thread() {
  serried::run_ranks(3, [](const Group& group) {
    if (group->getRank() == 2) pause();
    serried::barrier(group);
  });
}

/// The group fails, and its ranks live on.
void fail_and_stay() {
  const Group group = serried::new_group("shm");
  at::Tensor x = at::ones({3 + group->getRank()});
  try {
    serried::all_reduce_(x, group);
  } catch (const c10::DistBackendError&) {
    say("ready");
    pause();
  }
}

void run_for_ever() {
  const Group group = serried::new_group();
  at::Tensor x = at::ones({1000});
  say("running");
  while (true) serried::all_reduce_(x, group, c10d::ReduceOp::AVG);
}

std::string attempt(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.msg();
  }
  return "fine";
}

/// Rank 0 dies or stops; the others make groups of themselves.
void lose_rank_0(const std::string& how) {
  const Group world = serried::new_group("shm", {.timeout = 20s});
  const Group rest = serried::split_group(world, {{0}, {1, 2}});
  serried::barrier(world);
  if (world->getRank() == 0) {
    raise(how == "kill" ? SIGKILL : SIGSTOP);
    _exit(4);  // the launcher lets it go on to end it
  }
  at::Tensor x = at::ones({3});
  try {
    serried::all_reduce_(x, world, {.timeout = how == "kill" ? 20000ms : 300ms});
  } catch (const c10::DistBackendError& error) {
    say(c10::str("lost: ", error.msg()));
  }
  const Group again = serried::split_group(rest, {{1, 0}});
  at::Tensor y = at::full({3}, world->getRank());
  serried::all_reduce_(y, again);
  say(c10::str("sum of the rest ", y[0].item<int64_t>()));
  serried::barrier(again);
  // Else the launcher would wait for the stopped rank.
  _exit(4);
}

/// Ranks meet at a port, where a stranger can come too.
serried::GroupOptions at_master_port() {
  serried::GroupOptions options;
  options.init_method = std::string("tcp://127.0.0.1:") + std::getenv("MASTER_PORT");
  options.rank = std::stoi(std::getenv("RANK"));
  options.world_size = std::stoi(std::getenv("WORLD_SIZE"));
  options.timeout = 30s;
  return options;
}

/// A stranger writes to the store while rank 0 reads `pipe`; then the ranks use what they have and make new groups.
void meet_a_stranger(const std::string& pipe) {
  const serried::GroupOptions options = at_master_port();
  const Group world = serried::new_group("shm", options);
  const Group gloo = serried::new_group("gloo", options);
  serried::split_group(world, {{0, 1, 2}});
  serried::barrier(world);
  if (world->getRank() == 0) {
    say("ready");
    std::string word;
    std::ifstream(pipe) >> word;
  }
  serried::barrier(world);
  for (const Group& group : {world, gloo}) {
    at::Tensor x = at::full({5}, group->getRank() + 1);
    serried::all_reduce_(x, group);
    say(c10::str("sum ", x[0].item<int64_t>(), " on ", group->getBackendName()));
  }
  say("split: " + attempt([&] { serried::split_group(world, {{0, 1, 2}}); }));
  say("new: " + attempt([&] { serried::new_group("shm", options); }));
  serried::barrier(world);
  say("done");
}

/// Where this process listens.
void listening(const std::string& backend, const std::string& where) {
  const Group group = serried::new_group(backend, where == "port" ? at_master_port() : serried::GroupOptions());
  serried::barrier(group);
  for (const auto& [port, address] : serried::testing::listening_sockets()) say("listens at " + address);
  serried::barrier(group);
}

void trace() {
  const Group group = serried::new_group();
  serried::trace::Span span("step", "test");
  serried::barrier(group);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  // The launcher ends the survivors of a death at once; these tests want to hear them first.
  if (mode == "die_in" || mode == "stop" || mode == "lose_rank_0") signal(SIGTERM, SIG_IGN);
  at::set_num_threads(1);
  try {
    if (mode == "die_in") die_in(argv[2], argv[3]);
    if (mode == "stop") stop();
    if (mode == "sum") sum(argv[2]);
    if (mode == "lose_rank_0") lose_rank_0(argv[2]);
    if (mode == "leave_early") leave_early();
    if (mode == "fail_once") fail_once();
    if (mode == "run_for_ever") run_for_ever();
    if (mode == "leave_out") leave_out(argv[2], std::stoi(argv[3]));
    if (mode == "stay_away") stay_away(argv[2]);
    if (mode == "receive") receive(argv[2]);
    if (mode == "leave_out_a_thread") leave_out_a_thread();
    if (mode == "fail_and_stay") fail_and_stay();
    if (mode == "trace") trace();
    if (mode == "meet_a_stranger") meet_a_stranger(argv[2]);
    if (mode == "listening") listening(argv[2], argv[3]);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.msg().c_str());
    return 4;
  }
  return 0;
}
