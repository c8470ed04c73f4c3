// The functional and in-place collectives against plain ATen on all ranks' inputs.
#include "serried/comm/collectives/collectives.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/pieces.h"
#include "tests/support/close.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using c10d::ReduceOp;
using testing::expect_close;
using testing::expect_equal;
using testing::sample;
using testing::samples;
using testing::sum_of;
using Tensors = std::vector<at::Tensor>;

class Collectives : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, Collectives, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

// Rank r's piece of a cut like Shard's: torch::chunk, but with every rank.
Tensors shards(const at::Tensor& x, int world_size, int64_t dim) {
  Tensors pieces = at::chunk(x, world_size, dim);
  while (int(pieces.size()) < world_size) pieces.push_back(x.narrow(dim, 0, 0));
  return pieces;
}

// A collective as rank 0..n-1's inputs to their outputs, and as this rank's call.
struct Case {
  std::string name;
  std::function<std::vector<int64_t>(int rank)> shape;
  std::function<Tensors(const Tensors& xs)> all;
  std::function<at::Tensor(const at::Tensor& x, const Group& g)> one;
};

std::vector<int64_t> fixed_shape(int) {
  return {5, 3};
}
std::vector<int64_t> uneven_rows(int rank) {
  return {(rank * 2 + 1) % 4, 3};
}
std::vector<int64_t> uneven_columns(int rank) {
  return {5, (rank + 2) % 4, 2};
}

Tensors repeat(const at::Tensor& x, size_t count) {
  return Tensors(count, x);
}

Case all_reduce_case(const std::string& name, ReduceOp::RedOpType op) {
  return {name, fixed_shape,
          [op](const Tensors& xs) {
            const at::Tensor sum = sum_of(xs);
            return repeat(op == ReduceOp::AVG ? sum / int64_t(xs.size()) : sum, xs.size());
          },
          [op](const at::Tensor& x, const Group& g) { return all_reduce(x, g, op); }};
}

Case all_gather_case(const std::string& name, std::function<std::vector<int64_t>(int)> shape, int64_t dim) {
  return {name, std::move(shape), [dim](const Tensors& xs) { return repeat(at::cat(xs, dim), xs.size()); },
          [dim](const at::Tensor& x, const Group& g) { return all_gather(x, g, {.dim = dim}); }};
}

Case reduce_scatter_case(const std::string& name, int64_t dim, ReduceOp::RedOpType op) {
  return {name, fixed_shape,
          [=](const Tensors& xs) {
            const at::Tensor sum = sum_of(xs);
            return shards(op == ReduceOp::AVG ? sum / int64_t(xs.size()) : sum, int(xs.size()), dim);
          },
          [=](const at::Tensor& x, const Group& g) { return reduce_scatter(x, g, {.dim = dim, .op = op}); }};
}

Case all_to_all_case(const std::string& name, std::function<std::vector<int64_t>(int)> shape, int64_t split_dim,
                     int64_t concat_dim) {
  return {name, std::move(shape),
          [=](const Tensors& xs) {
            const int n = int(xs.size());
            Tensors outputs;
            for (int to = 0; to < n; ++to) {
              Tensors pieces;
              for (const at::Tensor& x : xs) pieces.push_back(shards(x, n, split_dim)[to]);
              outputs.push_back(at::cat(pieces, concat_dim));
            }
            return outputs;
          },
          [=](const at::Tensor& x, const Group& g) {
            return all_to_all(x, g, {.split_dim = split_dim, .concat_dim = concat_dim});
          }};
}

// Rank p sends (p + 2 q) % 3 rows to rank q.
std::vector<int64_t> rows_sent(int64_t from, int64_t world_size) {
  std::vector<int64_t> rows;
  for (int64_t to = 0; to < world_size; ++to) rows.push_back((from + 2 * to) % 3);
  return rows;
}

Case all_to_all_split_case(int world_size) {
  return {"all_to_all with split sizes",
          [=](int rank) {
            return std::vector<int64_t>{detail::sum_of(rows_sent(rank, world_size)), 3};
          },
          [=](const Tensors& xs) {
            Tensors outputs;
            for (int to = 0; to < world_size; ++to) {
              Tensors pieces;
              for (int from = 0; from < world_size; ++from) {
                pieces.push_back(xs[from].split_with_sizes(rows_sent(from, world_size))[to]);
              }
              outputs.push_back(at::cat(pieces));
            }
            return outputs;
          },
          [=](const at::Tensor& x, const Group& g) {
            return all_to_all(x, g, {.split_sizes = rows_sent(g->getRank(), world_size)});
          }};
}

