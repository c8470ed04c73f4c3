// A rank for the tests between hosts: `worker <mode> <backend>[:<wire>]`, started by `serried run`.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/group.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/dtensor.h"
#include "tests/hosts/every_collective.h"
#include "tests/process/ranks/worker_output.h"

namespace {

using serried::Group;
using serried::testing::now_ms;
using serried::testing::say;
using namespace std::chrono_literals;

void sum(const Group& group) {
  at::Tensor x = at::full({5}, group->getRank() + 1);
  serried::all_reduce_(x, group);
  say(c10::str("sum ", x[0].item<int64_t>(), " on ", group->getBackendName()));
}

/// With the times, of a clock that all hosts have: when the call began, and now.
void say_raised(const c10::Error& error, int64_t began_ms) {
  say(c10::str("raised: ", error.msg().substr(0, error.msg().find('\n')), " [", began_ms, " to ", now_ms(), " ms]"));
}

void say_what_it_raises(const std::function<void()>& fn) {
  const int64_t began_ms = now_ms();
  try {
    fn();
  } catch (const c10::Error& error) {
    say_raised(error, began_ms);
  }
}

/// Rank 0 comes with another shape than the rest.
void mismatch(const Group& group) {
  at::Tensor x = at::ones({group->getRank() == 0 ? 1000 : 300});
  say_what_it_raises([&] { serried::all_reduce_(x, group); });
}

/// The same so often, each in a group of its own; says how long the slowest took to be known.
void mismatches(const Group& group, int count) {
  int64_t slowest_ms = 0;
  int raised = 0;
  for (int i = 0; i < count; ++i) {
    const Group used_up = serried::new_group("hierarchical", {.timeout = 10s});
    at::Tensor x = at::ones({group->getRank() == 0 ? 1000 : 300});
    serried::barrier(group);
    const int64_t began_ms = now_ms();
    try {
      serried::all_reduce_(x, used_up);
    } catch (const c10::Error&) {
      ++raised;
      slowest_ms = std::max(slowest_ms, now_ms() - began_ms);
    }
    serried::barrier(group);
  }
  say(c10::str(raised, " mismatches raised, the slowest after ", slowest_ms, " ms"));
}

/// Rank 0 calls another collective than the rest.
void other_kind(const Group& group) {
  at::Tensor x = at::ones({300});
  say_what_it_raises([&] { group->getRank() == 0 ? serried::broadcast_(x, group) : serried::all_reduce_(x, group); });
}

/// Rank 3 calls two collectives the other way round.
void other_order(const Group& group) {
  at::Tensor x = at::ones({300}), y = at::ones({100'000});
  say_what_it_raises([&] {
    serried::all_reduce_(group->getRank() == 3 ? y : x, group);
    serried::all_reduce_(group->getRank() == 3 ? x : y, group);
  });
}

/// Rank 3 does not come until the others have given up.
void absent(const Group& group) {
  const Group impatient = serried::new_group("auto", {.timeout = 2s, .backend_options = {}});
  serried::barrier(impatient);
  if (group->getRank() == 3) {
    while (impatient->getBackend(at::kCPU)->getError() == c10d::ErrorType::SUCCESS) std::this_thread::sleep_for(1ms);
    return;
  }
  at::Tensor x = at::ones({300});
  say_what_it_raises([&] { serried::all_reduce_(x, impatient); });
}

/// Rank 3 is gone before the others have what they wait for. Its launcher ends the job: they find out before.
void killed(const Group& group) {
  ::signal(SIGTERM, SIG_IGN);
  at::Tensor x = at::ones({1'000'000});
  serried::all_reduce_(x, group);
  if (group->getRank() == 3) {
    say(c10::str("rank 3 dies [", now_ms(), " to ", now_ms(), " ms]"));
    ::kill(::getpid(), SIGKILL);
  }
  const int64_t began_ms = now_ms();
  try {
    serried::all_reduce_(x, group);
  } catch (const c10::Error& error) {
    say_raised(error, began_ms);
    throw;
  }
}

/// Rank 3 does not come, until the others give up.
void missing(const Group& group) {
  serried::barrier(group);
  if (group->getRank() == 3) ::pause();
  at::Tensor x = at::ones({512});
  serried::all_reduce_(x, group, {.timeout = 2s});
}

/// The collective `name` of 4 MiB; the result of the victim is written to `out` from its first element on.
void call(const std::string& name, const Group& group, at::Tensor& out) {
  const int64_t n = 1 << 20;
  std::vector<at::Tensor> outs{out};
  if (name == "broadcast") serried::broadcast_(out, group);
  if (name == "all_gather") serried::all_gather_into(out, at::ones({n / group->getSize()}), group);
  if (name == "all_to_all") serried::all_to_all_into(out, at::ones({n}), group);
  if (name == "all_reduce") group->allreduce(outs)->wait();
  if (name == "reduce") group->reduce(outs, {.reduceOp = c10d::ReduceOp::SUM, .rootRank = 3})->wait();
  if (name == "reduce_scatter") serried::reduce_scatter_into(out, at::ones({n * 4}), group);
  if (name == "scatter") {
    std::vector<std::vector<at::Tensor>> inputs;
    if (group->getRank() == 0) inputs.emplace_back(size_t(group->getSize()), at::ones({n}));
    group->scatter(outs, inputs)->wait();
  }
}

/// The victim dies as soon as some of what it is to get has come: the rest of it is on its way, over a slow link.
void killed_in(const std::string& name, const Group& group) {
  ::signal(SIGTERM, SIG_IGN);
  const int victim = name == "broadcast" || name == "all_gather" ? 2 : 3;  // its neighbour gets all at once, from it
  at::Tensor out = at::full({1 << 20}, name == "broadcast" && group->getRank() == 0 ? 5.0 : -1.0);
  serried::barrier(group);
  std::thread watcher;
  if (group->getRank() == victim) {
    watcher = std::thread([first = out.mutable_data_ptr<float>()] {
      while (std::atomic_ref(*first).load() == -1.0f) std::this_thread::yield();
      ::kill(::getpid(), SIGKILL);
    });
  }
  try {
    call(name, group, out);
    serried::barrier(group);  // of some collectives a rank has its part before the others
    if (watcher.joinable()) watcher.join();
  } catch (const c10::Error& error) {
    say("raised: " + error.msg().substr(0, error.msg().find('\n')));
    if (watcher.joinable()) watcher.detach();
    throw;
  }
}

at::Tensor rough(int rank, int64_t size) {
  at::Generator generator = at::detail::createCPUGenerator(5 + rank);
  return at::randn({size}, generator).mul_(1000);
}

/// A sum over hosts beside the same sum in the order of ranks.
void bits(const Group& group, int64_t size) {
  at::Tensor x = rough(group->getRank(), size);
  at::Tensor expected = rough(0, size);
  for (int rank = 1; rank < group->getSize(); ++rank) expected = expected + rough(rank, size);
  serried::all_reduce_(x, group);
  say(at::equal(x, expected) ? "same bits" : "other bits");
}

torch::nn::Sequential make_model() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(64, 700), torch::nn::Tanh(), torch::nn::Linear(700, 1));
}

/// Four steps; `forward` sees this rank's rows of the batch.
template <class Forward>
void train(const std::vector<at::Tensor>& parameters, Forward&& forward) {
  torch::optim::SGD optimizer(parameters, 0.05);
  for (int step = 0; step < 4; ++step) {
    torch::manual_seed(100 + step);
    const at::Tensor batch = torch::randn({16, 64});
    optimizer.zero_grad();
    forward(batch).backward();
    optimizer.step();
  }
}

/// DDP over all hosts beside one process with the whole batch. Waits in between for the file "go" in FOLDER, if
/// that is set.
void ddp(const Group& group) {
  const auto loss = [](const at::Tensor& y, const at::Tensor& x) { return torch::mse_loss(y, x.sum(1, true)); };
  auto alone = make_model();
  train(alone->parameters(), [&](const at::Tensor& batch) { return loss(alone->forward(batch), batch); });
  serried::DistributedDataParallel<torch::nn::Sequential> spread(make_model(), {.process_group = group});
  if (const char* folder = std::getenv("FOLDER")) {
    say("waits");
    const std::string go = std::string(folder) + "/go";
    while (::access(go.c_str(), F_OK) != 0) std::this_thread::sleep_for(5ms);
  }
  train(spread.parameters(), [&](const at::Tensor& batch) {
    const at::Tensor mine = batch.chunk(group->getSize())[size_t(group->getRank())];
    return loss(spread(mine), mine);
  });
  bool close = true;
  for (size_t i = 0; i < alone->parameters().size(); ++i) {
    close &= at::allclose(alone->parameters()[i], spread.parameters()[i], 1e-4, 1e-6);
  }
  say(close ? "trained alike" : "trained otherwise");
}

/// Columns over all ranks of both hosts, saved twice and read as rows, from a folder that both see.
void checkpoint_of(const Group& group) {
  namespace checkpoint = serried::checkpoint;
  const serried::ProcessGroupGuard current(group);
  const std::string path = std::string(std::getenv("FOLDER")) + "/c";
  const auto mesh = serried::init_device_mesh("cpu", {group->getSize()}, {"x"}, {.group = group});
  const at::Tensor value = at::arange(1000 * 30).view({1000, 30});
  const auto columns = serried::distribute_tensor(value, mesh, {serried::Shard(1)});
  checkpoint::save(path, {{"x", columns}, {"step", 1}});
  checkpoint::async_save(path, {{"x", columns}, {"step", 2}}).wait();
  const auto rows = serried::distribute_tensor(at::zeros_like(value), mesh, {serried::Shard(0)});
  int64_t step = 0;
  checkpoint::load(path, {{"x", rows}, {"step", &step}});
  const bool is_good = step == 2 && at::equal(rows.full_tensor(), value);
  say(is_good ? "came back" : "came back otherwise");
}

}  // namespace

