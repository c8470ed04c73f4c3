// Collectives that are started only: what they give, when, in any order, and what they refuse.
#include "serried/comm/collectives/async.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using c10d::ReduceOp;
using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::sample;
using testing::samples;
using testing::sum_of;
using Tensors = std::vector<at::Tensor>;

class AsyncCollectives : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, AsyncCollectives, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

/// A collective, blocking and started, of a tensor that may differ between ranks.
struct Kind {
  std::string name;
  std::function<std::vector<int64_t>(int rank)> shape;
  std::function<at::Tensor(const at::Tensor&, const Group&)> run;
  std::function<Pending(const at::Tensor&, const Group&)> start;
};

std::vector<int64_t> same(int) {
  return {5, 3};
}
std::vector<int64_t> by_rank(int rank) {
  return {(rank * 2 + 1) % 4, 3};
}
std::vector<int64_t> columns_by_rank(int rank) {
  return {5, (rank + 2) % 4};
}

std::vector<Kind> kinds() {
  return {
      {"all_reduce", same, [](auto& x, auto& g) { return all_reduce(x, g); },
       [](auto& x, auto& g) { return async::all_reduce(x, g); }},
      {"average", same, [](auto& x, auto& g) { return all_reduce(x, g, ReduceOp::AVG); },
       [](auto& x, auto& g) { return async::all_reduce(x, g, {.op = ReduceOp::AVG}); }},
      {"all_gather", by_rank, [](auto& x, auto& g) { return all_gather(x, g); },
       [](auto& x, auto& g) { return async::all_gather(x, g); }},
      {"all_gather along 1", columns_by_rank, [](auto& x, auto& g) { return all_gather(x, g, {.dim = 1}); },
       [](auto& x, auto& g) { return async::all_gather(x, g, {.dim = 1}); }},
      {"reduce_scatter", same, [](auto& x, auto& g) { return reduce_scatter(x, g); },
       [](auto& x, auto& g) { return async::reduce_scatter(x, g); }},
      {"reduce_scatter along 1", same, [](auto& x, auto& g) { return reduce_scatter(x, g, {.dim = 1}); },
       [](auto& x, auto& g) { return async::reduce_scatter(x, g, {.dim = 1}); }},
      {"all_to_all", same, [](auto& x, auto& g) { return all_to_all(x, g, {.split_dim = 0, .concat_dim = 1}); },
       [](auto& x, auto& g) { return async::all_to_all(x, g, {.split_dim = 0, .concat_dim = 1}); }},
      {"all_to_all of rows", by_rank, [](auto& x, auto& g) { return all_to_all(x, g); },
       [](auto& x, auto& g) { return async::all_to_all(x, g); }},
      {"broadcast", same, [](auto& x, auto& g) { return broadcast(x, g, {.src = g->getSize() - 1}); },
       [](auto& x, auto& g) { return async::broadcast(x, g, {.src = g->getSize() - 1}); }},
  };
}

bool reduces(const Kind& kind) {
  return kind.name == "all_reduce" || kind.name == "average" || kind.name.starts_with("reduce_scatter");
}

TEST_P(AsyncCollectives, GiveWhatBlockingOnesGive) {
  on_ranks([](const Group& g) {
    for (const at::ScalarType dtype : testing::kAllDtypes) {
      for (const Kind& kind : kinds()) {
        if (kind.name == "average" && dtype == at::kBool) continue;
        if (reduces(kind) && dtype == at::kShort && g->getBackendName() == "gloo") continue;  // gloo cannot add it
        const at::Tensor x = sample(kind.shape(g->getRank()), g->getRank(), dtype);
        const at::Tensor expected = kind.run(x, g);
        expect_equal(kind.start(x, g).wait(), expected, c10::str(kind.name, " of ", dtype));
      }
    }
  });
}

TEST_P(AsyncCollectives, SumWhatAllRanksHold) {
  on_ranks([](const Group& g) {
    const Pending sum = async::all_reduce(sample({70001}, g->getRank()), g);
    expect_equal(sum.wait(), sum_of(samples({70001}, g->getSize())));
  });
}

