// Collectives of c10d become ours where that costs nothing.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/groups/ranks.h"
#include "tests/graph/passes/recorded.h"
#include "tests/support/fake_group.h"

namespace serried {
namespace {

using namespace serried::testing;

using OnGroup = std::function<Tensors(const Tensors&, const Group&)>;

at::Tensor reduced(const Group& group, at::Tensor x, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  Tensors tensors{x};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  group->allreduce(tensors, options)->wait();
  return x;
}

std::string folded_code(const OnGroup& fn, const Tensors& in, int world_size = 2) {
  const Group group = fake_group(0, world_size);
  const Function here = [&](const Tensors& inputs) { return fn(inputs, group); };
  return code_of(with(record(here, in), {passes::functional_collectives()}));
}

TEST(FunctionalCollectives, ReducesInPlaceInOneOp) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors { return {reduced(group, in[0] * 2) + 1}; };
  const Recorded before = record(fn, {torch::randn({4})});
  EXPECT_EQ(code_of(before),
            "%1 = mul(%in0, other=2)  # f32[4]\n"
            "%w2 = all_reduce_([%1], group=\"g\", reduce_op=sum, sparse_indices=none)  # 16 B\n"
            "serried::wait(%w2)\n"
            "%3 = add(%1, other=1)  # f32[4]\n");
  EXPECT_EQ(code_of(with(before, {passes::functional_collectives()})),
            "%1 = mul(%in0, other=2)  # f32[4]\n"
            "all_reduce_(%1, group=\"g\", op=sum)  # 16 B\n"
            "%3 = add(%1, other=1)  # f32[4]\n");
}

TEST(FunctionalCollectives, WhatWasMadeForACollectiveIsItsResult) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    at::Tensor whole = at::empty({9, 2}), mine = at::empty({1, 2}), all = at::empty({2, 2}), x = in[0];
    group->all_gather_single(whole, x)->wait();
    group->reduce_scatter_single(mine, x)->wait();
    std::vector<int64_t> sent = {1, 2, 0}, received = {1, 0, 1};
    group->all_to_all_single(all, x, received, sent)->wait();
    return {whole, mine, all};
  };
  EXPECT_EQ(folded_code(fn, {torch::randn({3, 2})}, 3),
            "%1 = all_gather(%in0, group=\"g\", dim=0, sizes=[3, 3, 3])  # f32[9, 2], 24 B\n"
            "%2 = reduce_scatter(%in0, group=\"g\", dim=0, sizes=[1, 1, 1], op=sum)  # f32[1, 2], 24 B\n"
            "%3 = all_to_all(%in0, group=\"g\", split_dim=0, concat_dim=0, split_sizes=[1, 2, 0], concat_sizes=[1, 0, "
            "1])  # f32[2, 2], 24 B\n");
}

TEST(FunctionalCollectives, OthersAreWrittenInto) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    at::Tensor flat = at::empty({12}), mine = at::zeros({1, 3}), all = at::empty({2, 3}), x = in[0];
    group->all_gather_single(flat, x)->wait();
    group->reduce_scatter_single(mine, x)->wait();
    std::vector<int64_t> equal;
    group->all_to_all_single(all, x, equal, equal)->wait();
    return {flat, mine, all};
  };
  EXPECT_EQ(folded_code(fn, {torch::randn({2, 3})}),
            "%1 = empty(size=[12])  # f32[12]\n"
            "%2 = zeros(size=[1, 3])  # f32[1, 3]\n"
            "%3 = empty(size=[2, 3])  # f32[2, 3]\n"
            "all_gather(output=%1, x=%in0, group=\"g\")  # 24 B\n"
            "reduce_scatter(output=%2, x=%in0, group=\"g\", op=sum)  # 24 B\n"
            "all_to_all(output=%3, x=%in0, group=\"g\")  # 24 B\n");
}

TEST(FunctionalCollectives, AListIsGatheredInOnePiece) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    std::vector<Tensors> list{{at::empty_like(in[0]), at::empty_like(in[0])}};
    Tensors x{in[0]};
    group->allgather(list, x)->wait();
    return {list[0][1].t() - list[0][0].t()};
  };
  EXPECT_EQ(folded_code(fn, {torch::randn({2, 3})}),
            "%7 = all_gather(%in0, group=\"g\", dim=0, sizes=[2, 2])  # f32[4, 3], 24 B\n"
            "%1, %2 = split(%7, split_size=2)  # f32[2, 3], f32[2, 3]\n"
            "%4 = t(%1)  # f32[3, 2]\n"
            "%5 = t(%2)  # f32[3, 2]\n"
            "%6 = sub(%5, %4)  # f32[3, 2]\n");
}

TEST(FunctionalCollectives, LeavesWhatRunsBesideOtherWork) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    Tensors x{in[0].exp()};
    const auto work = group->allreduce(x);
    const at::Tensor meanwhile = in[0].sin();
    work->wait();
    return {x[0] + meanwhile};
  };
  EXPECT_EQ(folded_code(fn, {torch::randn({4})}),
            "%1 = exp(%in0)  # f32[4]\n"
            "%w2 = all_reduce_([%1], group=\"g\", reduce_op=sum, sparse_indices=none)  # 16 B\n"
            "%3 = sin(%in0)  # f32[4]\n"
            "serried::wait(%w2)\n"
            "%4 = add(%1, %3)  # f32[4]\n");
}

