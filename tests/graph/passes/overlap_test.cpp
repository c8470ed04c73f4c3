// Collectives start early and are waited for late.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/graph/passes/recorded.h"
#include "tests/support/errors.h"
#include "tests/support/fake_group.h"

namespace serried {
namespace {

using namespace serried::testing;

TEST(Overlap, StartsEarlyAndWaitsLate) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor a = in[0].exp(), b = in[0].sin();
    const at::Tensor sum = all_reduce(a, group);
    return {b.cos().add(sum)};
  };
  const Recorded before = record(fn, {torch::randn({4})});
  EXPECT_EQ(code_of(before),
            "%1 = exp(%in0)  # f32[4]\n"
            "%2 = sin(%in0)  # f32[4]\n"
            "%3 = all_reduce(%1, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%4 = cos(%2)  # f32[4]\n"
            "%5 = add(%4, %3)  # f32[4]\n");
  EXPECT_EQ(code_of(with(before, {passes::overlap()})),
            "%1 = exp(%in0)  # f32[4]\n"
            "%3, %w6 = start_all_reduce(%1, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%2 = sin(%in0)  # f32[4]\n"
            "%4 = cos(%2)  # f32[4]\n"
            "serried::wait(%w6)\n"
            "%5 = add(%4, %3)  # f32[4]\n");
}

Tensors all_kinds(const Tensors& in, const Group& group) {
  const at::Tensor a = all_reduce(in[0].exp(), group, c10d::ReduceOp::AVG);
  const at::Tensor b = all_gather(in[0].sin(), group);
  const at::Tensor c = reduce_scatter(in[0].cos().repeat({group->getSize(), 1}), group);
  at::Tensor d = in[0].tan();
  all_reduce_(d, group);
  const at::Tensor e = all_reduce(all_reduce(d, group), group, c10d::ReduceOp::MAX);
  d.add_(1);
  return {a + c, b, d, e, all_gather(a, group, {.dim = 1})};
}

TEST(Overlap, GivesTheSameOnAllBackends) {
  for (const std::string backend : {"threads", "gloo"}) {
    const auto check = [](const Group& group) {
      const Function fn = [&](const Tensors& in) { return all_kinds(in, group); };
      torch::Generator generator = at::detail::createCPUGenerator(uint64_t(7 + group->getRank()));
      const Tensors in{torch::randn({5, 3}, generator)};
      const Recorded recorded = record(fn, in);
      for (const auto& list : {std::vector<Pass>{passes::overlap()}, {passes::overlap(1)}}) {
        const Recorded after = with(recorded, list);
        EXPECT_EQ(after.graph.count("wait"), 7);
        expect_same_results(fn, after, in);
        expect_same_results(fn, with(after, passes::defaults()), in);
      }
    };
    for (int world_size : {1, 2, 3}) run_ranks(world_size, check, {.backend = backend});
  }
}

// As c10d offers them: a bucket that is on its way while the next is made.
Tensors buckets(const Tensors& in, const Group& group) {
  Tensors one{in[0].exp()}, two{in[0].sin()};
  const auto first = group->allreduce(one);
  two[0].mul_(2);
  const auto second = group->allreduce(two);
  first->wait();
  second->wait();
  return {in[0].cos().add(one[0]), two[0]};
}

TEST(Overlap, TakesBucketsThatC10dReduces) {
  const Group group = fake_group(0, 2);
  const Recorded before = record([&](const Tensors& in) { return buckets(in, group); }, {torch::randn({4})});
  EXPECT_EQ(code_of(before),
            "%1 = exp(%in0)  # f32[4]\n"
            "%2 = sin(%in0)  # f32[4]\n"
            "%w3 = all_reduce_([%1], group=\"g\", reduce_op=sum, sparse_indices=none)  # 16 B\n"
            "mul_(%2, other=2)\n"
            "%w4 = all_reduce_([%2], group=\"g\", reduce_op=sum, sparse_indices=none)  # 16 B\n"
            "serried::wait(%w3)\n"
            "serried::wait(%w4)\n"
            "%5 = cos(%in0)  # f32[4]\n"
            "%6 = add(%5, %1)  # f32[4]\n");
  EXPECT_EQ(code_of(with(before, {passes::overlap()})),
            "%1 = exp(%in0)  # f32[4]\n"
            "%w7 = start_all_reduce_(%1, group=\"g\", op=sum)  # 16 B\n"
            "%2 = sin(%in0)  # f32[4]\n"
            "mul_(%2, other=2)\n"
            "%w8 = start_all_reduce_(%2, group=\"g\", op=sum)  # 16 B\n"
            "%5 = cos(%in0)  # f32[4]\n"
            "serried::wait(%w7)\n"
            "%6 = add(%5, %1)  # f32[4]\n"
            "serried::wait(%w8)\n");
}