TEST_P(AsyncCollectives, ReturnBeforeOtherRanksCome) {
  for (const Kind& kind : kinds()) {
    std::atomic<bool> first_has_started = false;
    on_ranks([&](const Group& g) {
      while (g->getRank() > 0 && !first_has_started) std::this_thread::yield();
      const at::Tensor x = sample(kind.shape(g->getRank()), g->getRank());
      const Pending pending = kind.start(x, g);
      if (g->getRank() == 0 && g->getSize() > 1 && kind.name != "broadcast") {
        EXPECT_FALSE(pending.ready()) << kind.name;
      }
      first_has_started = true;
      pending.wait();
      EXPECT_TRUE(pending.ready()) << kind.name;
    });
  }
}

TEST_P(AsyncCollectives, AreWaitedForInAnyOrderTwiceOrNever) {
  on_ranks([](const Group& g) {
    const std::vector<Kind> all = kinds();
    Tensors inputs, expected;
    for (const Kind& kind : all) {
      inputs.push_back(sample(kind.shape(g->getRank()), g->getRank()));
      expected.push_back(kind.run(inputs.back(), g));
    }
    for (int round = 0; round < 4; ++round) {
      std::vector<Pending> pending;
      for (size_t i = 0; i < all.size(); ++i) pending.push_back(all[i].start(inputs[i], g));
      // Every rank waits in another order, and not for all.
      for (size_t k = 0; k < all.size(); ++k) {
        const size_t i = (k * 7 + size_t(g->getRank()) * 4) % all.size();
        if ((i + size_t(round)) % 4 == 3) continue;
        expect_equal(pending[i].wait(), expected[i], all[i].name);
        EXPECT_TRUE(pending[i].wait().is_same(pending[i].wait()));
      }
    }
    barrier(g);
  });
}

TEST_P(AsyncCollectives, BecomeReadyWithoutAWait) {
  on_ranks([](const Group& g) {
    for (const Kind& kind : kinds()) {
      const at::Tensor x = sample(kind.shape(g->getRank()), g->getRank());
      const at::Tensor expected = kind.run(x, g);
      const Pending pending = kind.start(x, g);
      while (!pending.ready()) std::this_thread::yield();
      expect_equal(pending.wait(), expected, kind.name);
    }
  });
}

TEST_P(AsyncCollectives, PassResultsAndErrorsOnToThen) {
  on_ranks([](const Group& g) {
    const at::Tensor x = sample({4}, g->getRank());
    const at::Tensor sum = sum_of(samples({4}, g->getSize()));
    const Pending pending = async::all_reduce(x, g);
    const Pending twice = pending.then([](at::Tensor y) { return y * 2; });
    const Pending failing = twice.then([](at::Tensor) -> at::Tensor { throw std::runtime_error("of then"); });
    const Pending after = failing.then([](at::Tensor y) { return y; });
    EXPECT_THROW(after.wait(), std::runtime_error);
    EXPECT_THROW(failing.wait(), std::runtime_error);
    EXPECT_THROW(failing.wait(), std::runtime_error);
    expect_equal(twice.wait(), sum * 2);
    expect_equal(pending.wait(), sum);
  });
}

TEST_P(AsyncCollectives, LetGoOfWhatThenHasUsed) {
  on_ranks([](const Group& g) {
    c10::weak_intrusive_ptr<c10::StorageImpl> used(c10::intrusive_ptr<c10::StorageImpl>{});
    const Pending pending = async::all_reduce(sample({4}, g->getRank()), g).then([&](at::Tensor y) {
      used = y.storage().getWeakStorageImpl();
      return y * 2;
    });
    expect_equal(pending.wait(), sum_of(samples({4}, g->getSize())) * 2);
    while (!used.expired()) std::this_thread::yield();  // threads of gloo let go a moment later
  });
}

