// What every op on DTensors does around its rule: plans kept, plain tensors refused, in-place and out= forms, moves
// told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/base/log.h"
#include "serried/tensor/dispatch/dispatch.h"
#include "serried/tensor/guards.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor quarters(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).view(sizes).sub(5).div(4);
}

TEST(Dispatch, PlansAreMadeOnceAndFoundAgain) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = place(quarters({5, 4}), mesh, {Shard(0)});
    clear_dispatch_cache();
    reset_dispatch_stats();
    for (int i = 0; i < 3; ++i) at::exp(a);
    EXPECT_EQ(dispatch_stats().misses, 1);
    EXPECT_EQ(dispatch_stats().hits, 2);
    for (double factor : {2.0, 3.0, 4.0}) a.mul(factor);
    EXPECT_EQ(dispatch_stats().misses, 2) << "a number that only scales decides nothing";
    for (int64_t dim : {0, 1}) a.sum(dim);
    EXPECT_EQ(dispatch_stats().misses, 4) << "a dim does";
    clear_dispatch_cache();
    at::exp(a);
    EXPECT_EQ(dispatch_stats().misses, 5);
    EXPECT_EQ(dispatch_stats().defaults, 0);
  });
}

TEST(Dispatch, AThreadHasItsOwnPlans) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const DTensor a = place(quarters({4}), mesh, {Shard(0)});
    at::exp(a);
    std::thread([&] { EXPECT_EQ(dispatch_stats().hits + dispatch_stats().misses, 0); }).join();
  });
}

TEST(Dispatch, APlainTensorBesideADTensorIsNamed) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = place(quarters({4, 3}), mesh, {Shard(0)});
    const at::Tensor plain = quarters({4, 3});
    EXPECT_THAT(error_text<c10::TypeError>([&] { at::add(a, plain); }),
                HasSubstr("[aten::add.Tensor] argument 1 \"other\" is a plain tensor of sizes [4,3] beside a DTensor "
                          "f32[4,3] S0 on mesh 2\n  fix: wrap it: distribute_tensor(other, mesh, {Replicate(), ...})"));
    EXPECT_THAT(error_text<c10::TypeError>([&] { at::cat({a, plain}); }), HasSubstr("\"tensors\"[1] is a plain"));
    expect_close(full(at::add(a, at::ones({1}))), plain + 1);
    const ImplicitReplication plain_is_replicated;
    expect_close(full(at::add(a, plain)), plain * 2);
  });
}

TEST(Dispatch, TensorsOfTwoMeshesAreNamed) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh one = init_device_mesh("cpu", {2}, {"x"}, {.group = group});
    const DeviceMesh other = init_device_mesh("cpu", {2}, {"y"}, {.group = group});
    const DTensor a = place(quarters({4}), one, {Shard(0)});
    const DTensor b = place(quarters({4}), other, {Shard(0)});
    EXPECT_THAT(error_text<c10::ValueError>([&] { at::add(a, b); }),
                HasSubstr("[aten::add.Tensor] argument 1 \"other\" is on mesh y=2 and another on mesh x=2\n"
                          "  fix: bring both to one mesh: x.redistribute(mesh, placements)"));
  });
}

TEST(Dispatch, InPlaceOpsKeepPlacementAndIdentity) {
  const at::Tensor a = quarters({5, 3});
  const at::Tensor b = quarters({5, 3}).flip(0);
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Placements& left : all_placements(2, shape.size(), true)) {
        for (const Placements& right : all_placements(2, shape.size(), true)) {
          const DTensor x = place(a, mesh, left);
          const at::Tensor same = x;
          x.add_(place(b, mesh, right)).relu_();
          EXPECT_EQ(x.placements(), left) << to_string(right);
          expect_close(full(same), (a + b).relu(), to_string(left) + " += " + to_string(right));
        }
      }
    });
  }
}

TEST(Dispatch, OutTensorsTakeValueAndPlacement) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor a = quarters({5, 4});
    const at::Tensor b = quarters({4, 3});
    for (const Placements& given : all_placements(2, 1, false)) {
      at::Tensor out = place(at::zeros({5, 3}), mesh, given);
      at::mm_out(out, place(a, mesh, {Shard(0)}), place(b, mesh, {Replicate()}));
      EXPECT_EQ(to_string(DTensor(out).placements()), "S0");
      expect_close(full(out), a.mm(b));
    }
    at::Tensor larger = place(at::empty({0}), mesh, {Shard(0)});
    at::exp_out(larger, place(a, mesh, {Shard(1)}));
    expect_close(full(larger), a.exp());
  });
}

