// Strides and storage of DTensors: as_strided over the whole tensor, and what raises.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

TEST(Metadata, AsStridedOfItsOwnStridesKeepsThePlacement) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(at::arange(6.).view({3, 2}), mesh, {Shard(0)});
    const at::Tensor same = x.as_strided({3, 2}, {2, 1});
    EXPECT_EQ(DTensor(same).placements(), Placements{Shard(0)});
    expect_equal(full(same), at::arange(6.).view({3, 2}));
  });
}

TEST(Metadata, AsStridedWalksTheWholeTensor) {
  const at::Tensor x = at::arange(10.).view({5, 2});
  const at::Tensor transposed = at::arange(10.).view({2, 5}).t();
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Placements& placements : all_placements(2, shape.size(), true)) {
        for (const at::Tensor& value : {x, transposed}) {
          const at::Tensor got = place(value, mesh, placements).as_strided({2, 3}, {4, 1}, 1);
          expect_close(full(got), value.as_strided({2, 3}, {4, 1}, 1), to_string(placements));
        }
      }
    });
  }
}

TEST(Metadata, AsStridedScatterWritesIntoACopy) {
  const at::Tensor x = at::arange(10.).view({5, 2});
  const at::Tensor source = -at::ones({3});
  const at::Tensor want = at::as_strided_scatter(x, source, {3}, {2}, 1);
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const at::Tensor parts = place(x, mesh, {Shard(0)});
    const at::Tensor got = at::as_strided_scatter(parts, place(source, mesh, {Shard(0)}), {3}, {2}, 1);
    expect_equal(full(got), want);
    expect_equal(full(parts), x);
  });
}

TEST(Metadata, ResizeToTheSameSizesDoesNothing) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(at::arange(5.), mesh, {Shard(0)});
    x.resize_({5});
    expect_equal(full(x), at::arange(5.));
  });
}

TEST(Metadata, ResizeNamesBothSizes) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(at::arange(5.), mesh, {Shard(0)});
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                x.resize_({2, 3});
              }),
              "[resize_] a DTensor of sizes [5] cannot become [2,3] in place: each rank holds a part of the former\n"
              "  fix: make a new tensor: zeros(sizes, mesh, placements)\n"
              "  at:  rank 0/1");
  });
}

TEST(Metadata, StorageCannotBeExchanged) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(at::arange(5.), mesh, {Shard(0)});
    EXPECT_EQ(error_text<c10::ValueError>([&] { x.set_(); }),
              "[aten::set_] a DTensor has no storage of its own to exchange: its memory is the parts of all ranks\n"
              "  fix: use copy_() to change its values, or set_ on to_local()\n"
              "  at:  rank 0/1");
  });
}

TEST(Metadata, StridesCannotBeChangedInPlace) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(at::arange(6.), mesh, {Shard(0)});
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                x.as_strided_({2, 3}, {3, 1});
              }),
              "[aten::as_strided_] the strides of a DTensor cannot be changed in place\n"
              "  fix: use as_strided(), which gathers the tensor and returns a copy\n"
              "  at:  rank 0/1");
  });
}

}  // namespace
}  // namespace serried::testing
