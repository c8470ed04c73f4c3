// What the collectives say when they are called wrongly, and their Meta kernels.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using ::testing::HasSubstr;

void on_two_ranks(const std::function<void(const Group&)>& fn) {
  run_ranks(2, fn, {.timeout = std::chrono::seconds(20)});
}

std::string at_rank(const Group& g) {
  return "\n  at:  rank " + std::to_string(g->getRank()) + "/2";
}

TEST(CollectivesErrors, ANullGroupNamesWhereToGetOne) {
  const std::string tail =
      " the group is null\n  fix: make one with new_group(), or pass current_process_group() where a ProcessGroupGuard "
      "is alive";
  const at::Tensor x = at::ones({2});
  const Group none;
  EXPECT_EQ(error_text<c10::ValueError>([&] { all_reduce(x, none); }), "[all_reduce]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { all_reduce_(x, none); }), "[all_reduce_]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { all_gather(x, none); }), "[all_gather]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { reduce_scatter(x, none); }), "[reduce_scatter]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { all_to_all(x, none); }), "[all_to_all]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { broadcast(x, none); }), "[broadcast]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { broadcast_(x, none); }), "[broadcast_]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { barrier(none); }), "[barrier]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { send(x, none, {.peer = 1}); }), "[send]" + tail);
  EXPECT_EQ(error_text<c10::ValueError>([&] { recv(x, none, {.peer = 1}); }), "[recv]" + tail);
}

TEST(CollectivesErrors, AnUndefinedTensorIsNamed) {
  on_two_ranks([](const Group& g) {
    EXPECT_EQ(error_text<c10::ValueError>([&] { all_reduce(at::Tensor(), g); }),
              "[all_reduce] the tensor is undefined\n  fix: pass a tensor; at::empty({0}) is one without elements" +
                  at_rank(g));
  });
}

TEST(CollectivesErrors, AScalarHasNoDimToWorkAlong) {
  on_two_ranks([](const Group& g) {
    EXPECT_EQ(error_text<c10::ValueError>([&] { all_gather(at::scalar_tensor(1), g); }),
              "[all_gather] f32[] has no dim to work along\n  fix: pass x.unsqueeze(0)" + at_rank(g));
    EXPECT_THROW(reduce_scatter(at::scalar_tensor(1), g), c10::ValueError);
    EXPECT_THROW(all_to_all(at::scalar_tensor(1), g), c10::ValueError);
  });
}

TEST(CollectivesErrors, ADimOutOfRangeIsAnIndexError) {
  on_two_ranks([](const Group& g) {
    const at::Tensor x = at::ones({2, 3});
    EXPECT_EQ(error_text<c10::IndexError>([&] { all_gather(x, g, {.dim = 2}); }),
              "[all_gather] dim is 2 and f32[2,3] has 2 dims\n  fix: pass a dim in [-2, 1]" + at_rank(g));
    EXPECT_THROW(reduce_scatter(x, g, {.dim = -3}), c10::IndexError);
    EXPECT_EQ(error_text<c10::IndexError>([&] { all_to_all(x, g, {.concat_dim = 5}); }),
              "[all_to_all] concat_dim is 5 and f32[2,3] has 2 dims\n  fix: pass a dim in [-2, 1]" + at_rank(g));
  });
}

TEST(CollectivesErrors, ARankOutsideOfTheGroupIsNamed) {
  on_two_ranks([](const Group& g) {
    const at::Tensor x = at::ones({2});
    EXPECT_EQ(error_text<c10::ValueError>([&] { broadcast(x, g, {.src = 2}); }),
              "[broadcast] src is 2 in a group of 2 ranks\n  fix: pass a rank of the group: 0 to 1" + at_rank(g));
    EXPECT_THROW(broadcast_(x, g, {.src = -1}), c10::ValueError);
    EXPECT_EQ(error_text<c10::ValueError>([&] { send(x, g, {.peer = 9}); }),
              "[send] peer is 9 in a group of 2 ranks\n  fix: pass a rank of the group: 0 to 1" + at_rank(g));
    EXPECT_THAT(error_text<c10::ValueError>([&] { recv(x, g, {.peer = g->getRank()}); }),
                HasSubstr("is this rank itself\n  fix: copy the tensor instead"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { send(x, g, {.peer = 1 - g->getRank(), .tag = -4}); }),
                HasSubstr("[send] tag is -4\n  fix: pass a tag of 0 or more"));
  });
}

TEST(CollectivesErrors, ShapesThatDisagreeNameBothRanks) {
  on_two_ranks([](const Group& g) {
    const at::Tensor x = at::ones({2, 3 + g->getRank()});
    EXPECT_EQ(error_text<c10::ValueError>([&] { all_gather(x, g); }),
              "[all_gather] rank 0 passed f32[2,3] and rank 1 f32[2,4]: only dim 0 may differ\n"
              "  fix: pass tensors of one dtype whose other dims agree on every rank" +
                  at_rank(g));
    const at::Tensor y = at::ones({2}, g->getRank() == 0 ? at::kFloat : at::kLong);
    EXPECT_THAT(error_text<c10::ValueError>([&] { all_gather(y, g); }),
                HasSubstr("rank 0 passed f32[2] and rank 1 i64[2]"));
    const at::Tensor z = g->getRank() == 0 ? at::ones({2}) : at::ones({2, 1});
    EXPECT_THAT(error_text<c10::ValueError>([&] { all_to_all(z, g); }),
                HasSubstr("rank 0 passed f32[2] and rank 1 f32[2,1]"));
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                all_gather(at::ones({2, 2}), g, {.dim = g->getRank()});
              }),
              "[all_gather] rank 0 works along dim 0 and rank 1 along dim 1\n  fix: pass the same dims on every rank" +
                  at_rank(g));
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  all_to_all(at::ones({2 + 2 * g->getRank(), 3}), g, {.split_dim = 0, .concat_dim = 1});
                }),
                HasSubstr("rank 0 gets 1 along dim 0 from rank 0 (of f32[2,3]) and 2 from rank 1 (of f32[4,3])"));
  });
}

