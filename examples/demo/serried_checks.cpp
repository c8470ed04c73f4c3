// Every collective of serried's own API, tried on small uneven tensors.
#include "demo.h"

namespace demo {
namespace {

using c10d::ReduceOp;

at::Tensor leaf(const Group& g, at::IntArrayRef sizes) {
  return sample(g->getRank(), sizes).requires_grad_();
}

/// The gradient of `x` where rank r's loss is (r + 1) times the sum of its `y`.
at::Tensor gradient(const at::Tensor& x, const at::Tensor& y, const Group& g) {
  ((g->getRank() + 1) * y).sum().backward();
  return x.grad();
}

int64_t sum_of_factors(const Group& g) {
  return int64_t(g->getSize()) * (g->getSize() + 1) / 2;
}

bool all_reduce(const Group& g) {
  const at::Tensor x = leaf(g, {3, 5});
  const at::Tensor y = serried::all_reduce(x, g);
  if (!y.equal(sum_of_samples(g->getSize(), {3, 5}))) return false;
  return gradient(x, y, g).eq(sum_of_factors(g)).all().item<bool>();
}

bool all_reduce_ops(const Group& g) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < g->getSize(); ++rank) all.push_back(sample(rank, {7}));
  const at::Tensor stack = torch::stack(all);
  const at::Tensor x = all[g->getRank()];
  return serried::all_reduce(x, g, ReduceOp::AVG).allclose(stack.mean(0)) &&
         serried::all_reduce(x, g, ReduceOp::MIN).equal(stack.amin(0)) &&
         serried::all_reduce(x, g, ReduceOp::MAX).equal(stack.amax(0)) &&
         serried::all_reduce(x, g, ReduceOp::PRODUCT).allclose(stack.prod(0));
}

bool all_gather(const Group& g) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < g->getSize(); ++rank) all.push_back(sample(rank, {2, rank + 1}));
  const at::Tensor x = leaf(g, {2, g->getRank() + 1});
  const at::Tensor y = serried::all_gather(x, g, {.dim = 1});
  if (!y.equal(torch::cat(all, 1))) return false;
  return gradient(x, y, g).eq(sum_of_factors(g)).all().item<bool>();
}

bool reduce_scatter(const Group& g) {
  const at::Tensor x = leaf(g, {10, 2});
  const at::Tensor y = serried::reduce_scatter(x, g);
  if (!y.equal(shard(sum_of_samples(g->getSize(), {10, 2}), g->getRank(), g->getSize()))) return false;
  // Each row's gradient is the factor of the rank that holds it.
  at::Tensor expected = torch::zeros({10, 2});
  for (int rank = 0; rank < g->getSize(); ++rank) shard(expected, rank, g->getSize()).fill_(rank + 1);
  return gradient(x, y, g).equal(expected);
}

bool all_to_all(const Group& g) {
  std::vector<at::Tensor> mine;
  for (int rank = 0; rank < g->getSize(); ++rank)
    mine.push_back(shard(sample(rank, {9, 2}), g->getRank(), g->getSize()));
  const at::Tensor x = leaf(g, {9, 2});
  const at::Tensor y = serried::all_to_all(x, g, {.split_dim = 0, .concat_dim = 1});
  if (!y.equal(torch::cat(mine, 1))) return false;
  at::Tensor expected = torch::zeros({9, 2});
  for (int rank = 0; rank < g->getSize(); ++rank) shard(expected, rank, g->getSize()).fill_(rank + 1);
  return gradient(x, y, g).equal(expected);
}

bool all_to_all_split_sizes(const Group& g) {
  // Rank r sends p + 1 numbers to each rank p, so it gets r + 1 from each.
  const int n = g->getSize(), me = g->getRank();
  std::vector<int64_t> split_sizes;
  std::vector<at::Tensor> expected;
  for (int peer = 0; peer < n; ++peer) {
    split_sizes.push_back(peer + 1);
    const int64_t begin = int64_t(me) * (me + 1) / 2;
    expected.push_back(sample(peer, {sum_of_factors(g)}).slice(0, begin, begin + me + 1));
  }
  const at::Tensor y = serried::all_to_all(sample(me, {sum_of_factors(g)}), g, {.split_sizes = split_sizes});
  return y.equal(torch::cat(expected));
}

bool broadcast_with_gradient(const Group& g) {
  const int src = g->getSize() - 1;
  const at::Tensor x = leaf(g, {4});
  const at::Tensor y = serried::broadcast(x, g, {.src = src});
  if (!y.equal(sample(src, {4}))) return false;
  const int64_t expected = g->getRank() == src ? sum_of_factors(g) : 0;
  return gradient(x, y, g).eq(expected).all().item<bool>();
}

