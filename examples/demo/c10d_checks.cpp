// Every collective that c10d::ProcessGroup has, called as LibTorch code calls it.
#include "demo.h"

namespace demo {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

constexpr int64_t kSize = 11;

at::Tensor mine(const Group& g, int64_t size = kSize) {
  return sample(g->getRank(), {size});
}

Tensors everybody(const Group& g, int64_t size = kSize) {
  Tensors all;
  for (int rank = 0; rank < g->getSize(); ++rank) all.push_back(sample(rank, {size}));
  return all;
}

Tensors blanks(int count, int64_t size = kSize) {
  Tensors all;
  for (int i = 0; i < count; ++i) all.push_back(torch::full({size}, -1.0f));
  return all;
}

bool equal(const Tensors& actual, const Tensors& expected) {
  if (actual.size() != expected.size()) return false;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!actual[i].equal(expected[i])) return false;
  }
  return true;
}

bool async_in_flight(const Group& g) {
  Tensors tensors;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 5; ++i) {
    Tensors one{mine(g, 1000 * i + 1)};
    works.push_back(g->allreduce(one));
    tensors.push_back(one[0]);
  }
  for (int i = 4; i >= 0; --i) {
    works[i]->wait();
    if (!tensors[i].equal(sum_of_samples(g->getSize(), {1000 * i + 1}))) return false;
  }
  return true;
}

bool future(const Group& g) {
  Tensors tensors{mine(g)};
  const auto work = g->allreduce(tensors);
  const auto doubled = work->getFuture()->then(
      [tensors](c10::ivalue::Future&) -> c10::IValue { return tensors[0] * 2; }, c10::TensorType::get());
  doubled->wait();
  return doubled->value().toTensor().equal(sum_of_samples(g->getSize(), {kSize}) * 2);
}

bool all_reduce_coalesced(const Group& g) {
  Tensors tensors{mine(g), mine(g, 3)};
  g->allreduce_coalesced(tensors)->wait();
  return equal(tensors, {sum_of_samples(g->getSize(), {kSize}), sum_of_samples(g->getSize(), {3})});
}

bool all_reduce_sparse(const Group& g) {
  at::Tensor dense = torch::zeros({g->getSize() + 1, 3});
  Tensors tensors;
  for (int rank = 0; rank < g->getSize(); ++rank) {
    at::Tensor rows = torch::zeros_like(dense);
    rows[rank] = rank + 1;
    rows[g->getSize()] = 10;
    dense += rows;
    if (rank == g->getRank()) tensors.push_back(rows.to_sparse(1).coalesce());
  }
  g->allreduce(tensors)->wait();
  return tensors[0].to_dense().equal(dense);
}

bool all_reduce_in_heap(const Group& g) {
  const auto backend = g->getBackend(at::kCPU);
  Tensors tensors{backend->allocateTensor(kSize, at::kFloat)};
  tensors[0].copy_(mine(g));
  g->allreduce(tensors)->wait();
  return tensors[0].equal(sum_of_samples(g->getSize(), {kSize}));
}

bool broadcast_from_one(const Group& g) {
  Tensors tensors{mine(g)};
  c10d::BroadcastOptions options;
  options.rootRank = 1;
  g->broadcast(tensors, options)->wait();
  return tensors[0].equal(sample(1, {kSize}));
}

bool reduce(const Group& g) {
  Tensors tensors{mine(g)};
  c10d::ReduceOptions options;
  options.rootRank = 1;
  g->reduce(tensors, options)->wait();
  return g->getRank() != 1 || tensors[0].equal(sum_of_samples(g->getSize(), {kSize}));
}

bool gather(const Group& g) {
  Tensors inputs{mine(g)};
  TensorLists outputs;
  if (g->getRank() == 0) outputs.push_back(blanks(g->getSize()));
  g->gather(outputs, inputs)->wait();
  return g->getRank() != 0 || equal(outputs[0], everybody(g));
}

bool scatter(const Group& g) {
  Tensors outputs = blanks(1);
  TensorLists inputs;
  if (g->getRank() == 0) inputs.push_back(everybody(g));
  g->scatter(outputs, inputs)->wait();
  return outputs[0].equal(mine(g));
}

bool all_gather_list(const Group& g) {
  Tensors inputs{mine(g)};
  TensorLists outputs{blanks(g->getSize())};
  g->allgather(outputs, inputs)->wait();
  return equal(outputs[0], everybody(g));
}

bool all_gather_single(const Group& g) {
  at::Tensor input = mine(g);
  at::Tensor output = torch::zeros({g->getSize() * kSize});
  g->all_gather_single(output, input)->wait();
  return output.equal(torch::cat(everybody(g)));
}

bool all_gather_coalesced(const Group& g) {
  Tensors inputs{mine(g), mine(g, 3)};
  TensorLists outputs;
  for (int rank = 0; rank < g->getSize(); ++rank) outputs.push_back({blanks(1)[0], blanks(1, 3)[0]});
  g->allgather_coalesced(outputs, inputs)->wait();
  for (int rank = 0; rank < g->getSize(); ++rank) {
    if (!equal(outputs[rank], {sample(rank, {kSize}), sample(rank, {3})})) return false;
  }
  Tensors flat{torch::zeros({g->getSize() * kSize}), torch::zeros({g->getSize() * 3})};
  g->all_gather_single_coalesced(flat, inputs)->wait();
  return equal(flat, {torch::cat(everybody(g)), torch::cat(everybody(g, 3))});
}