Case broadcast_case(const std::string& name, bool from_last) {
  return {
      name, fixed_shape, [=](const Tensors& xs) { return repeat(from_last ? xs.back() : xs.front(), xs.size()); },
      [=](const at::Tensor& x, const Group& g) { return broadcast(x, g, {.src = from_last ? g->getSize() - 1 : 0}); }};
}

// One rank of them has the result, the others have zeros.
Tensors only_for(size_t root, const at::Tensor& y, size_t count) {
  Tensors ys(count, at::zeros_like(y));
  ys[root] = y;
  return ys;
}

Case reduce_case(const std::string& name, ReduceOp::RedOpType op) {
  return {name, fixed_shape,
          [op](const Tensors& xs) {
            const at::Tensor sum = sum_of(xs);
            return only_for(xs.size() - 1, op == ReduceOp::AVG ? sum / int64_t(xs.size()) : sum, xs.size());
          },
          [op](const at::Tensor& x, const Group& g) { return reduce(x, g, {.dst = g->getSize() - 1, .op = op}); }};
}

at::Tensor in_one_row(const Tensors& xs) {
  Tensors rows;
  for (const at::Tensor& x : xs) rows.push_back(x.reshape({-1}));
  return at::cat(rows);
}

Case gather_case(const std::string& name, std::function<std::vector<int64_t>(int)> shape) {
  return {name, std::move(shape), [](const Tensors& xs) { return only_for(0, in_one_row(xs), xs.size()); },
          [](const at::Tensor& x, const Group& g) { return in_one_row(gather(x, g)); }};
}

std::vector<Case> differentiable_cases(int world_size) {
  return {
      all_reduce_case("all_reduce sum", ReduceOp::SUM),
      all_reduce_case("all_reduce avg", ReduceOp::AVG),
      all_gather_case("all_gather", fixed_shape, 0),
      all_gather_case("all_gather along dim 1", fixed_shape, 1),
      all_gather_case("all_gather of uneven rows", uneven_rows, 0),
      all_gather_case("all_gather of uneven columns", uneven_columns, -2),
      reduce_scatter_case("reduce_scatter of 5 rows", 0, ReduceOp::SUM),
      reduce_scatter_case("reduce_scatter of 3 columns", 1, ReduceOp::SUM),
      reduce_scatter_case("reduce_scatter avg", -1, ReduceOp::AVG),
      all_to_all_case("all_to_all", fixed_shape, 0, 0),
      all_to_all_case("all_to_all of uneven rows", uneven_rows, 0, 0),
      all_to_all_case("all_to_all rows to columns", uneven_columns, 0, 1),
      all_to_all_case("all_to_all columns to rows", fixed_shape, 1, 0),
      all_to_all_split_case(world_size),
      broadcast_case("broadcast", false),
      broadcast_case("broadcast from the last rank", true),
      reduce_case("reduce sum", ReduceOp::SUM),
      reduce_case("reduce avg", ReduceOp::AVG),
      gather_case("gather", fixed_shape),
      gather_case("gather of uneven rows", uneven_rows),
      gather_case("gather of uneven columns", uneven_columns),
  };
}

Tensors inputs_of(const Case& c, int world_size) {
  Tensors xs;
  for (int rank = 0; rank < world_size; ++rank) xs.push_back(sample(c.shape(rank), rank, at::kDouble));
  return xs;
}

// A loss that is not linear, so that second gradients are not zero.
at::Tensor loss_of(const at::Tensor& y, int rank) {
  return (y.pow(3) * (rank + 2)).sum();
}

// Zeros where a loss does not depend on an input.
Tensors grads_of(const at::Tensor& loss, const Tensors& xs, bool create_graph = false) {
  Tensors grads = torch::autograd::grad({loss}, xs, {}, create_graph, create_graph, true);
  for (size_t i = 0; i < xs.size(); ++i) {
    if (!grads[i].defined()) grads[i] = at::zeros_like(xs[i]);
  }
  return grads;
}

