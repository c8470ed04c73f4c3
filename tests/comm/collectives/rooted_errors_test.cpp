// What reduce, gather and scatter say when they are called wrongly: the same on every rank, and nobody waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <limits>
#include <thread>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using testing::error_text;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

class RootedErrors : public ::testing::TestWithParam<const char*> {
 protected:
  void on_three_ranks(const std::function<void(const Group&)>& fn) {
    run_ranks(3, fn, {.backend = GetParam(), .timeout = 20s});
  }
};

INSTANTIATE_TEST_SUITE_P(On, RootedErrors, ::testing::Values("threads", "shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

std::string at_rank_of_three(const Group& g) {
  return "\n  at:  rank " + std::to_string(g->getRank()) + "/3";
}

// Blocking and started alike.
void expect_gather_error(const at::Tensor& x, const Group& g, const GatherOptions& options, const std::string& text) {
  EXPECT_EQ(error_text<c10::ValueError>([&] { gather(x, g, options); }), text + at_rank_of_three(g));
  EXPECT_EQ(error_text<c10::ValueError>([&] { async::gather(x, g, options).wait(); }), text + at_rank_of_three(g));
}

void expect_scatter_error(const Tensors& list, const Group& g, const ScatterOptions& options, const std::string& text) {
  EXPECT_EQ(error_text<c10::ValueError>([&] { scatter(list, g, options); }), text + at_rank_of_three(g));
  EXPECT_EQ(error_text<c10::ValueError>([&] { async::scatter(list, g, options).wait(); }), text + at_rank_of_three(g));
}

TEST_P(RootedErrors, ARootOutsideOfTheGroupIsNamed) {
  on_three_ranks([](const Group& g) {
    const std::string tail = " in a group of 3 ranks\n  fix: pass a rank of the group: 0 to 2";
    EXPECT_EQ(error_text<c10::ValueError>([&] { reduce(at::ones({2}), g, {.dst = 3}); }),
              "[reduce] dst is 3" + tail + at_rank_of_three(g));
    expect_gather_error(at::ones({2}), g, {.dst = -1}, "[gather] dst is -1" + tail);
    expect_scatter_error({}, g, {.src = 3}, "[scatter] src is 3" + tail);
  });
}

TEST_P(RootedErrors, DifferentRootsNameBothRanks) {
  on_three_ranks([](const Group& g) {
    const int root = g->getRank() == 2 ? 1 : 0;
    expect_gather_error(at::ones({2}), g, {.dst = root},
                        "[gather] rank 0 gathers to rank 0 and rank 2 to rank 1\n"
                        "  fix: pass the same dst on every rank");
    expect_scatter_error(g->getRank() == root ? Tensors(3, at::ones({2})) : Tensors(), g, {.src = root},
                         "[scatter] rank 0 expects the list from rank 0 and rank 2 from rank 1\n"
                         "  fix: pass the same src on every rank");
    barrier(g);  // the group goes on
  });
}

TEST_P(RootedErrors, DifferentDtypesOfAGatherNameBothRanks) {
  on_three_ranks([](const Group& g) {
    const at::Tensor x = at::ones({2, g->getRank()}, g->getRank() == 1 ? at::kLong : at::kFloat);
    expect_gather_error(x, g, {},
                        "[gather] rank 0 passed f32[2,0] and rank 1 i64[2,1]\n"
                        "  fix: pass tensors of one dtype on every rank");
    barrier(g);
  });
}

TEST_P(RootedErrors, TooManyDimsAreRefused) {
  on_three_ranks([](const Group& g) {
    const at::Tensor x = at::ones(std::vector<int64_t>(g->getRank() == 1 ? 17 : 16, 1));
    expect_gather_error(x, g, {},
                        "[gather] rank 1 passed a tensor of 17 dims\n  fix: pass one of at most 16 dims: x.flatten()");
    const Tensors list = {at::ones({2}), at::ones(std::vector<int64_t>(17, 1)), at::ones({2})};
    expect_scatter_error(g->getRank() == 0 ? list : Tensors(), g, {},
                         "[scatter] tensor 1 of rank 0's list has more than 16 dims\n"
                         "  fix: pass plain tensors of one dtype, on one device, of at most 16 dims");
    barrier(g);
  });
}

TEST_P(RootedErrors, AListOfTheWrongLengthIsRefusedOnEveryRank) {
  on_three_ranks([](const Group& g) {
    for (const size_t count : {size_t(0), size_t(2), size_t(4)}) {
      expect_scatter_error(g->getRank() == 1 ? Tensors(count, at::ones({2})) : Tensors(), g, {.src = 1},
                           c10::str("[scatter] rank 1 passed ", count,
                                    " tensors for 3 ranks\n  fix: pass one for each rank, such as x.tensor_split(3)"));
    }
    barrier(g);
  });
}

TEST_P(RootedErrors, AListOnAnotherRankThanTheSourceIsRefusedOnEveryRank) {
  on_three_ranks([](const Group& g) {
    expect_scatter_error(
        g->getRank() == 1 ? Tensors() : Tensors(3, at::ones({2})), g, {},
        "[scatter] rank 2 passed 3 tensors, and the source is rank 0\n  fix: pass {} on every rank but 0");
    barrier(g);
  });
}

TEST_P(RootedErrors, AListThatCannotBeSentNamesItsTensor) {
  on_three_ranks([](const Group& g) {
    const at::Tensor x = at::ones({2});
    const std::vector<std::pair<at::Tensor, const char*>> odd = {
        {at::Tensor(), "is undefined"},
        {at::ones({2, 2}).to_sparse(), "is sparse, quantized or distributed"},
        {at::quantize_per_tensor(x, 0.1, 0, at::kQInt8), "is sparse, quantized or distributed"},
        {at::ones({3}, at::kLong), "is i64 and the first f32"},
        {at::ones({3}, at::kMeta), "is on another device than the first"},
    };
    for (const auto& [tensor, why] : odd) {
      expect_scatter_error(g->getRank() == 0 ? Tensors{x, x, tensor} : Tensors(), g, {},
                           c10::str("[scatter] tensor 2 of rank 0's list ", why,
                                    "\n  fix: pass plain tensors of one dtype, on one device, of at most 16 dims"));
    }
    expect_scatter_error(g->getRank() == 0 ? Tensors{at::Tensor(), x, x} : Tensors(), g, {},
                         "[scatter] tensor 0 of rank 0's list is undefined\n"
                         "  fix: pass plain tensors of one dtype, on one device, of at most 16 dims");
    barrier(g);
  });
}

// A reduce asks nobody beforehand: ranks that differ end the group, as in all_reduce.
TEST_P(RootedErrors, ReducesThatDifferNameBothRanks) {
  struct Difference {
    std::function<at::Tensor(const Group&)> call;
    const char* what;
    const char* fix;
  };
  const bool is_gloo = std::string(GetParam()) == "gloo";  // which lays what it sends in a row
  const std::vector<Difference> all = {
      {[](const Group& g) { return reduce(at::ones({3}), g, {.dst = g->getRank()}); },
       "rank 0 #1 reduce f32[3] sum to rank 0, rank 1 #1 reduce f32[3] sum to rank 1",
       "pass the same root on every rank"},
      {[](const Group& g) { return reduce(at::ones({3}, g->getRank() == 1 ? at::kLong : at::kFloat), g); },
       "rank 0 #1 reduce f32[3] sum to rank 0, rank 1 #1 reduce i64[3] sum to rank 0",
       "pass tensors of the same dtype on every rank"},
      {[](const Group& g) { return async::reduce(at::ones({3 + g->getRank()}), g).wait(); },
       "rank 0 #1 reduce f32[3] sum to rank 0, rank 1 #1 reduce f32[4] sum to rank 0",
       "pass tensors of the same shape on every rank, or look for a call that only some ranks make"},
      {[](const Group& g) { return g->getRank() == 0 ? gather(at::ones({3}), g)[0] : all_reduce(at::ones({3}), g); },
       "rank 0 gather: #1 all_gather i64[20], rank 1 #1 all_reduce f32[3] sum",
       "make every rank call the same collectives in the same order"},
      {[](const Group& g) { return g->getRank() == 1 ? scatter({}, g) : all_reduce(at::ones({3}), g); },
       is_gloo ? "rank 0 #1 all_reduce f32[3] sum, rank 1 scatter: #1 all_to_all i64[58]"
               : "rank 0 #1 all_reduce f32[3] sum, rank 1 scatter: #1 all_to_all i64[2,29]",
       "make every rank call the same collectives in the same order"},
  };
  for (const Difference& difference : all) {
    const auto expect_refusal = [&](const Group& g) {
      const std::string text = error_text<c10::DistBackendError>([&] { difference.call(g); });
      EXPECT_EQ(text.substr(text.find(']') + 1),
                c10::str(" ranks called different collectives: ", difference.what, "\n  fix: ", difference.fix,
                         "\n  at:  rank ", g->getRank(), "/2"));
    };
    run_ranks(2, expect_refusal, {.backend = GetParam(), .timeout = 20s});
  }
}

TEST(RootedRefusals, NullGroupsAndUndefinedTensorsAreNamed) {
  const std::string tail =
      " the group is null\n  fix: make one with new_group(), or pass current_process_group() where a ProcessGroupGuard "
      "is alive";
  EXPECT_EQ(error_text<c10::ValueError>([] { reduce(at::ones({2}), Group()); }), "[reduce]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([] { gather(at::ones({2}), Group()); }), "[gather]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([] { scatter({}, Group()); }), "[scatter]" + tail);
  run_ranks(1, [](const Group& g) {
    const std::string undefined =
        " the tensor is undefined\n  fix: pass a tensor; at::empty({0}) is one without elements\n  at:  rank 0/1";
    EXPECT_EQ(error_text<c10::ValueError>([&] { reduce(at::Tensor(), g); }), "[reduce]" + undefined);
    EXPECT_EQ(error_text<c10::ValueError>([&] { gather(at::Tensor(), g); }), "[gather]" + undefined);
    EXPECT_EQ(
        error_text<c10::ValueError>([&] { scatter({}, g); }),
        "[scatter] rank 0 passed 0 tensors for 1 ranks\n  fix: pass one for each rank, such as x.tensor_split(1)\n"
        "  at:  rank 0/1");
    EXPECT_THAT(error_text<c10::ValueError>([&] { scatter({}, g, {.timeout = -1ms}); }),
                HasSubstr("[scatter] the timeout is -1 ms"));
    EXPECT_THAT(error_text<c10::NotImplementedError>([&] {
                  gather(at::ones({2, 2}).to_sparse(), g);
                }),
                HasSubstr("[gather] the tensor is Sparse, collectives take strided ones"));
    EXPECT_EQ(error_text<c10::NotImplementedError>(
                  [&] { gather(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8), g); }),
              "[gather] the tensor is QInt8, and gather takes no quantized ones\n"
              "  fix: pass x.int_repr(), and make the tensor of it where it arrives\n  at:  rank 0/1");
  });
}

TEST(RootedRefusals, WhatHasNoGradientSaysSoInBackward) {
  run_ranks(2, [](const Group& g) {
    const std::string at_rank = "\n  at:  rank " + std::to_string(g->getRank()) + "/2";
    const at::Tensor x = at::ones({4}).requires_grad_();
    const at::Tensor largest = reduce(x, g, {.op = c10d::ReduceOp::MAX});
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { largest.sum().backward(); }),
              "[reduce] the reduction max has no gradient\n"
              "  fix: reduce with sum or avg, or detach the input: reduce(x.detach(), group, ...)" +
                  at_rank);
    const at::Tensor mine = scatter(g->getRank() == 0 ? x.tensor_split(2) : Tensors(), g);
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { mine.pow(2).sum().backward({}, {}, /*create_graph=*/true); }),
              "[scatter] it has no second gradient, which create_graph asks for\n"
              "  fix: let every rank pass a tensor: all_to_all has second gradients" +
                  at_rank);
    barrier(g);
  });
}