bool reduce_with_gradient(const Group& g) {
  const int dst = g->getSize() - 1;
  const at::Tensor x = leaf(g, {3, 5});
  const at::Tensor y = serried::reduce(x, g, {.dst = dst});
  const at::Tensor sum = sum_of_samples(g->getSize(), {3, 5});
  if (!y.equal(g->getRank() == dst ? sum : torch::zeros({3, 5}))) return false;
  return gradient(x, y, g).eq(dst + 1).all().item<bool>();  // the factor of the rank that has the sum
}

bool gather_with_gradient(const Group& g) {
  const at::Tensor x = leaf(g, {2, g->getRank() + 1});
  const std::vector<at::Tensor> parts = serried::gather(x, g, {.dst = 1});
  for (int rank = 0; rank < g->getSize(); ++rank) {
    const at::Tensor expected = sample(rank, {2, rank + 1});
    if (!parts[rank].equal(g->getRank() == 1 ? expected : torch::zeros_like(expected))) return false;
  }
  return gradient(x, torch::cat(parts, 1), g).eq(2).all().item<bool>();
}

bool scatter_with_gradient(const Group& g) {
  const at::Tensor x = leaf(g, {10, 2});
  std::vector<at::Tensor> rows;
  for (int rank = 0; g->getRank() == 1 && rank < g->getSize(); ++rank) rows.push_back(shard(x, rank, g->getSize()));
  const at::Tensor y = serried::scatter(rows, g, {.src = 1});
  if (!y.equal(shard(sample(1, {10, 2}), g->getRank(), g->getSize()))) return false;
  // Each row's gradient is the factor of the rank that it went to.
  at::Tensor expected = torch::zeros({10, 2});
  for (int rank = 0; rank < g->getSize(); ++rank) shard(expected, rank, g->getSize()).fill_(rank + 1);
  const at::Tensor grad = gradient(x, y, g);
  return g->getRank() == 1 ? grad.equal(expected) : !grad.defined();
}

bool all_reduce_in_place(const Group& g) {
  at::Tensor x = sample(g->getRank(), {70001});
  serried::all_reduce_(x, g);
  return x.equal(sum_of_samples(g->getSize(), {70001}));
}

bool broadcast_in_place(const Group& g) {
  at::Tensor x = sample(g->getRank(), {70001});
  serried::broadcast_(x, g, {.src = 1});
  return x.equal(sample(1, {70001}));
}

bool send_and_recv(const Group& g) {
  // Around the ring; even ranks send first, else all would wait for each other.
  const int n = g->getSize(), me = g->getRank(), next = (me + 1) % n, previous = (me + n - 1) % n;
  const at::Tensor out = sample(me, {5});
  const at::Tensor in = torch::zeros({5});
  if (me % 2 == 0) serried::send(out, g, {.peer = next, .tag = 7});
  serried::recv(in, g, {.peer = previous, .tag = 7});
  if (me % 2 != 0) serried::send(out, g, {.peer = next, .tag = 7});
  return in.equal(sample(previous, {5}));
}

bool barrier(const Group& g) {
  // The store counts the ranks that have come.
  const std::string key = "demo/barrier";
  g->getStore()->add(key, 1);
  serried::barrier(g);
  return g->getStore()->add(key, 0) == g->getSize();
}

bool split_group(const Group& g) {
  // Neighbours of equal parity; the sum of their ranks is known to all.
  std::vector<std::vector<int>> parts(2);
  for (int rank = 0; rank < g->getSize(); ++rank) parts[rank % 2].push_back(rank);
  const std::vector<int>& mine = parts[g->getRank() % 2];
  const Group half = serried::split_group(g, parts);
  int64_t sum = 0;
  for (const int rank : mine) sum += rank;
  const at::Tensor y = serried::all_reduce(torch::full({3}, int64_t(g->getRank())), half);
  return half->getSize() == int(mine.size()) && y.eq(sum).all().item<bool>();
}

}  // namespace

std::vector<Check> serried_checks() {
  return {
      {"all_reduce", "sum, and its gradient", all_reduce},
      {"all_reduce", "avg, min, max, product", all_reduce_ops},
      {"all_gather", "along dim 1, sizes differ, and its gradient", all_gather},
      {"reduce_scatter", "10 rows, uneven pieces, and its gradient", reduce_scatter},
      {"all_to_all", "split dim 0, concat dim 1, and its gradient", all_to_all},
      {"all_to_all", "with split sizes", all_to_all_split_sizes},
      {"broadcast", "from the last rank, and its gradient", broadcast_with_gradient},
      {"reduce", "to the last rank, and its gradient", reduce_with_gradient},
      {"gather", "to rank 1, sizes differ, and its gradient", gather_with_gradient},
      {"scatter", "from rank 1, uneven pieces, and its gradient", scatter_with_gradient},
      {"all_reduce_", "in place", all_reduce_in_place},
      {"broadcast_", "in place, from rank 1", broadcast_in_place},
      {"send, recv", "around the ring, with a tag", send_and_recv},
      {"barrier", "nobody leaves before all have come", barrier},
      {"split_group", "even and odd ranks apart", split_group},
  };
}

}  // namespace demo