TEST_P(Collectives, EqualPlainTensorsOnAllRanksInputs) {
  on_ranks([&](const Group& g) {
    for (const Case& c : differentiable_cases(g->getSize())) {
      const Tensors xs = inputs_of(c, g->getSize());
      const at::Tensor x = xs[g->getRank()].clone();
      const at::Tensor y = c.one(x, g);
      expect_close(y, c.all(xs)[g->getRank()], c.name);
      expect_equal(x, xs[g->getRank()], c.name + " leaves its input");
      EXPECT_TRUE(y.is_contiguous()) << c.name;
      EXPECT_FALSE(y.requires_grad()) << c.name;
      EXPECT_FALSE(y.is_alias_of(x)) << c.name;
    }
  });
}

TEST_P(Collectives, TakeNonContiguousInputs) {
  on_ranks([&](const Group& g) {
    for (const Case& c : differentiable_cases(g->getSize())) {
      const Tensors xs = inputs_of(c, g->getSize());
      const at::Tensor x = at::stack({xs[g->getRank()], xs[g->getRank()]}, -1).select(-1, 1);
      expect_close(c.one(x, g), c.all(xs)[g->getRank()], c.name);
    }
  });
}

TEST_P(Collectives, HaveTheGradientOfTheSumOverRanksOfTheirLosses) {
  on_ranks([&](const Group& g) {
    for (const Case& c : differentiable_cases(g->getSize())) {
      Tensors xs = inputs_of(c, g->getSize());
      const at::Tensor x = xs[g->getRank()].clone().requires_grad_();
      for (at::Tensor& each : xs) each.requires_grad_();
      const Tensors ys = c.all(xs);
      at::Tensor total = at::zeros({}, at::kDouble);
      for (size_t rank = 0; rank < ys.size(); ++rank) total = total + loss_of(ys[rank], int(rank));
      const Tensors expected = grads_of(total, xs);

      const at::Tensor y = c.one(x, g);
      EXPECT_TRUE(y.requires_grad()) << c.name;
      const at::Tensor actual = torch::autograd::grad({loss_of(y, g->getRank())}, {x})[0];
      expect_close(actual, expected[g->getRank()], c.name);
    }
  });
}

TEST_P(Collectives, HaveSecondGradients) {
  on_ranks([&](const Group& g) {
    for (const Case& c : differentiable_cases(g->getSize())) {
      Tensors xs = inputs_of(c, g->getSize());
      const at::Tensor x = xs[g->getRank()].clone().requires_grad_();
      for (at::Tensor& each : xs) each.requires_grad_();
      at::Tensor total = at::zeros({}, at::kDouble), second = at::zeros({}, at::kDouble);
      const Tensors ys = c.all(xs);
      for (size_t rank = 0; rank < ys.size(); ++rank) total = total + loss_of(ys[rank], int(rank));
      for (const at::Tensor& grad : grads_of(total, xs, true)) {
        second = second + grad.pow(2).sum();
      }
      const Tensors expected = grads_of(second, xs);

      const at::Tensor loss = loss_of(c.one(x, g), g->getRank());
      const at::Tensor grad = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
      const at::Tensor actual = torch::autograd::grad({grad.pow(2).sum()}, {x})[0];
      expect_close(actual, expected[g->getRank()], c.name);
    }
  });
}

TEST_P(Collectives, GiveEveryReduction) {
  on_ranks([&](const Group& g) {
    const Tensors xs = samples({4, 3}, g->getSize(), at::kInt);
    const at::Tensor all = at::stack(xs);
    at::Tensor both = xs[0], any = xs[0], odd = xs[0];
    for (size_t i = 1; i < xs.size(); ++i) {
      both = both.bitwise_and(xs[i]);
      any = any.bitwise_or(xs[i]);
      odd = odd.bitwise_xor(xs[i]);
    }
    const std::vector<std::pair<const char*, at::Tensor>> expected = {{"sum", all.sum(0, false, at::kInt)},
                                                                      {"product", all.prod(0, false, at::kInt)},
                                                                      {"min", all.amin(0)},
                                                                      {"max", all.amax(0)},
                                                                      {"band", both},
                                                                      {"bor", any},
                                                                      {"bxor", odd}};
    for (const auto& [name, value] : expected) {
      const ReduceOp op = parse_reduce_op(name);
      expect_equal(all_reduce(xs[g->getRank()], g, op), value, name);
      expect_equal(reduce_scatter(xs[g->getRank()], g, {.op = op}), shards(value, g->getSize(), 0)[g->getRank()], name);
      at::Tensor x = xs[g->getRank()].clone();
      all_reduce_(x, g, op);
      expect_equal(x, value, name);
    }
  });
}

