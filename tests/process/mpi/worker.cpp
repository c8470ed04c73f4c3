// A rank for the tests of the mpi backend: `worker <mode>`, started by mpirun.
#include <mpi.h>

#include <unistd.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/comm/agree/rank_texts.h"
#include "serried/serried.h"

namespace {

using namespace serried;
using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;

/// One line, one write: lines of several ranks never mix.
void say(const std::string& text) {
  const std::string line = text + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(9);
}

void say_right(bool right) {
  say(right ? "right" : "wrong");
}

/// What `call` raises, in one line.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    std::string text = error.msg();
    for (char& letter : text) letter = letter == '\n' ? '|' : letter;
    return text;
  }
  return "no error";
}

at::Tensor filled(int64_t size, int rank) {
  return at::arange(size, at::kFloat).add(100 * rank);
}

at::Tensor sum_of_all(int64_t size, int num_ranks) {
  at::Tensor sum = at::zeros({size});
  for (int r = 0; r < num_ranks; ++r) sum += filled(size, r);
  return sum;
}

/// After a failure nobody may leave before all have told theirs: Open MPI ends the job with the first that does.
void leave_together(const Group& group) {
  serried::detail::exchange({group->getStore(), group->getRank(), group->getSize(), 20s}, "leave", "leave", "");
}

bool moves_right(const Group& group) {
  const int rank = group->getRank(), size = group->getSize();
  const int64_t n = 1001;
  bool right = all_reduce(filled(n, rank), group).equal(sum_of_all(n, size));
  at::Tensor expected = at::empty({0});
  for (int r = 0; r < size; ++r) expected = at::cat({expected, filled(n, r)});
  right &= all_gather(filled(n, rank), group).equal(expected);
  const at::Tensor mine = sum_of_all(n * size, size).narrow(0, n * rank, n);
  right &= reduce_scatter(filled(n * size, rank), group).equal(mine);
  at::Tensor x = filled(n, rank);
  broadcast_(x, group, {.src = size - 1});
  right &= x.equal(filled(n, size - 1));
  at::Tensor exchanged = at::empty({0});
  for (int r = 0; r < size; ++r) exchanged = at::cat({exchanged, filled(n * size, r).narrow(0, n * rank, n)});
  right &= all_to_all(filled(n * size, rank), group).equal(exchanged);
  Tensors sent{filled(n, rank)}, received{at::zeros({n})};
  auto sending = group->send(sent, (rank + 1) % size, 5);
  group->recv(received, (rank + size - 1) % size, 5)->wait();
  sending->wait();
  return right && received[0].equal(filled(n, (rank + size - 1) % size));
}

void split() {
  const Group world = new_group("mpi", {.timeout = 20s});
  const Group part = split_group(world, {{1, 0}, {2, 3}});
  bool right = part->getRank() == (world->getRank() < 2 ? 1 - world->getRank() : world->getRank() - 2);
  right &= moves_right(part) && moves_right(world);
  // Only members come to a group of some ranks.
  if (world->getRank() < 3) {
    const Group three =
        new_group("mpi", {.timeout = 20s, .store = world->getStore(), .rank = world->getRank(), .world_size = 3});
    right &= moves_right(three);
  }
  say_right(right);
}

void pieces() {
  const Group group = new_group("mpi", {.timeout = 20s, .backend_options = {{"piece_bytes", 64}}});
  say_right(moves_right(group));
  say(error_of([] { new_group("mpi", {.backend_options = {{"piece_bytes", 1}}}); }));
}

/// Makes rank 1 look as if it ran on another host.
class OtherHost : public c10d::PrefixStore {
 public:
  using c10d::PrefixStore::PrefixStore;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    std::vector<uint8_t> changed = value;
    if (key.ends_with("host/1")) changed.push_back('x');
    c10d::PrefixStore::set(key, changed);
  }
};

