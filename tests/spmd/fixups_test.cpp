// Fix-ups on one rank at a time, without ranks.
#include "serried/spmd/fixups.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/spmd/registry.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/sample_call.h"

namespace serried::testing {
namespace {

using spmd::Fixup;
using spmd::LocalCall;
using torch::jit::Stack;

// A call of an op, planned by hand: where inputs lie and how outputs do.
struct Planned {
  c10::OperatorHandle op;
  SampleCall sample;
  spmd::Call call;
  spmd::Rule rule;
  spmd::Plan plan;
  Sizes mesh_shape;

  Planned(const char* name, const char* overload, Stack arguments, Sizes mesh, std::vector<Placements> inputs)
      : op(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)),
        sample(op.schema(), std::move(arguments)),
        call(sample.call()),
        rule(*spmd::find_rule(call)),
        mesh_shape(std::move(mesh)) {
    const spmd::PlanRequest request{.current = std::move(inputs), .mesh_shape = mesh_shape, .written = {}};
    plan = spmd::make_plan(spmd::bind(rule, call), call, request);
  }

  // The op with `arguments` as the rank at `coordinate` calls it.
  at::Tensor run(const Sizes& coordinate, Stack arguments) const {
    const LocalCall local{call, plan, {mesh_shape, coordinate}};
    for (const spmd::FixupPattern& pattern : plan.fixups) {
      const Fixup* fixup = spmd::find_fixup(pattern.name);
      if (fixup->before != nullptr) fixup->before(local, pattern, arguments);
    }
    Stack results = arguments;
    op.callBoxed(results);
    for (const spmd::FixupPattern& pattern : plan.fixups) {
      const Fixup* fixup = spmd::find_fixup(pattern.name);
      if (fixup->after != nullptr) fixup->after(local, pattern, arguments, results);
    }
    return results.at(0).toTensor();
  }
};

at::Tensor part(const at::Tensor& x, int64_t dim, int64_t ranks, int64_t rank) {
  const Span span = chunk(x.size(dim), ranks, rank);
  return x.narrow(dim, span.begin, span.size).contiguous();
}

TEST(Fixups, UnknownNamesHaveNone) {
  EXPECT_EQ(spmd::find_fixup("nonsense"), nullptr);
  EXPECT_NE(spmd::find_fixup("size"), nullptr);
}

TEST(Fixups, SizeBecomesLocal) {
  const at::Tensor x = at::arange(36.).view({6, 6});
  const Planned view("aten::view", "", {x, Sizes{6, 2, -1}}, {3}, {{Shard(0)}});
  for (int64_t rank = 0; rank < 3; ++rank) {
    expect_equal(view.run({rank}, {part(x, 0, 3, rank), Sizes{6, 2, -1}}), part(x.view({6, 2, 3}), 0, 3, rank));
  }
}

TEST(Fixups, SizeOfAnUnevenExpand) {
  const at::Tensor x = at::arange(5.).view({5, 1});
  const Planned expand("aten::expand", "", {x, Sizes{2, 5, 3}, false}, {2}, {{Shard(0)}});
  for (int64_t rank = 0; rank < 2; ++rank) {
    const at::Tensor local = part(x, 0, 2, rank);
    expect_equal(expand.run({rank}, {local, Sizes{2, 5, 3}, false}), part(x.expand({2, 5, 3}), 1, 2, rank));
  }
}

TEST(Fixups, PickLooksUpWhatThePartHolds) {
  const at::Tensor table = at::arange(1., 15.).view({7, 2});
  const at::Tensor index = at::tensor({6, 0, 3, 3, 5}, at::kLong);
  const Planned embedding("aten::embedding", "", {table, index, -1, false, false}, {3}, {{Shard(0)}, {Replicate()}});
  ASSERT_EQ(embedding.plan.outputs[0].placements, Placements{Partial()});
  at::Tensor sum = at::zeros({5, 2});
  for (int64_t rank = 0; rank < 3; ++rank) {
    sum += embedding.run({rank}, {part(table, 0, 3, rank), index, -1, false, false});
  }
  expect_equal(sum, table.index_select(0, index));
}

TEST(Fixups, PickCountsOffsetsOverTwoAxes) {
  const at::Tensor table = at::arange(1., 23.).view({2, 11});
  const at::Tensor index = at::tensor({10, 0, 5, 6, 2, 9}, at::kLong);
  const Planned select("aten::index_select", "", {table, 1, index}, {2, 2},
                       {{Shard(1), Shard(1)}, {Replicate(), Replicate()}});
  at::Tensor sum = at::zeros({2, 6});
  for (int64_t a = 0; a < 2; ++a) {
    for (int64_t b = 0; b < 2; ++b) {
      sum += select.run({a, b}, {part(part(table, 1, 2, a), 1, 2, b), 1, index});
    }
  }
  expect_equal(sum, table.index_select(1, index));
}

TEST(Fixups, PickWrapsNegativeIndices) {
  const at::Tensor table = at::arange(1., 8.);
  c10::List<std::optional<at::Tensor>> list;
  list.push_back(std::optional<at::Tensor>(at::tensor({-1, -7, 3}, at::kLong)));
  const Planned index("aten::index", "Tensor", {table, list}, {2}, {{Shard(0)}, {Replicate()}});
  const at::Tensor sum = index.run({0}, {part(table, 0, 2, 0), list}) + index.run({1}, {part(table, 0, 2, 1), list});
  expect_equal(sum, at::tensor({7.F, 1.F, 4.F}));
}

TEST(Fixups, PickNamesAnIndexOutOfRange) {
  const at::Tensor table = at::ones({4, 2});
  const at::Tensor index = at::tensor({1, 4}, at::kLong);
  const Planned embedding("aten::embedding", "", {table, index, -1, false, false}, {2}, {{Shard(0)}, {Replicate()}});
  const auto run = [&] { embedding.run({0}, {part(table, 0, 2, 0), index, -1, false, false}); };
  EXPECT_EQ(error_text<c10::IndexError>(run),
            "[aten::embedding] index 4 is out of range for a dim of size 4\n"
            "  fix: pass indices from 0 to 3");
}

TEST(Fixups, TargetsOfOtherRanksAreIgnored) {
  const at::Tensor x = at::arange(1., 29.).view({4, 7});
  const at::Tensor target = at::tensor({6, 1, 2, 4}, at::kLong);
  for (const int64_t ignored : {-100, 1, 2}) {
    const Planned nll("aten::nll_loss_forward", "", {x, target, c10::IValue(), 0, ignored}, {3},
                      {{Shard(1)}, {Replicate()}});
    ASSERT_EQ(nll.plan.outputs[0].placements, Placements{Partial()});
    at::Tensor sum = at::zeros({4});
    for (int64_t rank = 0; rank < 3; ++rank) {
      sum += nll.run({rank}, {part(x, 1, 3, rank), target, c10::IValue(), 0, ignored});
    }
    expect_equal(sum, at::nll_loss(x, target, {}, at::Reduction::None, ignored));
  }
}

TEST(Fixups, MeansOfUnevenPartsSumToTheMean) {
  const at::Tensor x = at::arange(21.).view({7, 3});
  const Planned mean("aten::mean", "dim", {x, Sizes{0}, false, c10::IValue()}, {3}, {{Shard(0)}});
  at::Tensor sum = at::zeros({3});
  for (int64_t rank = 0; rank < 3; ++rank) {
    sum += mean.run({rank}, {part(x, 0, 3, rank), Sizes{0}, false, c10::IValue()});
  }
  expect_close(sum, x.mean(0));
}

TEST(Fixups, DiagonalsCountFromTheWholeMatrix) {
  const at::Tensor x = at::arange(1., 36.).view({5, 7});
  const Planned tril("aten::tril", "", {x, 1}, {2, 2}, {{Shard(0), Shard(1)}});
  for (int64_t a = 0; a < 2; ++a) {
    for (int64_t b = 0; b < 2; ++b) {
      expect_equal(tril.run({a, b}, {part(part(x, 0, 2, a), 1, 2, b), 1}), part(part(x.tril(1), 0, 2, a), 1, 2, b));
    }
  }
}

TEST(Fixups, SqueezeKeepsDimsThatAreSizeOneInAPartOnly) {
  const at::Tensor x = at::arange(6.).view({2, 1, 3});
  const Planned squeeze("aten::squeeze", "", {x}, {2}, {{Shard(0)}});
  expect_equal(squeeze.run({1}, {part(x, 0, 2, 1)}), part(x.squeeze(), 0, 2, 1));
  const Planned named("aten::squeeze", "dim", {x, 0}, {2}, {{Shard(0)}});
  expect_equal(named.run({1}, {part(x, 0, 2, 1), 0}), part(x, 0, 2, 1));
}

TEST(Fixups, DenseMakesTensorsAndListsContiguous) {
  const at::Tensor x = at::arange(6.).view({2, 3}).t();
  Stack arguments = {x, std::vector<at::Tensor>{x}, 5};
  const SampleCall sample("aten::f(Tensor a, Tensor[] b, int c) -> Tensor", arguments);
  const spmd::Call call = sample.call();
  const spmd::Plan plan;
  spmd::find_fixup("dense")->before({call, plan, {}}, {}, arguments);
  EXPECT_TRUE(arguments[0].toTensor().is_contiguous());
  EXPECT_TRUE(arguments[1].toTensorVector()[0].is_contiguous());
}

}  // namespace
}  // namespace serried::testing