TEST_P(Collectives, MoveEveryDtype) {
  on_ranks([&](const Group& g) {
    for (at::ScalarType dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kComplexDouble, at::kBool,
          at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
      const Tensors xs = samples({3, 2}, g->getSize(), dtype);
      const at::Tensor& x = xs[g->getRank()];
      const std::string name = c10::toString(dtype);
      expect_equal(all_gather(x, g), at::cat(xs), name);
      Tensors uneven;
      for (int rank = 0; rank < g->getSize(); ++rank) uneven.push_back(xs[rank].narrow(0, 0, rank % 3));
      expect_equal(all_gather(uneven[g->getRank()], g), at::cat(uneven), name + ", uneven");
      // Contiguous, whatever the strides of one element are.
      const at::Tensor element = at::stack({x, x}, -1).select(-1, 1).narrow(0, 1, 1).narrow(1, 0, 1);
      expect_equal(all_gather(element, g), at::cat(xs).narrow(1, 0, 1).slice(0, 1, 3 * g->getSize(), 3), name);
      expect_equal(broadcast(x, g, {.src = g->getSize() - 1}), xs.back(), name);
      Tensors received;
      for (const at::Tensor& each : xs) received.push_back(shards(each, g->getSize(), 0)[g->getRank()]);
      expect_equal(all_to_all(x, g), at::cat(received), name);
      if (at::isFloatingType(dtype) || at::isComplexType(dtype)) expect_close(all_reduce(x, g), sum_of(xs), name);
    }
  });
}

TEST_P(Collectives, WorkOnNothingAndOnScalars) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    const at::Tensor none = at::zeros({0, 3});
    expect_equal(all_reduce(none, g), none);
    expect_equal(all_gather(none, g), none);
    expect_equal(all_gather(none, g, {.dim = 1}), at::zeros({0, 3 * n}));
    expect_equal(reduce_scatter(none, g), none);
    expect_equal(all_to_all(none, g), none);
    expect_equal(broadcast(none, g), none);
    const at::Tensor scalar = at::scalar_tensor(g->getRank() + 1);
    expect_equal(all_reduce(scalar, g), at::scalar_tensor(n * (n + 1) / 2));
    expect_equal(broadcast(scalar, g, {.src = n - 1}), at::scalar_tensor(n));
    all_reduce_(scalar, g, ReduceOp::MAX);
    expect_equal(scalar, at::scalar_tensor(n));
  });
}

TEST_P(Collectives, InPlaceWriteThroughNonContiguousTensors) {
  on_ranks([&](const Group& g) {
    const Tensors xs = samples({4, 3}, g->getSize());
    at::Tensor base = at::zeros({3, 8});
    at::Tensor view = base.t().narrow(0, 2, 4);
    view.copy_(xs[g->getRank()]);
    all_reduce_(view, g);
    expect_equal(view.contiguous(), sum_of(xs));
    view.copy_(xs[g->getRank()]);
    broadcast_(view, g, {.src = g->getSize() - 1});
    expect_equal(view.contiguous(), xs.back());
    EXPECT_TRUE(base.narrow(1, 0, 2).eq(0).all().item<bool>());
    EXPECT_TRUE(base.narrow(1, 6, 2).eq(0).all().item<bool>());
  });
}

TEST_P(Collectives, InPlaceCountTheVersionOnce) {
  on_ranks([&](const Group& g) {
    const at::Tensor dense = at::ones({4, 3}), sparse = at::ones({3, 4}).t();
    for (const at::Tensor& x : {dense, sparse}) {
      const auto before = x._version();
      all_reduce_(x, g);
      EXPECT_EQ(x._version(), before + 1);
      broadcast_(x, g);
      EXPECT_EQ(x._version(), before + 2);
      at::AutoDispatchBelowAutograd below;
      all_reduce_(x, g);
      EXPECT_EQ(x._version(), before + 3);
    }
    c10::InferenceMode inference;
    const at::Tensor x = at::ones({2});
    all_reduce_(x, g);
    expect_equal(x, at::full({2}, float(g->getSize())));
    expect_equal(all_reduce(at::ones({2}), g), x);
  });
}

