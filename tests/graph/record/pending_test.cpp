// Pendings in captured functions: a start and a wait, where the function has them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/async.h"
#include "serried/graph/capture.h"
#include "tests/support/close.h"
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