TEST_P(AsyncCollectives, HaveTheGradientsOfBlockingOnes) {
  on_ranks([](const Group& g) {
    for (const Kind& kind : kinds()) {
      const at::Tensor x = sample(kind.shape(g->getRank()), g->getRank(), at::kDouble);
      const auto gradient_of = [&](const std::function<at::Tensor(const at::Tensor&)>& call) {
        const at::Tensor leaf = x.clone().requires_grad_();
        const at::Tensor y = call(leaf);
        (y * sample(y.sizes(), g->getRank() + 1, at::kDouble)).sum().backward();
        return leaf.grad();
      };
      const at::Tensor expected = gradient_of([&](const at::Tensor& leaf) { return kind.run(leaf, g); });
      expect_close(gradient_of([&](const at::Tensor& leaf) { return kind.start(leaf, g).wait(); }), expected,
                   kind.name);
    }
  });
}

TEST_P(AsyncCollectives, WriteIntoWhatTheyAreGiven) {
  on_ranks([](const Group& g) {
    const int n = g->getSize();
    at::Tensor x = sample({3, 4}, g->getRank());
    EXPECT_TRUE(async::all_reduce_(x, g).wait().is_same(x));
    expect_equal(x, sum_of(samples({3, 4}, n)));
    at::Tensor turned = sample({3, 4}, g->getRank()).t();
    async::all_reduce_(turned, g, {.op = ReduceOp::MAX}).wait();
    expect_equal(turned, all_reduce(sample({3, 4}, g->getRank()), g, ReduceOp::MAX).t());
    at::Tensor y = sample({3, 4}, g->getRank()).t();
    EXPECT_TRUE(async::broadcast_(y, g).wait().is_same(y));
    expect_equal(y, sample({3, 4}, 0).t());
    const at::Tensor gathered = at::empty({2 * n});
    async::all_gather_into(gathered, sample({2}, g->getRank()), g).wait();
    expect_equal(gathered, at::cat(samples({2}, n)));
    const at::Tensor scattered = at::empty({2});
    async::reduce_scatter_into(scattered, sample({2 * n}, g->getRank()), g).wait();
    expect_equal(scattered, sum_of(samples({2 * n}, n)).narrow(0, 2 * g->getRank(), 2));
    const at::Tensor exchanged = at::empty({n});
    async::all_to_all_into(exchanged, sample({n}, g->getRank()), g).wait();
    expect_equal(exchanged, at::stack(samples({n}, n)).select(1, g->getRank()));
  });
}

TEST_P(AsyncCollectives, SendReceiveAndMeet) {
  on_ranks([](const Group& g) {
    async::barrier(g).wait();
    if (g->getSize() == 1) return;
    const int next = (g->getRank() + 1) % g->getSize(), last = (g->getRank() + g->getSize() - 1) % g->getSize();
    at::Tensor got = at::empty({300, 7});
    const at::Tensor mine = sample({300, 7}, g->getRank());
    const Pending receiving = async::recv(got, g, {.peer = last, .tag = 3});
    const Pending sending = async::send(mine, g, {.peer = next, .tag = 3});
    EXPECT_TRUE(receiving.wait().is_same(got));
    sending.wait();
    expect_equal(got, sample({300, 7}, last));
  });
}

TEST_P(AsyncCollectives, RefuseAResultThatOthersWroteOnItsWay) {
  on_ranks([](const Group& g) {
    const int64_t n = g->getSize();
    struct Writing {
      const char* name;
      std::function<Pending(const at::Tensor&)> start;
    };
    const std::vector<Writing> all = {
        {"all_reduce_", [&](const at::Tensor& out) { return async::all_reduce_(out, g); }},
        {"broadcast_", [&](const at::Tensor& out) { return async::broadcast_(out, g); }},
        {"all_gather_into", [&](const at::Tensor& out) { return async::all_gather_into(out, at::ones({4}), g); }},
        {"reduce_scatter_into",
         [&](const at::Tensor& out) { return async::reduce_scatter_into(out, at::ones({4 * n * n}), g); }},
        {"all_to_all_into", [&](const at::Tensor& out) { return async::all_to_all_into(out, at::ones({4 * n}), g); }},
    };
    for (const Writing& one : all) {
      const at::Tensor out = at::zeros({4 * n});
      const Pending pending = one.start(out);
      out.zero_();
      EXPECT_EQ(error_text<c10::ValueError>([&] { pending.wait(); }),
                c10::str("[", one.name, "] f32[", 4 * n, "] was written before wait(), by others than this call\n",
                         "  fix: write to it after wait()\n  at:  rank ", g->getRank(), "/", n));
      barrier(g);  // ranks are still in step
    }
  });
}