TEST(Dispatch, AnOutTensorOfAnotherSizeGetsTheNewOneOnEveryRank) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    at::Tensor out = place(at::zeros({5}), mesh, {Shard(0)});  // as large as the result on rank 0, smaller on rank 1
    at::exp_out(out, place(quarters({6}), mesh, {Shard(0)}));
    EXPECT_EQ(out.sizes(), at::IntArrayRef({6}));
    expect_close(full(out), quarters({6}).exp());
  });
}

TEST(Dispatch, PlainAndDistributedDoNotMixInOut) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = place(quarters({4}), mesh, {Shard(0)});
    at::Tensor plain = at::zeros({4});
    at::Tensor out = place(plain, mesh, {Shard(0)});
    EXPECT_THAT(error_text<c10::TypeError>([&] { at::exp_out(plain, a); }),
                HasSubstr("the out= tensor \"out\" is plain"));
    EXPECT_THAT(error_text<c10::TypeError>([&] { at::exp_out(out, plain); }),
                HasSubstr("the out= tensor is a DTensor but no input is"));
    EXPECT_THAT(error_text<c10::TypeError>([&] {
                  const ImplicitReplication plain_is_replicated;
                  plain.add_(a);
                }),
                HasSubstr("a DTensor would be written into the plain tensor \"self\""));
  });
}

TEST(Dispatch, EveryPlanIsLoggedWhereAsked) {
  ::testing::internal::CaptureStderr();
  log::set_topics("plan");
  on_mesh({1}, [](const DeviceMesh& mesh) {
    at::mm(place(quarters({2, 2}), mesh, {Shard(0)}), place(quarters({2, 2}), mesh, {Replicate()}));
  });
  log::set_topics("");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("aten::mm: mk, kn -> mn; S0 => S0, R => R"));
}

TEST(ExplicitRedistribution, ForbidsWhatAnOpWouldMoveByItself) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = place(quarters({4, 6}), mesh, {Shard(1)});
    const DTensor b = place(quarters({6, 2}), mesh, {Replicate()});
    const ExplicitRedistribution forbidden;
    EXPECT_THAT(
        error_text<c10::ValueError>([&] { at::cumprod(a, 1); }),
        HasSubstr("[aten::cumprod] argument 0 \"self\" f32[4,6] S1 on mesh 2 would be redistributed to R by the "
                  "rule !K@dim ... -> K@dim ...\n"
                  "  fix: call redistribute(parse_placements(\"R\")) before the op"));
    EXPECT_NO_THROW(at::cumprod(a, 0));
    EXPECT_NO_THROW(at::cumprod(a.redistribute({Replicate()}), 1)) << "asked for";
    EXPECT_NO_THROW(at::mm(a, b)) << "b is cut where it lies: no bytes move";
    const ExplicitRedistribution strict({.strict = true});
    EXPECT_THAT(error_text<c10::ValueError>([&] { at::mm(a, b); }), HasSubstr("\"mat2\" f32[6,2] R"));
  });
}

TEST(ExplicitRedistribution, NamesTheWayBackOfWhatIsWritten) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor pending = DTensor::from_local(quarters({4, 6}), mesh, {Partial("sum")});
    const DTensor cut = place(quarters({4, 6}), mesh, {Shard(0)});
    const ExplicitRedistribution forbidden;
    EXPECT_THAT(
        error_text<c10::ValueError>([&] { at::Tensor(pending).add_(cut); }),
        HasSubstr("[aten::add_.Tensor] argument 0 \"self\" f32[4,6] P on mesh 2 would be redistributed to S0 and "
                  "back by the rule ... + ... -> ...\n"
                  "  fix: call redistribute(parse_placements(\"S0\")) before the op, and "
                  "redistribute(parse_placements(\"P\")) on what it has written\n"));
    const DTensor sum = pending.redistribute(parse_placements("S0"));
    at::Tensor(sum).add_(cut);
    expect_close(full(sum.redistribute(parse_placements("P"))), 3 * quarters({4, 6}));
  });
}

TEST(ExplicitRedistribution, WarnsOrLogsInstead) {
  static int64_t columns = 6;  // a text is warned of once in a process: another one if the test is repeated
  ++columns;
  ::testing::internal::CaptureStderr();
  log::set_topics("plan");
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = place(quarters({3, columns}), mesh, {Shard(1)});
    const ExplicitRedistribution warned({.mode = HiddenCommunication::warn});
    expect_close(full(at::cumprod(a, 1)), at::cumprod(quarters({3, columns}), 1));
    const ExplicitRedistribution logged({.mode = HiddenCommunication::log});
    at::logcumsumexp(a, 1);
  });
  log::set_topics("");
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("[aten::cumprod] argument 0 \"self\" f32[3," + std::to_string(columns) +
                              "] S1 on mesh 2 would be redistributed to R"));
  EXPECT_THAT(text, HasSubstr("[aten::logcumsumexp] argument 0 \"self\""));
}

}  // namespace
}  // namespace serried::testing