TEST_P(Collectives, InPlaceAreAllowedOnParametersWithoutGrad) {
  on_ranks([&](const Group& g) {
    const at::Tensor parameter = at::ones({3}).requires_grad_();
    {
      torch::NoGradGuard no_grad;
      all_reduce_(parameter, g);
      broadcast_(parameter, g);
    }
    expect_equal(parameter.detach(), at::full({3}, float(g->getSize())));
    EXPECT_TRUE(parameter.is_leaf() && parameter.requires_grad());
    EXPECT_THROW(all_reduce_(parameter, g), c10::ValueError);
    EXPECT_THROW(broadcast_(parameter, g), c10::ValueError);
  });
}

TEST_P(Collectives, SendMeetsReceiveInARing) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), rank = g->getRank();
    if (n == 1) return;
    const at::Tensor mine = sample({3, 5}, rank), theirs = at::zeros({5, 3}).t();
    const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
    for (int tag : {0, 7}) {
      if (rank == 0) send(mine, g, {.peer = next, .tag = tag});
      recv(theirs, g, {.peer = previous, .tag = tag});
      if (rank != 0) send(mine, g, {.peer = next, .tag = tag});
      expect_equal(theirs.contiguous(), sample({3, 5}, previous));
    }
    barrier(g);
  });
}

TEST_P(Collectives, WorkOnComplexConjugatesAndNegativeViews) {
  on_ranks([&](const Group& g) {
    const Tensors xs = samples({3, 2}, g->getSize(), at::kComplexFloat);
    expect_close(all_reduce(xs[g->getRank()].conj(), g), sum_of(xs).conj().resolve_conj());
    at::Tensor lazy = xs[g->getRank()].clone().conj();
    all_reduce_(lazy, g);
    expect_close(lazy.resolve_conj(), sum_of(xs).conj().resolve_conj());
    expect_close(all_gather(at::imag(xs[g->getRank()].conj()), g), at::imag(at::cat(xs).conj()).contiguous());
  });
}

TEST_P(Collectives, WriteIntoComplexConjugatesAndNegativeViews) {
  on_ranks([&](const Group& g) {
    const Tensors xs = samples({4, 2}, g->getSize(), at::kComplexFloat);
    const at::Tensor mine = xs[g->getRank()], sum = sum_of(xs).conj().resolve_conj();
    at::Tensor started = mine.clone().conj();
    async::all_reduce_(started, g).wait();
    expect_close(started.resolve_conj(), sum);
    at::Tensor shown = mine.clone().conj();
    broadcast_(shown, g, {.src = g->getSize() - 1});
    expect_close(shown.resolve_conj(), xs.back().conj().resolve_conj());
    at::Tensor whole = at::empty({4 * g->getSize(), 2}, at::kComplexFloat).conj();
    all_gather_into(whole, mine.clone().conj(), g);
    expect_close(whole.resolve_conj(), at::cat(xs).conj().resolve_conj());
    at::Tensor memory = at::empty({4, 2}, at::kComplexFloat);
    at::Tensor negative = at::imag(memory.conj());  // a lazy negative of what lies there
    at::Tensor dense = at::zeros({4, 2});
    negative.copy_(at::imag(mine));
    all_reduce_(negative, g);
    for (const at::Tensor& x : xs) dense += at::imag(x);
    expect_close(negative.resolve_neg().contiguous(), dense);
  });
}

TEST_P(Collectives, HoldInsideBackwardOfADeepGraph) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    at::Tensor x = at::full({2}, 0.5, at::kDouble).requires_grad_();
    at::Tensor y = x;
    for (int i = 0; i < 20; ++i) y = all_reduce(y, g, ReduceOp::AVG) + all_gather(y.narrow(0, 0, 1), g).sum() / n;
    y.sum().backward();
    EXPECT_TRUE(x.grad().defined());
    expect_close(all_reduce(x.grad(), g, ReduceOp::AVG), x.grad());
  });
}

}  // namespace
}  // namespace serried
