// Cost models and the plans that are made by them: kept plans follow, each axis has the model of its backend.
#include "serried/spmd/cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/tensor/dispatch/dispatch.h"
#include "serried/tensor/dispatch/explain.h"
#include "serried/tensor/dispatch/op_by_name.h"
#include "serried/tensor/redistribute/redistribute.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

// By default a pending sum is formed where a replicated term meets it; where copies cost nothing the term joins it.
const spmd::CostModel kFreeCopies{.copy_bandwidth = 1e12, .copy_latency = 0};

// All ranks change the model between their ops: the ranks are threads, so there is one for all.
void between_ops(const DeviceMesh& mesh, const std::function<void()>& change) {
  barrier(mesh.get_group());
  if (mesh.get_rank() == 0) change();
  barrier(mesh.get_group());
}

// What `fn` gives before the change, under it, and after it was taken back.
void expect_follows(const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& fn,
                    const std::function<void()>& change, const std::function<void()>& take_back) {
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const at::Tensor values = iota({5, 3});
    const at::Tensor sum = place(values, mesh, {Partial()}), whole = place(values, mesh, {Replicate()});
    for (int round = 0; round < 2; ++round) {
      EXPECT_EQ(DTensor(fn(sum, whole)).placements(), Placements{Replicate()});
      between_ops(mesh, change);
      for (int again = 0; again < 2; ++again) {
        const at::Tensor result = fn(sum, whole);
        EXPECT_EQ(DTensor(result).placements(), Placements{Partial()});
        expect_close(full(result), fn(values, values));
      }
      between_ops(mesh, take_back);
    }
  });
}

TEST(CostModel, AChangeReachesPlansThatAreKept) {
  const auto change = [] { spmd::set_cost_model(kFreeCopies); };
  const auto take_back = [] { spmd::set_cost_model({}); };
  expect_follows([](const at::Tensor& a, const at::Tensor& b) { return a + b; }, change, take_back);
  expect_follows([](const at::Tensor& a, const at::Tensor& b) { return at::rsub(a, b); }, change, take_back);
  expect_follows(
      [](const at::Tensor& a, const at::Tensor& b) {
        return at::_foreach_add(std::vector<at::Tensor>{a}, std::vector<at::Tensor>{b})[0];
      },
      change, take_back);
}

TEST(CostModel, IsThatOfTheBackendOfTheAxis) {
  std::string backend;
  on_mesh({1}, [&](const DeviceMesh& mesh) { backend = mesh.backend(0); });
  expect_follows([](const at::Tensor& a, const at::Tensor& b) { return a + b; },
                 [&] { spmd::set_cost_model(backend, kFreeCopies); }, [&] { spmd::reset_cost_model(backend); });
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor sum = place(iota({5}), mesh, {Partial()}), whole = place(iota({5}), mesh, {Replicate()});
    between_ops(mesh, [] { spmd::set_cost_model("of nobody here", kFreeCopies); });
    EXPECT_EQ(DTensor(sum + whole).placements(), Placements{Replicate()});
    between_ops(mesh, [] { spmd::reset_cost_model("of nobody here"); });
  });
}

TEST(CostModel, AxesOfOneMeshMayDiffer) {
  const c10::OperatorHandle op = detail::find_op_for("aten::add.Tensor", 2);
  const at::Tensor x = at::empty({4, 4}, at::kMeta);
  const torch::jit::Stack stack = detail::fill_arguments(op.schema(), {x, x});
  const spmd::OpCall call(op.schema(), stack, {{0, -1, {4, 4}, {4, 1}}, {1, -1, {4, 4}, {4, 1}}});
  const std::vector<Placements> placements{parse_placements("P P"), parse_placements("R R")};
  EXPECT_THAT(explain(call, placements, {.shape = {2, 2}}), HasSubstr("result: R R\n"));
  EXPECT_THAT(explain(call, placements, {.shape = {2, 2}, .costs = {kFreeCopies, {}}}), HasSubstr("result: P R\n"));
  EXPECT_THAT(explain(call, placements, {.shape = {2, 2}, .costs = {{}, kFreeCopies}}), HasSubstr("result: R P\n"));
}

TEST(CostModel, AChangeReachesRedistributionsThatAreKept) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const SpecPtr spec = intern_spec(mesh, parse_placements("S0 S1"), {64, 64}, {64, 1}, at::kFloat);
    const auto num_steps = [&] { return redistribution(*spec, parse_placements("R R")).size(); };
    const size_t usual = num_steps();
    barrier(mesh.flatten("all").get_group());
    if (mesh.get_rank() == 0) spmd::set_cost_model({.latency = 1e6, .bandwidth = 1e9, .copy_bandwidth = 1e9});
    barrier(mesh.flatten("all").get_group());
    EXPECT_EQ(num_steps(), 1u) << "where calls are dear one exchange takes both axes; usually it is " << usual;
    barrier(mesh.flatten("all").get_group());
    if (mesh.get_rank() == 0) spmd::set_cost_model({});
    barrier(mesh.flatten("all").get_group());
    EXPECT_EQ(num_steps(), usual);
  });
}

}  // namespace
}  // namespace serried::testing
