// Pendings in captured functions: a start and a wait, where the function has them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/async.h"
#include "serried/graph/capture.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::expect_equal;
using testing::OnRanks;
using testing::sample;

class CapturedPendings : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, CapturedPendings, ::testing::ValuesIn(testing::settings({1, 2, 3})),
                         testing::name_of);

// Several kinds at once, waited for in another order.
at::Tensor overlapped(const at::Tensor& x, const Group& g) {
  const Pending sum = async::all_reduce(x, g);
  const Pending all = async::all_gather(x.sin(), g, {.dim = 1});
  const Pending piece = async::reduce_scatter(x.repeat({g->getSize(), 1}), g);
  const Pending exchanged = async::all_to_all(x.exp(), g);
  const at::Tensor meanwhile = x.cos();
  const at::Tensor doubled = sum.then([](at::Tensor y) { return y * 2; }).wait();
  return (exchanged.wait().sum() + all.wait().sum()) + meanwhile + doubled + piece.wait() + sum.wait();
}

TEST_P(CapturedPendings, GiveWhatTheyGiveOutside) {
  on_ranks([](const Group& g) {
    auto step = capture([&](const at::Tensor& x) { return overlapped(x, g); });
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = sample({5, 3}, g->getRank(), at::kDouble, i) / 64;
      const at::Tensor expected = overlapped(x, g);
      expect_equal(step(x), expected, c10::str("call ", i));
    }
    EXPECT_GE(step.replays(), 3);
  });
}

at::Tensor rooted(const at::Tensor& x, const Group& g) {
  const int n = g->getSize(), last = n - 1;
  const Pending sum = async::reduce(x, g, {.dst = last});
  const PendingTensors parts = async::gather(x.sin().narrow(0, 0, 1 + g->getRank()), g);
  const bool sends = g->getRank() == last;
  const Pending mine = async::scatter(sends ? x.cos().tensor_split(n) : std::vector<at::Tensor>(), g, {.src = last});
  const at::Tensor meanwhile = x.exp();
  at::Tensor all = reduce(meanwhile, g) + sum.wait() + mine.wait().sum();
  for (const at::Tensor& part : parts.wait()) all = all + part.sum();
  for (const at::Tensor& part : gather(all, g, {.dst = last})) all = all + part;
  return all + scatter(sends ? std::vector<at::Tensor>(size_t(n), all) : std::vector<at::Tensor>(), g, {.src = last});
}

TEST_P(CapturedPendings, ThoseOfOneRankGiveWhatTheyGiveOutside) {
  std::vector<Pass> early{passes::reuse_collectives(), passes::bucket_collectives(1), passes::overlap()};
  for (const Pass& pass : passes::defaults()) early.push_back(pass);
  for (const std::vector<Pass>& list : {passes::defaults(), early}) {
    on_ranks([&](const Group& g) {
      auto step = capture([&](const at::Tensor& x) { return rooted(x, g); }, {.passes = list});
      for (int i = 0; i < 6; ++i) {
        const at::Tensor x = sample({5, 3}, g->getRank(), at::kDouble, i) / 64;
        const at::Tensor expected = rooted(x, g);
        expect_equal(step(x), expected, c10::str("call ", i));
      }
      EXPECT_GE(step.replays(), 3);
    });
  }
}

// What all ranks do together, on one process.
at::Tensor loss_of_all(const std::vector<at::Tensor>& ys) {
  return testing::sum_of(ys).pow(2).sum() + at::cat(ys).pow(3).sum() + ys[0].sin().sum();
}

TEST_P(CapturedPendings, AreTrainedThroughOneRank) {
  on_ranks([](const Group& g) {
    const int n = g->getSize(), me = g->getRank();
    std::vector<at::Tensor> plain;
    for (int r = 0; r < n; ++r) plain.push_back(sample({3}, r, at::kDouble).div(64).requires_grad_());
    const at::Tensor w = plain[size_t(me)].detach().clone().requires_grad_();
    auto step = capture([&](const at::Tensor& x) {
      const at::Tensor y = w * x;
      const at::Tensor sum = reduce(y, g, {.dst = n - 1});
      const std::vector<at::Tensor> parts = gather(y, g);
      const at::Tensor mine = scatter(me == 0 ? y.tensor_split(n) : std::vector<at::Tensor>(), g);
      (sum.pow(2).sum() + at::cat(parts).pow(3).sum() + mine.sin().sum()).backward();
      const at::NoGradGuard no_grad;
      w.sub_(w.grad(), 0.125);
      w.mutable_grad().reset();
    });
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = sample({3}, i, at::kDouble) / 64;
      step(x);
      std::vector<at::Tensor> ys;
      for (const at::Tensor& each : plain) ys.push_back(each * x);
      const std::vector<at::Tensor> grads = torch::autograd::grad({loss_of_all(ys)}, plain);
      const at::NoGradGuard no_grad;
      for (size_t r = 0; r < plain.size(); ++r) plain[r].sub_(grads[r], 0.125);
      testing::expect_close(w.detach(), plain[size_t(me)].detach(), c10::str("call ", i));
    }
    EXPECT_GE(step.replays(), 3);
  });
}