/// Ranks that share no memory compare their calls before data moves.
void two_hosts() {
  const Group world = new_group("mpi", {.timeout = 20s});
  const auto store = c10::make_intrusive<OtherHost>("two_hosts", world->getStore());
  const Group group =
      new_group("mpi", {.timeout = 20s, .store = store, .rank = world->getRank(), .world_size = world->getSize()});
  say_right(moves_right(group));
  Tensors first{at::ones({5})}, second{at::ones({100'000})};
  auto one = group->allreduce(first), two = group->allreduce(second);
  two->wait();
  one->wait();
  say_right(first[0].eq(group->getSize()).all().item<bool>() && second[0].eq(group->getSize()).all().item<bool>());
  const int64_t size = group->getRank() == 1 ? 7 : 5;
  say("first: " + error_of([&] { all_reduce(at::ones({size}), group); }));
  leave_together(world);
}

/// Rank 1 calls something else; everybody is told.
void mismatch() {
  const Group group = new_group("mpi", {.timeout = 20s});
  const bool differs = group->getRank() == 1;
  say("first: " + error_of([&] { all_reduce(at::ones({differs ? 7 : 5}), group); }));
  say("then: " + error_of([&] { all_reduce(at::ones({5}), group); }));
  leave_together(group);
}

/// Ranks agree on the call, but not on the sizes that only two of them know.
void sizes() {
  const Group group = new_group("mpi", {.timeout = 20s});
  const int64_t other = group->getRank() == 0 ? 2 : 3;
  Tensors inputs{at::ones({1}), at::ones({other})}, outputs{at::ones({1}), at::ones({1})};
  if (group->getRank() == 1) inputs = {at::ones({1}), at::ones({1})};
  say("first: " + error_of([&] { group->alltoall(outputs, inputs)->wait(); }));
  leave_together(group);
}

/// Rank 1 does not come.
void timeout() {
  const Group group = new_group("mpi", {.timeout = 20s});
  group->setTimeout(1s);
  all_reduce(at::ones({3}), group);
  if (group->getRank() != 1) say("raised: " + error_of([&] { all_reduce(at::ones({5}), group); }));
  if (group->getRank() != 1) {
    Tensors tensors{at::zeros({3})};
    say("receive: " + error_of([&] { group->recv(tensors, 1, 1)->wait(); }));
  }
  leave_together(group);
}

void receive_too_little() {
  const Group group = new_group("mpi", {.timeout = 20s});
  Tensors tensors{at::ones({group->getRank() == 0 ? 3 : 5})};
  if (group->getRank() == 0) group->send(tensors, 1, 1)->wait();
  if (group->getRank() == 1) say("raised: " + error_of([&] { group->recv(tensors, 0, 1)->wait(); }));
  leave_together(group);
}

void receive_too_much() {
  const Group group = new_group("mpi", {.timeout = 20s});
  Tensors tensors{at::ones({group->getRank() == 0 ? 5 : 3})};
  if (group->getRank() == 0) group->send(tensors, 1, 1)->wait();
  if (group->getRank() == 1) say("raised: " + error_of([&] { group->recv(tensors, 0, 1)->wait(); }));
  leave_together(group);
}

/// Whoever sends first is received first, and said to have.
void anybody() {
  const Group group = new_group("mpi", {.timeout = 20s});
  const int rank = group->getRank(), size = group->getSize();
  Tensors tensors{at::full({4}, float(rank))};
  if (rank > 0) group->send(tensors, 0, 3)->wait();
  bool right = true;
  std::vector<bool> seen(size_t(size), false);
  for (int i = 1; rank == 0 && i < size; ++i) {
    auto work = group->recvAnysource(tensors, 3);
    work->wait();
    const int source = work->sourceRank();
    right &= !seen[size_t(source)] && tensors[0].equal(at::full({4}, float(source)));
    seen[size_t(source)] = true;
  }
  say_right(right);
  say(error_of([&] { group->send(tensors, 0, -1); }));
}

/// A callback of one collective starts the next and waits for it, on the thread that moves both.
void callback() {
  const Group group = new_group("mpi", {.timeout = 20s});
  Tensors first{at::ones({1000})}, second{at::ones({1000})};
  auto future = group->allreduce(first)->getFuture()->then(
      [&](c10::ivalue::Future&) -> c10::IValue {
        group->allreduce(second)->wait();
        return second[0];
      },
      c10::TensorType::get());
  future->wait();
  say_right(second[0].eq(group->getSize()).all().item<bool>() && first[0].equal(second[0]));
}

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(8, 60), torch::nn::ReLU(), torch::nn::Linear(60, 4));
}

at::Tensor batch_of(int rank, int step) {
  return torch::sin(torch::arange(16).reshape({2, 8}) * 0.1 + rank + step * 10);
}

/// Training on all ranks, beside one process that sees all batches.
void ddp() {
  const Group group = new_group("mpi", {.timeout = 20s});
  torch::nn::Sequential net = make_net(), alone = make_net();
  DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 0.001});
  torch::optim::SGD optimizer(ddp.parameters(), 0.05), plain(alone->parameters(), 0.05);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    ddp(batch_of(group->getRank(), step)).pow(2).mean().backward();
    optimizer.step();
    Tensors batches;
    for (int r = 0; r < group->getSize(); ++r) batches.push_back(batch_of(r, step));
    plain.zero_grad();
    alone->forward(torch::cat(batches)).pow(2).mean().backward();
    plain.step();
  }
  bool right = true;
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    right &= at::allclose(net->parameters()[i], alone->parameters()[i], 1e-5, 1e-6);
  }
  say_right(right);
}

/// The program has begun MPI itself, and ends it.
void own_mpi(int level) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  say("why: " + why_backend_unavailable("mpi"));
  if (level == MPI_THREAD_MULTIPLE) say_right(moves_right(new_group("mpi", {.timeout = 20s})));
  int finalised = 0;
  MPI_Finalized(&finalised);
  say(finalised != 0 ? "ended by serried" : "left to the program");
  MPI_Finalize();
  say("after: " + why_backend_unavailable("mpi"));
}

/// What this process says about the backend, and two groups that cannot be.
void refused() {
  say("why: " + why_backend_unavailable("mpi"));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  say("alone: " + error_of([&] { new_group("mpi", {.timeout = 5s, .store = store, .rank = 0, .world_size = 1}); }));
}

/// A group of all ranks that the environment speaks of.
void meet_all() {
  say("raised: " + error_of([] { new_group("mpi", {.timeout = 5s}); }));
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> modes{
      {"split", split},
      {"pieces", pieces},
      {"two_hosts", two_hosts},
      {"mismatch", mismatch},
      {"sizes", sizes},
      {"timeout", timeout},
      {"receive_too_little", receive_too_little},
      {"receive_too_much", receive_too_much},
      {"anybody", anybody},
      {"callback", callback},
      {"ddp", ddp},
      {"own_mpi", [] { own_mpi(MPI_THREAD_MULTIPLE); }},
      {"own_mpi_for_one_thread", [] { own_mpi(MPI_THREAD_SINGLE); }},
      {"refused", refused},
      {"meet_all", meet_all},
  };
  at::set_num_threads(1);
  try {
    modes.at(argc > 1 ? argv[1] : "")();
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.msg().c_str());
    return 4;
  }
  return 0;
}
