// Collectives called on a group itself, as c10d offers them: in place, asynchronous, point to point.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::OnRanks;

class CapturedC10d : public OnRanks {
 protected:
  using Fn = std::function<at::Tensor(const Group&, const at::Tensor&)>;

  /// Replays of `fn` give what the function itself gives.
  void expect_replays(const Fn& fn, const std::string& node) {
    on_ranks([&](const Group& group) {
      auto step = capture([&](const at::Tensor& x) { return fn(group, x); });
      for (int i = 0; i < 6; ++i) {
        const at::Tensor x = testing::sample({4 * group->getSize(), 3}, group->getRank(), at::kFloat, i);
        const at::Tensor expected = fn(group, x);
        EXPECT_TRUE(at::equal(step(x), expected)) << "call " << i;
      }
      EXPECT_EQ(step.replays(), 3) << step.last_recapture_reason();
      EXPECT_GE(step.graph().count(node), 1) << step.graph().to_string();
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, CapturedC10d, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

TEST_P(CapturedC10d, AllReduceInPlace) {
  expect_replays(
      [](const Group& group, const at::Tensor& x) {
        std::vector<at::Tensor> tensors = {x * 2};
        group->allreduce(tensors)->wait();
        return tensors[0] + 1;
      },
      "all_reduce");
}

TEST_P(CapturedC10d, ACollectiveOnItsWayIsWaitedForWhereTheStepWaits) {
  expect_replays(
      [](const Group& group, const at::Tensor& x) {
        std::vector<at::Tensor> tensors = {x * 2};
        const auto work = group->allreduce(tensors);
        const at::Tensor meanwhile = x.sin();
        work->wait();
        return tensors[0] + meanwhile;
      },
      "wait");
}

TEST_P(CapturedC10d, ARankMayWaitLaterThanAnother) {
  expect_replays(
      [](const Group& group, const at::Tensor& x) {
        at::Tensor sum = x * 2;
        for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG}) {
          std::vector<at::Tensor> tensors = {sum};
          c10d::AllreduceOptions options;
          options.reduceOp = op;
          const auto work = group->allreduce(tensors, options);
          const at::Tensor meanwhile = group->getRank() == 0 ? x.sin() : x;
          work->wait();
          sum = tensors[0] + meanwhile;
        }
        return sum;
      },
      "all_reduce");
}

TEST_P(CapturedC10d, BroadcastFromTheLastRank) {
  expect_replays(
      [](const Group& group, const at::Tensor& x) {
        std::vector<at::Tensor> tensors = {x * 2};
        c10d::BroadcastOptions options;
        options.rootRank = group->getSize() - 1;
        group->broadcast(tensors, options)->wait();
        return tensors[0];
      },
      "broadcast");
}

TEST_P(CapturedC10d, GathersIntoOneTensorAndIntoAList) {
  expect_replays(
      [](const Group& group, const at::Tensor& x) {
        at::Tensor whole = at::empty({x.size(0) * group->getSize(), x.size(1)});
        at::Tensor part = x * 2;
        group->_allgather_base(whole, part)->wait();
        std::vector<std::vector<at::Tensor>> list(1);
        for (int i = 0; i < group->getSize(); ++i) list[0].push_back(at::empty_like(x));
        std::vector<at::Tensor> inputs = {x};
        group->allgather(list, inputs)->wait();
        return whole + at::cat(list[0]);
      },
      "all_gather");
}

TEST_P(CapturedC10d, ReduceScatter) {
  expect_replays(
      [](const Group& group, const at::Tensor& x) {
        at::Tensor mine = at::empty({x.size(0) / group->getSize(), x.size(1)});
        at::Tensor whole = x * 2;
        group->_reduce_scatter_base(mine, whole)->wait();
        return mine;
      },
      "reduce_scatter");
}

TEST_P(CapturedC10d, AllToAll) {
  expect_replays(
      [](const Group& group, const at::Tensor& x) {
        at::Tensor exchanged = at::empty_like(x), given = x * 2;
        std::vector<int64_t> even;
        group->alltoall_base(exchanged, given, even, even)->wait();
        return exchanged;
      },
      "all_to_all");
}

TEST_P(CapturedC10d, MessagesGoRoundARing) {
  expect_replays(
      [](const Group& group, const at::Tensor& x) {
        const int rank = group->getRank(), size = group->getSize();
        std::vector<at::Tensor> sent = {x * 2}, received = {at::empty_like(x)};
        const auto sending = group->send(sent, (rank + 1) % size, 7);
        const auto receiving = group->recv(received, (rank + size - 1) % size, 7);
        receiving->wait();
        sending->wait();
        return received[0];
      },
      "recv");
}

TEST_P(CapturedC10d, FunctionalOnesReplayWithTheirGradients) {
  on_ranks([&](const Group& group) {
    const at::Tensor w = torch::full({2, 3}, 0.5f).requires_grad_();
    const auto eager = [&](const at::Tensor& x) {
      w.mutable_grad().reset();
      const at::Tensor gathered = all_gather(x * w, group, {.dim = 1});
      const at::Tensor piece = reduce_scatter(gathered, group, {.dim = 1});
      const at::Tensor there = all_to_all(piece, group, {.split_dim = 1, .concat_dim = 0});
      (there.square().sum() + broadcast(x * w, group).sum() + all_reduce(x * w, group).sum()).backward();
      return w.grad().clone();
    };
    auto step = capture(eager);
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = testing::sample({2, 3}, group->getRank(), at::kFloat, i);
      const at::Tensor expected = eager(x);
      EXPECT_TRUE(at::equal(step(x), expected)) << "call " << i;
    }
    EXPECT_EQ(step.replays(), 3) << step.last_recapture_reason();
  });
}

}  // namespace
}  // namespace serried
