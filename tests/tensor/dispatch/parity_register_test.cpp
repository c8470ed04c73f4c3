// Ops of users: without a rule, with one, with a wrong one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "serried/base/log.h"
#include "serried/spmd/register_sharding.h"
#include "serried/spmd/registry.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dispatch/dispatch.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor channel_scale(const at::Tensor& x, const at::Tensor& scale) {
  return x * scale;
}

std::tuple<at::Tensor, at::Tensor> split_signs(const at::Tensor& x) {
  return {x.clamp_min(0), x.clamp_max(0)};
}

TORCH_LIBRARY(serried_test, m) {
  m.def("channel_scale(Tensor x, Tensor scale) -> Tensor");
  m.def("split_signs(Tensor x) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(serried_test, CPU, m) {
  m.impl("channel_scale", &channel_scale);
  m.impl("split_signs", &split_signs);
}

at::Tensor call_scale(const at::Tensor& x, const at::Tensor& scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("serried_test::channel_scale", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, scale);
}

// A rule for the time of a test.
struct Registered {
  Registered(std::string name, const std::string& rule) : op(std::move(name)) { register_sharding(op, rule); }
  ~Registered() { spmd::unregister_rule(op); }
  std::string op;
};

const at::Tensor& numbers() {
  static const at::Tensor x = at::arange(15.0).view({5, 3}) - 6;
  return x;
}

TEST(OpsOfUsers, WithoutARuleAreReplicatedAndCounted) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const CommDebugMode comm;
    clear_dispatch_cache();
    reset_dispatch_stats();
    const at::Tensor y = call_scale(place(numbers(), mesh, {Shard(0)}), place(numbers()[1], mesh, {Replicate()}));
    EXPECT_EQ(to_string(DTensor(y).placements()), "R");
    expect_close(full(y), numbers() * numbers()[1]);
    EXPECT_EQ(dispatch_stats().defaults, 1);
    EXPECT_EQ(comm.defaults(), (std::map<std::string, int64_t>{{"serried_test::channel_scale", 1}}));
    EXPECT_EQ(ops_without_rule([&] { call_scale(y, y.sum(0)); }),
              std::vector<std::string>{"serried_test::channel_scale"});
  });
}

TEST(OpsOfUsers, WithoutARuleAreLoggedOnce) {
  ::testing::internal::CaptureStderr();
  log::set_topics("dispatch");
  on_mesh({1}, [](const DeviceMesh& mesh) {
    for (int i = 0; i < 2; ++i) call_scale(place(numbers(), mesh, {Shard(0)}), place(numbers()[1], mesh, {Shard(0)}));
  });
  log::set_topics("");
  const std::string text = ::testing::internal::GetCapturedStderr();
  const std::string said = "serried_test::channel_scale has no sharding rule: inputs are replicated";
  ASSERT_THAT(text, HasSubstr(said));
  EXPECT_EQ(text.find(said), text.rfind(said));
}

TEST(OpsOfUsers, WithARuleRunOnParts) {
  const Registered rule("serried_test::channel_scale", "...d, d -> ...d");
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      reset_dispatch_stats();
      for (const Placements& left : all_placements(2, shape.size(), true)) {
        for (const Placements& right : all_placements(1, shape.size(), true)) {
          const at::Tensor y = call_scale(place(numbers(), mesh, left), place(numbers()[1], mesh, right));
          expect_close(full(y), numbers() * numbers()[1], to_string(left) + ", " + to_string(right));
        }
      }
      EXPECT_EQ(dispatch_stats().defaults, 0);
    });
  }
}

TEST(OpsOfUsers, ARuleMayHaveSeveralResults) {
  const Registered rule("serried_test::split_signs", "!... -> ..., ...");
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("serried_test::split_signs", "")
                        .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&)>();
    const auto [above, below] = op.call(place(numbers(), mesh, {Shard(1)}));
    EXPECT_EQ(to_string(DTensor(below).placements()), "S1");
    expect_close(full(above), numbers().clamp_min(0));
    expect_close(full(below), numbers().clamp_max(0));
  });
}

TEST(OpsOfUsers, ARuleWithTooFewResultsIsToldAtTheCall) {
  const Registered rule("serried_test::split_signs", "!... -> ...");
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("serried_test::split_signs", "")
                        .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&)>();
    EXPECT_THAT(error_text<c10::Error>([&] { op.call(place(numbers(), mesh, {Shard(1)})); }),
                HasSubstr("the rule \"!... -> ...\" describes 1 of 2 results"));
  });
}

TEST(OpsOfUsers, ARuleWinsOverTheBuiltInOne) {
  const Registered rule("aten::mm", "MK, KN -> MN");
  on_mesh({2}, [](const DeviceMesh& mesh) {
    clear_dispatch_cache();
    const at::Tensor y = at::mm(place(numbers(), mesh, {Shard(0)}), place(numbers().t(), mesh, {Replicate()}));
    EXPECT_EQ(to_string(DTensor(y).placements()), "R");
    clear_dispatch_cache();
  });
}

TEST(OpsOfUsers, AMistakeIsMarkedAndNothingIsRegistered) {
  EXPECT_THAT(
      error_text<c10::ValueError>([] { register_sharding("serried_test::split_signs", "!... -> ..., ...; sizes"); }),
      HasSubstr("[register_sharding] rule for serried_test::split_signs: there is no fix-up \"sizes\"\n"
                "  fix: use one of dense, diagonal, even, "));
  EXPECT_THAT(error_text<c10::ValueError>([] { register_sharding("serried_test::split_signs", "ab ab"); }),
              HasSubstr("expected an arrow"));
  on_mesh({1}, [](const DeviceMesh& mesh) {
    reset_dispatch_stats();
    call_scale(place(numbers(), mesh, {Shard(0)}), place(numbers()[1], mesh, {Shard(0)}));
    EXPECT_EQ(dispatch_stats().defaults, 1);
  });
}

}  // namespace
}  // namespace serried::testing
