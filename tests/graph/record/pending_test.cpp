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