TEST(CollectivesErrors, SplitSizesMustAddUp) {
  on_two_ranks([](const Group& g) {
    const at::Tensor x = at::ones({5, 2});
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                all_to_all(x, g, {.split_sizes = {2, 2}});
              }),
              "[all_to_all] split_sizes are [2, 2] for dim 0 of f32[5,2] over 2 ranks\n"
              "  fix: pass 2 sizes of 0 or more that add up to 5, or none to cut evenly" +
                  at_rank(g));
    EXPECT_THROW(all_to_all(x, g, {.split_sizes = {5}}), c10::ValueError);
    EXPECT_THROW(all_to_all(x, g, {.split_sizes = {6, -1}}), c10::ValueError);
  });
}

TEST(CollectivesErrors, InPlaceOnATensorThatNeedsGradNamesTheFunctionalForm) {
  on_two_ranks([](const Group& g) {
    const at::Tensor x = at::ones({3}).requires_grad_();
    EXPECT_EQ(error_text<c10::ValueError>([&] { all_reduce_(x, g); }),
              "[all_reduce_] f32[3] requires grad, and writing into it in place has no gradient\n"
              "  fix: use the functional form: y = all_reduce(x, group), or call it under torch::NoGradGuard" +
                  at_rank(g));
    EXPECT_THROW(recv(x, g, {.peer = 1 - g->getRank()}), c10::ValueError);
  });
}

TEST(CollectivesErrors, ReductionsWithoutGradientSayItInBackward) {
  using c10d::ReduceOp;
  on_two_ranks([](const Group& g) {
    const at::Tensor x = at::ones({4}).requires_grad_();
    for (auto op : {ReduceOp::MIN, ReduceOp::MAX, ReduceOp::PRODUCT}) {
      const at::Tensor y = all_reduce(x, g, op), z = reduce_scatter(x, g, {.op = op});
      EXPECT_TRUE(y.requires_grad() && z.requires_grad());
      EXPECT_EQ(error_text<c10::NotImplementedError>([&] { y.sum().backward(); }),
                "[all_reduce] the reduction " + to_string(op) +
                    " has no gradient\n  fix: reduce with sum or avg, or detach the input: "
                    "all_reduce(x.detach(), group, ...)" +
                    at_rank(g));
      EXPECT_THROW(z.sum().backward(), c10::NotImplementedError);
    }
  });
}

TEST(CollectivesErrors, LayoutsThatAreNotStridedAreRefused) {
  on_two_ranks([](const Group& g) {
    EXPECT_THAT(
        error_text<c10::NotImplementedError>([&] {
          all_reduce(at::ones({2, 2}).to_sparse(), g);
        }),
        HasSubstr("[all_reduce] the tensor is Sparse, collectives take strided ones\n  fix: pass x.to_dense()"));
  });
}

TEST(CollectivesErrors, UnknownReductionsListTheKnownOnes) {
  EXPECT_EQ(error_text<c10::ValueError>([] { parse_reduce_op("mean"); }),
            "[parse_reduce_op] unknown reduction \"mean\"; known: sum, avg, product, min, max, band, bor, bxor\n"
            "  fix: pass one of the known names");
  for (const char* name : {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"}) {
    EXPECT_EQ(to_string(parse_reduce_op(name).op_), name);
  }
}

TEST(CollectivesMeta, ShapesComeWithoutCommunicating) {
  run_ranks(3, [](const Group& g) {
    if (g->getRank() == 1) return;  // nobody waits for it
    const at::Tensor x = at::empty({5, 4}, at::kMeta);
    const int64_t mine = g->getRank() == 0 ? 2 : 1;
    EXPECT_EQ(all_reduce(x, g).sizes(), x.sizes());
    EXPECT_EQ(all_gather(x, g, {.dim = 1}).sizes(), (std::vector<int64_t>{5, 12}));
    EXPECT_EQ(reduce_scatter(x, g).sizes(), (std::vector<int64_t>{mine, 4}));
    EXPECT_EQ(all_to_all(x, g, {.split_dim = 0, .concat_dim = 1}).sizes(), (std::vector<int64_t>{mine, 12}));
    EXPECT_EQ(broadcast(x, g).sizes(), x.sizes());
    EXPECT_TRUE(all_reduce(x, g).is_meta());
    all_reduce_(x, g);
    broadcast_(x, g);
    send(x, g, {.peer = 1});
    recv(x, g, {.peer = 1});
    const at::Tensor leaf = at::empty({5, 4}, at::kMeta).requires_grad_();
    all_gather(leaf, g).sum().backward();
    EXPECT_EQ(leaf.grad().sizes(), leaf.sizes());
  });
}

}  // namespace
}  // namespace serried