TEST(CapturedPending, IsAStartAndAWait) {
  run_ranks(2, [](const Group& g) {
    auto step = capture(
        [&](const at::Tensor& x) {
          const Pending sum = async::all_reduce(x, g);
          const at::Tensor meanwhile = x.cos();
          return sum.wait() + meanwhile;
        },
        {.passes = {}});
    for (int i = 0; i < 3; ++i) step(at::full({4}, double(i)));
    EXPECT_EQ(step.graph().count("serried::start_all_reduce"), 1) << step.graph().to_string();
    EXPECT_EQ(step.graph().count("serried::wait"), 1) << step.graph().to_string();
  });
  run_ranks(2, [](const Group& g) {
    auto step = capture([&](const at::Tensor& x) { return rooted(x, g); }, {.passes = {}});
    for (int i = 0; i < 3; ++i) step(at::full({5, 3}, double(i)));
    for (const char* name : {"reduce", "gather", "scatter"}) {
      EXPECT_EQ(step.graph().count(c10::str("serried::start_", name)), 1) << step.graph().to_string();
      EXPECT_EQ(step.graph().count(c10::str("serried::", name)), 1) << step.graph().to_string();
    }
    EXPECT_EQ(step.graph().count("serried::wait"), 3) << step.graph().to_string();
  });
}

// Packed and unpacked on both sides, in one collective and in several, beside other work.
at::Tensor redistributed_meanwhile(const at::Tensor& x) {
  const DTensor d(x);
  const size_t axes = d.placements().size();
  const Pending whole = async::redistribute(d, Placements(axes));
  const Pending columns = async::redistribute(d, Placements(axes, Shard(1)));
  const Pending rows = async::redistribute(DTensor(d * 2), Placements(axes, Shard(0)));
  const at::Tensor meanwhile = d.cos();
  return (columns.wait().exp() + meanwhile).sum() + (rows.wait() * whole.wait()).sum();
}

TEST(CapturedPending, ARedistributionGivesWhatItGivesOutside) {
  for (const Sizes& shape : {Sizes{1}, Sizes{2}, Sizes{3}, Sizes{2, 2}}) {
    testing::on_mesh(shape, [&](const DeviceMesh& mesh) {
      auto step = capture([](const at::Tensor& x) { return redistributed_meanwhile(x); });
      for (int i = 0; i < 12; ++i) {
        const at::Tensor x = sample({5, 6, 2}, i, at::kDouble) / 64;
        const DTensor d = distribute_tensor(x, mesh, Placements(shape.size(), Shard(i % 2)));
        const at::Tensor expected = (x.exp() + x.cos()).sum() + (x * x * 2).sum();
        testing::expect_close(testing::full(step(d)), expected, c10::str("call ", i));
      }
      EXPECT_GE(step.replays(), 2);
    });
  }
}

TEST(CapturedPending, ARedistributionIsAStartAndAWait) {
  testing::on_mesh({2}, [](const DeviceMesh& mesh) {
    auto step = capture(
        [&](const at::Tensor& x) {
          const Pending whole = async::redistribute(DTensor(x), {Replicate()});
          const at::Tensor meanwhile = x.cos();
          return whole.wait() * meanwhile;
        },
        {.passes = {}});
    for (int i = 0; i < 4; ++i) {
      const at::Tensor x = at::arange(24, at::kDouble).view({4, 6}) + double(i);
      testing::expect_close(testing::full(step(distribute_tensor(x, mesh, {Shard(1)}))), x * x.cos());
    }
    EXPECT_EQ(step.graph().count("serried::start_all_gather"), 1) << step.graph().to_string();
    EXPECT_EQ(step.graph().count("serried::wait"), 1) << step.graph().to_string();
    EXPECT_GE(step.replays(), 1);
  });
}

// A replay would start another one, and leave this one where it is.
TEST(CapturedPending, ARedistributionLeftOutsideIsRefused) {
  for (const auto& [from, to] : std::vector<std::pair<Placement, Placement>>{
           {Shard(0), Replicate()}, {Shard(1), Replicate()}, {Shard(0), Shard(1)}, {Partial(), Shard(0)}}) {
    testing::on_mesh({2}, [&, from = from, to = to](const DeviceMesh& mesh) {
      std::optional<Pending> next;
      auto step = capture([&](const at::Tensor& x) {
        next = async::redistribute(DTensor(x), {to});
        return x * 2;
      });
      const DTensor x = testing::place(at::arange(24, at::kDouble).view({4, 6}), mesh, {from});
      const auto calls = [&] {
        for (int i = 0; i < 6; ++i) {
          step(x);
          next->wait();
        }
      };
      EXPECT_NE(testing::error_text<graph::CaptureError>(calls), "no error") << to_string(from) << to_string(to);
    });
  }
}

// The gradient of what arrives is part of the step.
TEST(CapturedPending, ARedistributionIsTrainedThrough) {
  testing::on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor start = at::arange(15, at::kDouble).view({5, 3}) / 16;
    const DTensor w = distribute_tensor(start.clone().requires_grad_(), mesh, {Shard(0)});
    auto step = capture([&](const at::Tensor& x) {
      const Pending whole = async::redistribute(w, {Shard(1)});
      const at::Tensor penalty = w.pow(2).sum();
      ((whole.wait() * x).sum() + penalty).backward();
      const at::NoGradGuard no_grad;
      w.sub_(w.grad(), 0.125);
      w.mutable_grad().reset();
    });
    at::Tensor expected = start.clone();
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = sample({5, 3}, i, at::kDouble) / 64;
      step(distribute_tensor(x, mesh, {Replicate()}));
      expected -= 0.125 * (x + 2 * expected);
      testing::expect_close(w.full_tensor(), expected, c10::str("call ", i));
    }
    EXPECT_GE(step.replays(), 2);
  });
}

TEST(CapturedPending, KeepsItsTimeout) {
  run_ranks(2, [](const Group& g) {
    auto step =
        capture([&](const at::Tensor& x) { return all_reduce(x, g, {.timeout = std::chrono::milliseconds(12'345)}); });
    for (int i = 0; i < 3; ++i) step(at::full({4}, double(i)));
    EXPECT_NE(step.graph().to_string().find("timeout_ms=12345"), std::string::npos) << step.graph().to_string();
  });
}

}  // namespace
}  // namespace serried