// Starts of c10d with work until their wait, of each kind that has an op of ours.
Tensors of_c10d(const Tensors& in, const Group& group) {
  const int64_t size = group->getSize();
  at::Tensor x = in[0].exp(), whole = at::empty({6 * size, 5}), mine = at::zeros({6 / size, 5});
  at::Tensor there = at::empty({6, 5}), back = at::empty({6, 5});
  std::vector<int64_t> none, sizes(size_t(size), 6 / size);
  Tensors shared{in[0].tan()};
  std::vector<Tensors> list(1);
  for (int64_t i = 0; i < size; ++i) list[0].push_back(at::empty_like(x));
  Tensors given{x};
  const std::vector<c10::intrusive_ptr<c10d::Work>> works{group->all_gather_single(whole, x),
                                                          group->reduce_scatter_single(mine, x),
                                                          group->all_to_all_single(there, x, none, none),
                                                          group->all_to_all_single(back, x, sizes, sizes),
                                                          group->broadcast(shared),
                                                          group->allgather(list, given)};
  const at::Tensor meanwhile = in[0].cos();
  for (const auto& work : works) work->wait();
  return {whole, mine, there + meanwhile, back, shared[0], at::cat(list[0])};
}

Tensors functional(const Tensors& in, const Group& group) {
  std::vector<int64_t> sizes(size_t(group->getSize()), 0);  // all for rank 0
  sizes[0] = 6;
  at::Tensor shared = in[0].tan();
  const at::Tensor a = broadcast(in[0].exp(), group, {.src = group->getSize() - 1});
  const at::Tensor b = all_to_all(in[0].sin(), group, {.split_sizes = sizes});
  broadcast_(shared, group);
  all_reduce_(shared, group);
  return {a.view({-1}) + 1, b, shared};
}

TEST(Overlap, TakesEveryKind) {
  for (const std::string backend : {"threads", "gloo"}) {
    const auto check = [](const Group& group) {
      torch::Generator generator = at::detail::createCPUGenerator(uint64_t(7 + group->getRank()));
      const Tensors in{torch::randn({6, 5}, generator)};
      const auto expect_started = [&](const Function& fn, int64_t num_waits) {
        const Recorded after = with(record(fn, in), {passes::overlap()});
        EXPECT_EQ(after.graph.count("wait"), num_waits) << code_of(after);
        for (size_t i : after.graph.collectives()) {
          EXPECT_TRUE(after.graph.nodes()[i].op.operator_name().name.starts_with("serried::start_")) << code_of(after);
        }
        expect_same_results(fn, after, in);
        expect_same_results(fn, with(after, passes::defaults()), in);
      };
      expect_started([&](const Tensors& x) { return buckets(x, group); }, 2);
      expect_started([&](const Tensors& x) { return functional(x, group); }, 4);
      if (group->getSize() > 1) expect_started([&](const Tensors& x) { return of_c10d(x, group); }, 6);
    };
    for (int world_size : {1, 2, 3}) run_ranks(world_size, check, {.backend = backend});
  }
}

torch::nn::Sequential four_layers() {
  return seeded(3, [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(7, 7));
    return net;
  });
}

TEST(Overlap, TrainsInDataParallelAsEagerDoes) {
  for (const std::string backend : {"threads", "gloo"}) {
    const auto check = [](const Group& group) {
      const auto trained = [&](bool is_captured) {
        torch::nn::Sequential net = four_layers();
        DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 200.0 / (1 << 20)});
        torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        const auto eager = [&](const at::Tensor& x) {
          optimizer.zero_grad();
          at::Tensor loss = ddp(x).square().mean();
          loss.backward();
          optimizer.step();
          return loss.detach();
        };
        std::vector<Pass> list{passes::overlap()};
        for (const Pass& pass : passes::defaults()) list.push_back(pass);
        auto step = capture(eager, {.passes = list});
        Tensors ends;
        for (int i = 0; i < 10; ++i) {
          const at::Tensor x = seeded(10 * i + group->getRank(), [] { return at::randn({3, 7}); });
          ends.push_back(is_captured ? step(x) : eager(x));
        }
        for (const at::Tensor& p : net->parameters()) ends.push_back(p.detach().clone());
        if (is_captured) EXPECT_GE(step.graph().count("serried::start_all_reduce_"), 4) << step.graph().to_string();
        return ends;
      };
      const Tensors expected = trained(false), got = trained(true);
      for (size_t i = 0; i < expected.size(); ++i) expect_equal(got[i], expected[i], std::to_string(i));
    };
    for (int world_size : {2, 3}) run_ranks(world_size, check, {.backend = backend});
  }
}

TEST(Overlap, LeavesWhatCannotStartAsItWasRecorded) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    Tensors scaled{in[0].exp()};
    c10d::AllreduceOptions how;
    how.reduceOp = c10d::makePreMulSum(0.5);
    const auto work = group->allreduce(scaled, how);
    const at::Tensor meanwhile = in[0].sin();
    work->wait();
    return {meanwhile, scaled[0]};
  };
  const Recorded before = record(fn, {torch::randn({2, 3})});
  EXPECT_EQ(code_of(with(before, {passes::overlap()})), code_of(before));
}