int main(int, char** argv) {
  const std::string mode = argv[1];
  at::set_num_threads(1);
  try {
    const std::string backend = argv[2];
    const size_t colon = std::min(backend.find(':'), backend.size());
    serried::GroupOptions options{.timeout = 10s};
    if (colon < backend.size()) options.backend_options = {{"wire", backend.substr(colon + 1)}};
    const Group group = serried::new_group(backend.substr(0, colon), options);
    if (mode == "sum") sum(group);
    if (mode == "mismatch") mismatch(group);
    if (mode.starts_with("mismatches ")) mismatches(group, std::stoi(mode.substr(11)));
    if (mode == "other_kind") other_kind(group);
    if (mode == "other_order") other_order(group);
    if (mode == "absent") absent(group);
    if (mode == "killed") killed(group);
    if (mode == "missing") missing(group);
    if (mode.starts_with("killed in ")) killed_in(mode.substr(10), group);
    if (mode == "bits") bits(group, 1'000'003);
    if (mode == "few bits") bits(group, 100'003);
    if (mode == "all bits") {
      const std::string others = serried::testing::calls_with_other_bits(group);
      say(others.empty() ? "same bits" : "other bits:" + others);
    }
    if (mode == "ddp") ddp(group);
    if (mode == "checkpoint") checkpoint_of(group);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.msg().c_str());
    return 4;
  }
  return 0;
}