TEST(FunctionalCollectives, LeavesWhatHasNoOtherForm) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    at::Tensor x = in[0].exp();
    Tensors one{x};
    c10d::AllreduceOptions patient;
    patient.timeout = std::chrono::seconds(7);
    group->allreduce(one, patient)->wait();
    c10d::AllreduceOptions scaled;
    scaled.reduceOp = c10d::makePreMulSum(2.0);
    group->allreduce(one, scaled)->wait();
    group->reduce(one)->wait();
    group->send(one, 1, 7)->wait();
    Tensors two{x, in[0].sin()};
    group->allreduce_coalesced(two)->wait();
    return {x, two[1]};
  };
  EXPECT_EQ(folded_code(fn, {torch::randn({4})}),
            "%1 = exp(%in0)  # f32[4]\n"
            "%w2 = all_reduce_([%1], group=\"g\", reduce_op=sum, sparse_indices=none, timeout=7000)  # 16 B\n"
            "serried::wait(%w2)\n"
            "%w3 = all_reduce_([%1], group=\"g\", reduce_op=premul_sum(2.0), sparse_indices=none)  # 16 B\n"
            "serried::wait(%w3)\n"
            "%w4 = reduce_([%1], group=\"g\", reduce_op=sum, root_rank=0, root_tensor=0)  # 16 B\n"
            "serried::wait(%w4)\n"
            "%w5 = send([%1], group=\"g\", dst=1, tag=7)  # 16 B\n"
            "serried::wait(%w5)\n"
            "%6 = sin(%in0)  # f32[4]\n"
            "%w7 = all_reduce_([%1, %6], group=\"g\", reduce_op=sum)  # 32 B\n"
            "serried::wait(%w7)\n");
}

// Bitwise the same on 1 to 3 ranks of each backend, and nothing of c10d is left.
void expect_all_folded(const OnGroup& fn) {
  for (const std::string backend : {"threads", "gloo"}) {
    for (int world_size : {1, 2, 3}) {
      const auto check = [&](const Group& group) {
        const Function here = [&](const Tensors& in) { return fn(in, group); };
        torch::Generator generator = at::detail::createCPUGenerator(uint64_t(7 + group->getRank()));
        const Tensors in{torch::randn({6, 5}, generator)};
        const Recorded after = with(record(here, in), {passes::functional_collectives()});
        EXPECT_EQ(after.graph.count("wait"), 0) << code_of(after);
        expect_same_results(here, after, in);
        expect_same_results(here, with(after, passes::defaults()), in);
      };
      run_ranks(world_size, check, {.backend = backend});
    }
  }
}

TEST(FunctionalCollectives, ReductionsGiveTheSame) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    expect_all_folded([dtype](const Tensors& in, const Group& group) -> Tensors {
      Tensors out;
      for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::MAX, c10d::ReduceOp::PRODUCT}) {
        out.push_back(reduced(group, in[0].to(dtype) * 2, op));
        at::Tensor mine = at::empty({6 / group->getSize(), 5}, dtype), whole = in[0].to(dtype) * 3;
        c10d::ReduceScatterOptions options;
        options.reduceOp = op;
        group->reduce_scatter_single(mine, whole, options)->wait();
        out.push_back(mine);
      }
      return out;
    });
  }
}

// Gloo's average is a sum of ours that is divided: another call for ranks that wait later.
TEST(FunctionalCollectives, AveragesAreTakenWhereTheBackendHasThem) {
  for (const std::string backend : {"threads", "gloo"}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const auto check = [&](const Group& group) {
        const Function fn = [&](const Tensors& in) -> Tensors {
          return {reduced(group, in[0].to(dtype) * 2, c10d::ReduceOp::AVG)};
        };
        torch::Generator generator = at::detail::createCPUGenerator(uint64_t(7 + group->getRank()));
        const Tensors in{torch::randn({5}, generator)};
        const Recorded after = with(record(fn, in), {passes::functional_collectives()});
        expect_same_results(fn, after, in);
        EXPECT_EQ(after.graph.count("wait"), backend == "gloo" ? 1 : 0) << code_of(after);
      };
      for (int world_size : {1, 3}) run_ranks(world_size, check, {.backend = backend});
    }
  }
}

TEST(FunctionalCollectives, MovesGiveTheSame) {
  expect_all_folded([](const Tensors& in, const Group& group) -> Tensors {
    const int64_t size = group->getSize();
    at::Tensor x = in[0].exp(), whole = at::empty({6 * size, 5}), flat = at::empty({30 * size});
    group->all_gather_single(whole, x)->wait();
    group->all_gather_single(flat, x)->wait();
    group->all_gather_single(whole, x.mul_(2))->wait();  // written twice
    at::Tensor equal = at::empty_like(x), given = at::empty({6, 5});
    std::vector<int64_t> none, sizes(size_t(size), 6 / size);
    group->all_to_all_single(equal, x, none, none)->wait();
    group->all_to_all_single(given, x, sizes, sizes)->wait();
    Tensors shared{x};
    c10d::BroadcastOptions options;
    options.rootRank = size - 1;
    group->broadcast(shared, options)->wait();
    return {whole, flat, equal, given, x};
  });
}

TEST(FunctionalCollectives, ListsGiveTheSame) {
  expect_all_folded([](const Tensors& in, const Group& group) -> Tensors {
    std::vector<Tensors> list(1);
    for (int i = 0; i < std::max(2, group->getSize()); ++i) list[0].push_back(at::empty_like(in[0]));
    if (group->getSize() == 1) return {list[0][0].copy_(in[0])};
    Tensors x{in[0]};
    group->allgather(list, x)->wait();
    list[0][1].add_(1);
    return {at::cat(list[0]), list[0][0].t() * list[0][1].select(0, 3).view({5, 1})};
  });
}

}  // namespace
}  // namespace serried
