// A rank for the tests of backends: `backend_worker <mode> <backend> [arguments]`, started by `serried run`.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/comm/groups/group.h"

namespace {

using serried::Group;
using Tensors = std::vector<at::Tensor>;
using namespace std::chrono_literals;

/// One line, one write: lines of several ranks never mix.
void say(const std::string& text) {
  const std::string line = text + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(9);
}

/// The first line of what `call` raises.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.msg().substr(0, error.msg().find('\n'));
  }
  return "no error";
}

void expect_sum(const Group& group, const std::string& when) {
  for (const int64_t size : {5, 200'000}) {
    at::Tensor x = at::full({size}, group->getRank() + 1);
    serried::all_reduce_(x, group);
    const int64_t n = group->getSize();
    if (!x.eq(n * (n + 1) / 2).all().item<bool>()) say("wrong sum " + when);
  }
}

/// What a forked child is told when it touches the group.
void use_as_child(const Group& group, const c10::intrusive_ptr<c10d::Work>& open) {
  at::Tensor x = at::ones({5});
  Tensors tensors{x};
  say("child: " + error_of([&] { serried::all_reduce_(x, group); }));
  say("child: " + error_of([&] { group->allreduce(tensors)->wait(); }));
  say("child: " + error_of([&] { serried::barrier(group); }));
  say("child: " + error_of([&] { serried::send(x, group, {.peer = (group->getRank() + 1) % group->getSize()}); }));
  say("child: " + error_of([&] { group->abort(); }));
  say("child: " + error_of([&] { group->shutdown(); }));
  say("child: " + error_of([&] { serried::split_group(group, {{0}, {1}}); }));
  say("child: " + error_of([&] { serried::new_group("gloo"); }));
  say("child: " + error_of([&] { open->wait(); }));
  // Finding one ends a group, but not that of the parent.
  serried::watch::set_nan_check(group, serried::watch::NanCheck::raise);
  say("child: " + error_of([&] { serried::all_reduce_(at::full({5}, NAN), group); }));
}

/// Every rank forks amid a receive that is open; the child ends as `how` says, and the parent goes on.
int fork_in(const std::string& backend, const std::string& how) {
  static Group kept;  // destroyed after main, in the child as well
  kept = serried::new_group(backend, {.timeout = 20s});
  const Group group = serried::new_group(backend, {.timeout = 20s});
  const int next = (group->getRank() + 1) % group->getSize(),
            previous = (next + group->getSize() - 2) % group->getSize();
  expect_sum(group, "before");
  expect_sum(kept, "before");
  Tensors received{at::zeros({3})}, reduced{at::ones({100'000})};
  auto open = group->recv(received, previous, 1);
  auto done = group->allreduce(reduced);
  done->wait();
  const pid_t child = fork();
  if (child == 0) {
    if (how == "use") use_as_child(group, open);
    if (how == "exit") std::exit(7);
    if (how == "_exit") _exit(7);
    return 7;
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect_sum(group, "after");
  expect_sum(kept, "after");
  Tensors sent{at::full({3}, 4.f)};
  group->send(sent, next, 1)->wait();
  open->wait();
  serried::barrier(group);
  const Group later = serried::split_group(group, {{0, 1}});
  expect_sum(later, "later");
  say(c10::str("parent: ", received[0][0].item<float>(), ", child ",
               WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status)));
  return 0;
}

/// Ranks 1 and 2 end without a word while rank 0 waits for anybody.
void wait_for_anybody(const std::string& backend) {
  const Group group = serried::new_group(backend, {.timeout = 20s});
  serried::barrier(group);
  if (group->getRank() > 0) _exit(0);
  Tensors tensors{at::zeros({3})};
  say("raised: " + error_of([&] { group->recvAnysource(tensors, 4)->wait(); }));
}

/// A call whose result every rank checks; `step` makes each of them different.
using CheckedCall = std::function<bool(const Group&, int64_t size, int step)>;

at::Tensor filled(int64_t size, int rank, int step) {
  return at::full({size}, float(10 * rank + step % 10));
}

float sum_over(const Group& g, int step) {
  float sum = 0;
  for (int r = 0; r < g->getSize(); ++r) sum += float(10 * r + step % 10);
  return sum;
}

bool is_row_of_all(const at::Tensor& all, const Group& g, int64_t size, int step) {
  bool right = true;
  for (int r = 0; r < g->getSize(); ++r) right &= all.narrow(0, r * size, size).equal(filled(size, r, step));
  return right;
}

std::map<std::string, CheckedCall> checked_calls() {
  return {
      {"all_reduce",
       [](const Group& g, int64_t size, int step) {
         return serried::all_reduce(filled(size, g->getRank(), step), g).eq(sum_over(g, step)).all().item<bool>();
       }},
      {"in_heap",
       [](const Group& g, int64_t size, int step) {
         static std::map<int64_t, at::Tensor> blocks;
         at::Tensor& x = blocks[size];
         if (!x.defined()) x = g->getBackend(at::kCPU)->allocateTensor(size, at::kFloat);
         x.fill_(float(10 * g->getRank() + step % 10));
         serried::all_reduce_(x, g);
         return x.eq(sum_over(g, step)).all().item<bool>();
       }},
      {"all_gather",
       [](const Group& g, int64_t size, int step) {
         return is_row_of_all(serried::all_gather(filled(size, g->getRank(), step), g), g, size, step);
       }},
      {"reduce_scatter",
       [](const Group& g, int64_t size, int step) {
         return serried::reduce_scatter(filled(size, g->getRank(), step), g).eq(sum_over(g, step)).all().item<bool>();
       }},
      {"all_to_all",
       [](const Group& g, int64_t size, int step) {
         return is_row_of_all(serried::all_to_all(filled(size * g->getSize(), g->getRank(), step), g), g, size, step);
       }},
      {"broadcast",
       [](const Group& g, int64_t size, int step) {
         at::Tensor x = filled(size, g->getRank(), step);
         serried::broadcast_(x, g, {.src = 2});
         return x.equal(filled(size, 2, step));
       }},
      {"reduce",
       [](const Group& g, int64_t size, int step) {
         Tensors tensors{filled(size, g->getRank(), step)};
         g->reduce(tensors, {})->wait();
         return g->getRank() != 0 || tensors[0].eq(sum_over(g, step)).all().item<bool>();
       }},
      {"gather",
       [](const Group& g, int64_t size, int step) {
         Tensors inputs{filled(size, g->getRank(), step)};
         std::vector<Tensors> outputs;
         const at::Tensor all = at::zeros({g->getSize() * size});
         if (g->getRank() == 0) outputs = {all.chunk(g->getSize())};
         g->gather(outputs, inputs, {})->wait();
         return g->getRank() != 0 || is_row_of_all(all, g, size, step);
       }},
      {"scatter",
       [](const Group& g, int64_t size, int step) {
         Tensors outputs{at::zeros({size})};
         std::vector<Tensors> inputs;
         if (g->getRank() == 0) inputs.emplace_back();
         for (int r = 0; r < g->getSize() && !inputs.empty(); ++r) inputs[0].push_back(filled(size, r, step));
         g->scatter(outputs, inputs, {})->wait();
         return outputs[0].equal(filled(size, g->getRank(), step));
       }},
      {"barrier",
       [](const Group& g, int64_t, int) {
         serried::barrier(g);
         return true;
       }},
      {"ring",
       [](const Group& g, int64_t size, int step) {
         const int n = g->getSize(), next = (g->getRank() + 1) % n, previous = (g->getRank() + n - 1) % n;
         Tensors sent{filled(size, g->getRank(), step)}, received{at::zeros({size})};
         auto sending = g->send(sent, next, 0);
         g->recv(received, previous, 0)->wait();
         sending->wait();
         return received[0].equal(filled(size, previous, step));
       }},
  };
}

/// Rank 1 is stopped while all ranks call `name` again and again; rank 0 wakes it when it has given up.
void stop_in(const std::string& backend, const std::string& name) {
  const Group group = serried::new_group(backend, {.timeout = 20s});
  at::Tensor pid = at::full({1}, getpid(), at::kLong);
  const at::Tensor pids = serried::all_gather(pid, group);
  const auto call = checked_calls().at(name);
  for (int step = 0; step < 4; ++step) call(group, step % 2 == 0 ? 100 : 100'000, step);
  group->setTimeout(1500ms);
  std::thread stopper;
  if (group->getRank() == 1) stopper = std::thread([] { kill(getpid(), SIGSTOP); });
  bool right = true;
  const std::string error = error_of([&] {
    for (int step = 0;; ++step) right &= call(group, step % 2 == 0 ? 100 : 100'000, step);
  });
  if (stopper.joinable()) stopper.join();
  say(c10::str(right ? "right" : "wrong", ", then: ", error));
  if (group->getRank() == 0) kill(pid_t(pids[1].item<int64_t>()), SIGCONT);
}

/// Groups in static variables, with messages that nobody waits for.
void leave_open(const std::string& backend) {
  static const Group group = serried::new_group(backend, {.timeout = 20s});
  static Tensors received{at::zeros({3})}, reduced{at::ones({100'000})};
  static const auto receive = group->recv(received, (group->getRank() + 1) % group->getSize(), 1);
  static const auto work = group->allreduce(reduced);
  serried::barrier(group);
  say("left");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const std::string backend = argc > 2 ? argv[2] : "";
  at::set_num_threads(1);
  try {
    if (mode == "fork") return fork_in(backend, argv[3]);
    if (mode == "anybody") wait_for_anybody(backend);
    if (mode == "stop_in") stop_in(backend, argv[3]);
    if (mode == "leave_open") leave_open(backend);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.msg().c_str());
    return 4;
  }
  return 0;
}