TEST(Overlap, StartsEveryDtypeAndLayout) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor counts = all_reduce(in[0].to(at::kLong), group, c10d::ReduceOp::AVG);
    const at::Tensor turned = in[0].sin();
    all_reduce_(turned.t(), group);
    const at::Tensor marks = all_gather(in[0] > 0, group, {.dim = 1});
    return {in[0].cos(), turned, counts, marks};
  };
  const Recorded after = with(record(fn, {torch::randn({2, 3})}), {passes::overlap()});
  EXPECT_EQ(after.graph.count("serried::start_all_reduce"), 1);
  EXPECT_EQ(after.graph.count("serried::start_all_reduce_"), 1);
  EXPECT_EQ(after.graph.count("serried::start_all_gather"), 1);
  EXPECT_EQ(after.graph.count("serried::wait"), 3);
}

TEST(Overlap, TellsPartsOfOneStorageApart) {
  const Group group = fake_group(0, 2);
  const at::Tensor memory = at::zeros({6});
  const at::Tensor one = memory.narrow(0, 0, 4), two = memory.narrow(0, 4, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    one.copy_(in[0]);
    all_reduce_(one, group);
    two.copy_(in[0].narrow(0, 1, 2));
    return {one.narrow(0, 3, 1) + two};
  };
  EXPECT_EQ(code_of(with(record(fn, {torch::randn({4})}), {passes::overlap()})),
            "copy_(%p1, %in0)\n"
            "%w6 = start_all_reduce_(%p1, group=\"g\", op=sum)  # 16 B\n"
            "%2 = slice(%in0, start=1, end=3)  # f32[2]\n"
            "%3 = as_strided(%p1, size=[2], stride=[1], storage_offset=4)  # f32[2]\n"
            "copy_(%3, %2)\n"
            "%4 = slice(%p1, start=3, end=4)  # f32[1]\n"
            "serried::wait(%w6)\n"
            "%5 = add(%4, %3)  # f32[2]\n");
}

TEST(Overlap, AViewIsMadeBeforeItIsSent) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor rows = in[0].view({2, 2});
    return {in[0].cos(), all_reduce(rows, group)};
  };
  EXPECT_EQ(code_of(with(record(fn, {torch::randn({4})}), {passes::overlap()})),
            "%1 = view(%in0, size=[2, 2])  # f32[2, 2]\n"
            "%3, %w4 = start_all_reduce(%1, group=\"g\", op=sum)  # f32[2, 2], 16 B\n"
            "%2 = cos(%in0)  # f32[4]\n"
            "serried::wait(%w4)\n");
}

TEST(Overlap, AViewIsMadeWhileTheDataIsOnItsWay) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor rows = all_reduce(in[0], group).view({2, 2});
    return {in[0].cos().sum() + rows};
  };
  EXPECT_EQ(code_of(with(record(fn, {torch::randn({4})}), {passes::overlap()})),
            "%1, %w6 = start_all_reduce(%in0, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%2 = view(%1, size=[2, 2])  # f32[2, 2]\n"
            "%3 = cos(%in0)  # f32[4]\n"
            "%4 = sum(%3)  # f32[]\n"
            "serried::wait(%w6)\n"
            "%5 = add(%4, %2)  # f32[2, 2]\n");
}

TEST(Overlap, KeepsTheOrderOfCollectives) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor late = all_reduce(in[0].exp(), group);
    return {late, all_gather(in[0], group)};
  };
  const Recorded after = with(record(fn, {torch::randn({4})}), {passes::overlap()});
  std::vector<std::string> order;
  for (size_t i : after.graph.collectives()) order.push_back(after.graph.nodes()[i].short_name());
  EXPECT_EQ(order, (std::vector<std::string>{"all_reduce", "all_gather"}));
}

TEST(Overlap, BoundsWhatIsOnItsWay) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    Tensors out;
    for (int i = 0; i < 3; ++i) out.push_back(all_reduce(in[0], group));  // 16 bytes each
    return out;
  };
  const Recorded before = record(fn, {torch::randn({4})});
  EXPECT_EQ(code_of(with(before, {passes::overlap(32)})),
            "%1, %w4 = start_all_reduce(%in0, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%2, %w5 = start_all_reduce(%in0, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "serried::wait(%w4)\n"
            "%3, %w6 = start_all_reduce(%in0, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "serried::wait(%w5)\n"
            "serried::wait(%w6)\n");
}

TEST(Overlap, WaitsBeforeTheOperandChanges) {
  for (int world_size : {2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      const Function fn = [&](const Tensors& in) -> Tensors {
        at::Tensor a = in[0].exp();
        const at::Tensor sum = all_reduce(a, group);
        a.mul_(7);
        return {sum, a};
      };
      const Tensors in{torch::randn({1000})};
      expect_same_results(fn, with(record(fn, in), {passes::overlap()}), in);
    });
  }
}

TEST(Overlap, RefusesALimitOfNothing) {
  EXPECT_EQ(error_text<c10::ValueError>([] { passes::overlap(0); }),
            "[overlap] with 0 bytes in flight nothing can overlap\n"
            "  fix: give a limit above 0, or leave the pass out");
}

}  // namespace
}  // namespace serried