TEST_P(RootedErrors, ANanIsFoundBeforeItIsSent) {
  const std::vector<std::function<void(const Group&, const at::Tensor&)>> calls = {
      [](const Group& g, const at::Tensor& x) { reduce(x, g); },
      [](const Group& g, const at::Tensor& x) { gather(x, g); },
      [](const Group& g, const at::Tensor& x) {
        scatter(g->getRank() == 1 ? Tensors(2, x) : Tensors(), g, {.src = 1});
      },
  };
  for (const auto& call : calls) {
    const auto expect_refusal = [&](const Group& g) {
      watch::set_nan_check(g, watch::NanCheck::raise);
      at::Tensor x = at::ones({3});
      if (g->getRank() == 1) {
        x[1] = std::numeric_limits<double>::quiet_NaN();
        EXPECT_THAT(error_text<c10::ValueError>([&] { call(g, x); }), HasSubstr("rank 1 sends "));
      } else {
        EXPECT_THROW(call(g, x), c10::DistBackendError);
      }
    };
    run_ranks(2, expect_refusal, {.backend = GetParam(), .timeout = 20s});
  }
}

// Who does not call it is named, and nobody waits longer than the call may take.
TEST_P(RootedErrors, ARankThatDoesNotComeIsNamed) {
  std::atomic<int> num_done = 0;
  on_three_ranks([&](const Group& g) {
    if (g->getRank() == 1) {
      for (int done = num_done; done < 2; done = num_done) num_done.wait(done);
      return;
    }
    const std::string text = error_text<c10::DistBackendError>([&] { gather(at::ones({2}), g, {.timeout = 3s}); });
    EXPECT_THAT(text, HasSubstr("in gather: #1 all_gather i64[20]: rank 1 has not made any call"));
    ++num_done;
    num_done.notify_all();
  });
}

}  // namespace
}  // namespace serried