// Gloo's maximum ends with a copy into the tensor.
TEST_P(AsyncCollectives, TakeNoStepOfTheirOwnForAWriteOfOthers) {
  on_ranks([](const Group& g) {
    const at::Tensor x = at::full({4}, float(g->getRank()));
    const Pending pending = async::all_reduce_(x, g, c10d::ReduceOp::MAX);
    while (!pending.ready()) std::this_thread::yield();
    expect_equal(pending.wait(), at::full({4}, float(g->getSize() - 1)));
  });
}

// Views of one tensor count versions together.
TEST_P(AsyncCollectives, WriteSideBySideIntoPartsOfOneTensor) {
  on_ranks([](const Group& g) {
    const at::Tensor flat = at::ones({6});
    const Pending first = async::all_reduce_(flat.narrow(0, 0, 2), g),
                  second = async::all_reduce_(flat.narrow(0, 2, 2), g);
    const Pending third = async::all_reduce_(flat.narrow(0, 4, 2).detach(), g);
    flat.narrow(0, 4, 2).detach();
    third.wait();
    flat.narrow(0, 4, 2).fill_(7);
    first.wait();
    second.wait();
    expect_equal(flat, at::cat({at::full({4}, float(g->getSize())), at::full({2}, 7.f)}));
  });
}

TEST_P(AsyncCollectives, StayInStepWhereAnInputWasWrittenBeforeItsStart) {
  on_ranks([](const Group& g) {
    at::Tensor x = at::ones({g->getRank() + 1});  // uneven: starts when ranks know the sizes
    const Pending pending = async::all_gather(x, g);
    x.add_(1);
    EXPECT_THAT(error_text<c10::ValueError>([&] { pending.wait(); }), HasSubstr("was written while it was on its way"));
    barrier(g);
  });
}

TEST_P(AsyncCollectives, RefuseAnInputThatWasWrittenOnItsWay) {
  on_ranks([](const Group& g) {
    at::Tensor x = at::ones({4});
    const Pending pending = async::reduce_scatter(x, g, {.dim = 0});
    x.add_(1);
    EXPECT_THAT(error_text<c10::ValueError>([&] { pending.wait(); }),
                HasSubstr("[reduce_scatter] f32[4] was written while it was on its way to other ranks\n"
                          "  fix: write to it after wait(), or pass x.clone()"));
    // A sum is of a copy.
    const Pending sum = async::all_reduce(x, g);
    x.zero_();
    expect_equal(sum.wait(), at::full({4}, 2.0 * g->getSize()));
    barrier(g);
  });
}

TEST(AsyncTimeouts, AreThoseOfTheCall) {
  run_ranks(2,
            [](const Group& g) {
              if (g->getRank() == 1) return;
              const auto began = std::chrono::steady_clock::now();
              EXPECT_THROW(all_reduce(at::ones({2}), g, {.timeout = 200ms}), c10::DistBackendError);
              EXPECT_LT(std::chrono::steady_clock::now() - began, 30s);
            },
            {.backend = "shm", .timeout = 60s});
  run_ranks(2,
            [](const Group& g) {
              if (g->getRank() == 1) return;
              EXPECT_THROW(async::all_gather(at::ones({2}), g, {.timeout = 200ms}).wait(), c10::DistBackendError);
            },
            {.backend = "gloo", .timeout = 60s});
}

TEST(AsyncTimeouts, MustBePositive) {
  run_ranks(1, [](const Group& g) {
    EXPECT_THAT(error_text<c10::ValueError>([&] { broadcast(at::ones({2}), g, {.timeout = -1ms}); }),
                HasSubstr("[broadcast] the timeout is -1 ms\n"
                          "  fix: pass a timeout above 0, as in {.timeout = 30s}, or none for the group's"));
  });
}

}  // namespace
}  // namespace serried