/// Row r of the sum of everybody's tables: what rank r is due.
at::Tensor due(const Group& g, int64_t size) {
  return sum_of_samples(g->getSize(), {g->getSize(), size})[g->getRank()];
}

bool reduce_scatter_list(const Group& g) {
  Tensors outputs = blanks(1);
  TensorLists inputs{sample(g->getRank(), {g->getSize(), kSize}).unbind(0)};
  g->reduce_scatter(outputs, inputs)->wait();
  return outputs[0].equal(due(g, kSize));
}

bool reduce_scatter_single(const Group& g) {
  at::Tensor input = sample(g->getRank(), {g->getSize(), kSize});
  at::Tensor output = blanks(1)[0];
  g->reduce_scatter_single(output, input)->wait();
  return output.equal(due(g, kSize));
}

bool reduce_scatter_coalesced(const Group& g) {
  Tensors inputs{sample(g->getRank(), {g->getSize(), kSize}), sample(g->getRank(), {g->getSize(), 3})};
  Tensors outputs{blanks(1)[0], blanks(1, 3)[0]};
  g->reduce_scatter_single_coalesced(outputs, inputs)->wait();
  return equal(outputs, {due(g, kSize), due(g, 3)});
}

bool all_to_all_list(const Group& g) {
  Tensors inputs, expected;
  for (int peer = 0; peer < g->getSize(); ++peer) {
    inputs.push_back(mine(g) + 1000 * peer);
    expected.push_back(sample(peer, {kSize}) + 1000 * g->getRank());
  }
  Tensors outputs = blanks(g->getSize());
  g->alltoall(outputs, inputs)->wait();
  return equal(outputs, expected);
}

bool all_to_all_single(const Group& g) {
  // Rank r sends p numbers to each rank p: rank 0 gets nothing.
  const int64_t n = g->getSize(), me = g->getRank();
  std::vector<int64_t> in_sizes, out_sizes;
  Tensors expected;
  for (int64_t peer = 0; peer < n; ++peer) {
    in_sizes.push_back(peer);
    out_sizes.push_back(me);
    const int64_t begin = me * (me - 1) / 2;
    expected.push_back(sample(int(peer), {n * (n - 1) / 2}).slice(0, begin, begin + me));
  }
  at::Tensor input = mine(g, n * (n - 1) / 2);
  at::Tensor output = torch::zeros({n * me});
  g->all_to_all_single(output, input, out_sizes, in_sizes)->wait();
  return output.equal(torch::cat(expected));
}

bool send_and_recv_any(const Group& g) {
  if (g->getRank() > 0) {
    Tensors tensors{mine(g)};
    g->send(tensors, 0, 3)->wait();
    return true;
  }
  std::vector<bool> seen(g->getSize());
  for (int i = 1; i < g->getSize(); ++i) {
    Tensors tensors = blanks(1);
    const auto work = g->recvAnysource(tensors, 3);
    work->wait();
    const int from = work->sourceRank();
    if (from < 1 || from >= g->getSize() || seen[from] || !tensors[0].equal(sample(from, {kSize}))) return false;
    seen[from] = true;
  }
  return true;
}

/// Both barriers, with the store as the witness.
bool barriers(const Group& g) {
  for (const std::string key : {"demo/plain", "demo/monitored"}) {
    g->getStore()->add(key, 1);
    if (key == "demo/plain") g->barrier()->wait();
    if (key == "demo/monitored") g->monitoredBarrier({}, true);
    // Rank 0 alone is held back until all have come in a monitored barrier.
    const bool held = key == "demo/plain" || g->getRank() == 0;
    if (held && g->getStore()->add(key, 0) != g->getSize()) return false;
  }
  return true;
}

}  // namespace

std::vector<Check> c10d_checks() {
  return {
      {"allreduce", "five in flight, waited for in reverse", async_in_flight},
      {"allreduce", "its future, and a callback on it", future},
      {"allreduce", "of a tensor that lies in shared memory", all_reduce_in_heap},
      {"allreduce", "of sparse tensors", all_reduce_sparse},
      {"allreduce_coalesced", "two sizes in one call", all_reduce_coalesced},
      {"broadcast", "from rank 1", broadcast_from_one},
      {"reduce", "to rank 1", reduce},
      {"gather", "to rank 0", gather},
      {"scatter", "from rank 0", scatter},
      {"allgather", "into a list", all_gather_list},
      {"all_gather_single", "into one tensor", all_gather_single},
      {"allgather_coalesced", "into lists and into tensors", all_gather_coalesced},
      {"reduce_scatter", "from a list", reduce_scatter_list},
      {"reduce_scatter_single", "from one tensor", reduce_scatter_single},
      {"reduce_scatter_single_coalesced", "two sizes in one call", reduce_scatter_coalesced},
      {"alltoall", "lists", all_to_all_list},
      {"all_to_all_single", "with split sizes, some zero", all_to_all_single},
      {"send, recvAnysource", "all to rank 0, which learns from whom", send_and_recv_any},
      {"barrier, monitoredBarrier", "nobody leaves before all have come", barriers},
  };
}

}  // namespace demo
