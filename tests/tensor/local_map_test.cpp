// local_map: plain functions on the parts of DTensors.
#include "serried/tensor/local_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::iota;
using testing::on_mesh;

TEST(LocalMap, MapsThePartsAndKeepsUnevenSizesExact) {
  for (int64_t rows : {1, 5, 8}) {
    for (const Sizes& shape : {Sizes{1}, Sizes{2}, Sizes{3}, Sizes{4}}) {
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        const DTensor a = distribute_tensor(iota({rows, 3}), mesh, {Shard(0)});
        const DTensor b = distribute_tensor(iota({3, 2}), mesh);
        const auto matmul =
            local_map([](const at::Tensor& x, const at::Tensor& y) { return x.mm(y); },
                      {.out_placements = {{Shard(0)}}, .in_placements = {{Shard(0)}, {Replicate()}}, .mesh = mesh});
        const at::Tensor c = matmul(a, b);
        EXPECT_EQ(c.sizes(), (at::IntArrayRef{rows, 2}));
        expect_equal(DTensor(c).full_tensor(), iota({rows, 3}).mm(iota({3, 2})));
      });
    }
  }
}

TEST(LocalMap, TakesAnyArgumentsAndGivesTuples) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = distribute_tensor(iota({5}), mesh, {Shard(0)});
    const auto fn = local_map(
        [](const at::Tensor& x, double factor, const std::vector<at::Tensor>& more) {
          return std::make_tuple(x * factor + more[0], x.sum(), int(more.size()));
        },
        {.out_placements = {{Shard(0)}, {Partial()}, {}}, .in_placements = {{Shard(0)}, {}, {Shard(0)}}});
    const auto [scaled, sum, count] = fn(a, 2.0, std::vector<at::Tensor>{a, a});
    expect_equal(DTensor(scaled).full_tensor(), iota({5}) * 3);
    expect_equal(DTensor(sum).full_tensor(), iota({5}).sum());
    EXPECT_EQ(count, 2);
    const auto nothing = local_map([](const at::Tensor&) {}, {});
    nothing(a);
    const auto halves =
        local_map([](const at::Tensor& x) { return x.chunk(2, 1); }, {.out_placements = {{Shard(0)}, {Shard(0)}}});
    const DTensor wide = distribute_tensor(iota({3, 4}), mesh, {Shard(0)});
    expect_equal(DTensor(halves(wide)[1]).full_tensor(), iota({3, 4}).chunk(2, 1)[1]);
  });
}

TEST(LocalMap, WithoutADTensorItIsTheFunction) {
  const auto twice = local_map([](const at::Tensor& x) { return x * 2; }, {.out_placements = {{Shard(0)}}});
  expect_equal(twice(iota({3})), iota({3}) * 2);
}

TEST(LocalMap, IsDifferentiable) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = distribute_tensor(iota({5, 3}).requires_grad_(), mesh, {Shard(0)});
    const DTensor b = distribute_tensor(iota({3, 2}).requires_grad_(), mesh);
    const auto matmul = local_map([](const at::Tensor& x, const at::Tensor& y) { return x.mm(y); },
                                  {.out_placements = {{Shard(0)}},
                                   .in_placements = {{Shard(0)}, {Replicate()}},
                                   .in_grad_placements = {{Shard(0)}, {Partial()}}});
    DTensor(matmul(a, b)).full_tensor().pow(2).sum().backward();
    const at::Tensor x = iota({5, 3}).requires_grad_();
    const at::Tensor y = iota({3, 2}).requires_grad_();
    x.mm(y).pow(2).sum().backward();
    expect_close(DTensor(a.grad()).full_tensor(), x.grad());
    expect_close(DTensor(b.grad()).full_tensor(), y.grad());
  });
}

TEST(LocalMap, MovesInputsOnlyWhereAsked) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = distribute_tensor(iota({5, 3}), mesh, {Shard(1)});
    const auto sizes = [](const at::Tensor& x) { return x.sizes().vec(); };
    const LocalMapOptions options = {.out_placements = {{}}, .in_placements = {{Shard(0)}}};
    EXPECT_THAT(error_text<c10::ValueError>([&] { local_map(sizes, options)(a); }),
                HasSubstr("[local_map] argument 0 is placed \"S1\", not \"S0\""));
    LocalMapOptions moving = options;
    moving.redistribute_inputs = true;
    EXPECT_EQ(local_map(sizes, moving)(a)[1], 3);
  });
}

TEST(LocalMap, SaysWhatDoesNotFit) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = distribute_tensor(iota({4}), mesh, {Shard(0)});
    const auto same = [](const at::Tensor& x) { return x; };
    const auto text = [&](const auto& fn, const LocalMapOptions& options, const auto&... arguments) {
      return error_text<c10::ValueError>([&] { local_map(fn, options)(arguments...); });
    };
    EXPECT_THAT(text(same, {.out_placements = {{Shard(0)}}, .in_placements = {{Shard(0)}, {Shard(0)}}}, a),
                HasSubstr("in_placements has 2 entries for 1 arguments"));
    EXPECT_THAT(text(same, {.out_placements = {{Shard(0)}}, .in_placements = {{}}}, a),
                HasSubstr("argument 0 is a DTensor, but its placements are {}"));
    const auto scaled = [](const at::Tensor& x, double f) { return x * f; };
    EXPECT_THAT(text(scaled, {.out_placements = {{Shard(0)}}, .in_placements = {{Shard(0)}, {Shard(0)}}}, a, 2.0),
                HasSubstr("argument 1 is no DTensor, but has placements \"S0\""));
    const auto sum = [](const at::Tensor& x, const at::Tensor& y) { return x + y; };
    EXPECT_THAT(text(sum, {.out_placements = {{Shard(0)}}, .in_placements = {{Shard(0)}, {Shard(0)}}}, a, iota({2})),
                HasSubstr("argument 1 is no DTensor, but has placements \"S0\""));
    EXPECT_THAT(text(same, {.out_placements = {}}, a),
                HasSubstr("the function gave 1 results, out_placements has 0 entries"));
    EXPECT_THAT(text(same, {.out_placements = {{}}}, a), HasSubstr("result 0 is f64[2], but its placements are {}"));
    EXPECT_THAT(text([&](const at::Tensor&) { return at::Tensor(a); }, {.out_placements = {{Shard(0)}}}, a),
                HasSubstr("result 0 is a DTensor: f64[4] S0"));
    EXPECT_THAT(text([](const at::Tensor&) { return 3; }, {.out_placements = {{Shard(0)}}}, a),
                HasSubstr("result 0 is no DTensor, but has placements \"S0\""));
    const DeviceMesh other = init_device_mesh("cpu", {2, 1}, {"dp", "tp"}, {.group = mesh.root_group()});
    EXPECT_THAT(text(same, {.out_placements = {{Shard(0)}}, .mesh = other}, a), HasSubstr("argument 0 is on mesh"));
    const bool is_first = mesh.get_rank() == 0;
    EXPECT_THAT(text([&](const at::Tensor&) { return iota({is_first ? 1 : 3}); }, {.out_placements = {{Shard(0)}}}, a),
                HasSubstr("[local_map] the parts do not make \"S0\" of [4]"));
  });
}

}  // namespace
}  // namespace serried
