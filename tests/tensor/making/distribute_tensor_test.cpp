// distribute_tensor: the first rank's values, cut for everybody.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::all_placements;
using testing::error_text;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::iota;
using testing::on_mesh;
using testing::usual_meshes;

TEST(DistributeTensor, TheFirstRanksValuesCount) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Sizes& sizes : {Sizes{5, 3}, Sizes{1, 8}, Sizes{0, 2}}) {
        const at::Tensor mine = iota(sizes) + 100.0 * double(mesh.get_rank());
        for (const Placements& placements : all_placements(2, shape.size(), true)) {
          const DTensor d = distribute_tensor(mine, mesh, placements);
          EXPECT_EQ(d.placements(), placements);
          EXPECT_EQ(d.sizes(), at::IntArrayRef(sizes));
          EXPECT_EQ(d.to_local().sizes(), local_sizes(sizes, placements, mesh.position()));
          expect_equal(d.full_tensor(), iota(sizes), to_string(placements));
        }
      }
    });
  }
}

TEST(DistributeTensor, AnotherSourceMayBeNamed) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor mine = iota({5, 3}) + 100.0 * double(mesh.get_rank());
    for (const Placements& placements : all_placements(2, 2, true)) {
      const DTensor d = distribute_tensor(mine, mesh, placements, {.source = 1});
      expect_equal(d.full_tensor(), iota({5, 3}) + 300, to_string(placements));
    }
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_tensor(mine, mesh, {}, {.source = 2}); }),
                HasSubstr("[distribute_tensor] source is 2, but axis 0 of mesh"));
  });
}

TEST(DistributeTensor, WithoutASourceEveryRankCutsItsOwn) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const double mark = 100.0 * double(mesh.get_rank());
    const DTensor d = distribute_tensor(iota({5}) + mark, mesh, {Shard(0)}, {.source = std::nullopt});
    const Span rows = chunk(5, 3, mesh.get_rank());
    expect_equal(d.to_local(), iota({5}).narrow(0, rows.begin, rows.size) + mark);
  });
}

TEST(DistributeTensor, PartialIsTheValueOnTheFirstRankOnly) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({4}), mesh, {Partial()});
    expect_equal(d.to_local(), mesh.get_rank() == 0 ? iota({4}) : at::zeros({4}, at::kDouble));
    for (const char* kind : {"sum", "avg", "min", "max", "product"}) {
      expect_equal(distribute_tensor(iota({4}) - 2, mesh, {Partial(kind)}).full_tensor(), iota({4}) - 2, kind);
    }
  });
}

TEST(DistributeTensor, StridedPartsComeTogetherAgain) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (int64_t size : {8, 7, 3}) {
      const DTensor d = distribute_tensor(iota({size, 2}), mesh, {StridedShard(0, 2), Shard(0)});
      expect_equal(d.full_tensor(), iota({size, 2}), std::to_string(size));
    }
  });
}

TEST(DistributeTensor, KeepsRequiresGradAndCopiesTheData) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor x = iota({4}).requires_grad_();
    const DTensor d = distribute_tensor(x, mesh, {Shard(0)});
    EXPECT_TRUE(d.requires_grad());
    EXPECT_TRUE(d.is_leaf());
    at::NoGradGuard no_grad;
    x.fill_(9);
    expect_equal(d.full_tensor(), iota({4}));
    EXPECT_FALSE(distribute_tensor(iota({4}), mesh).requires_grad());
  });
}

TEST(DistributeTensor, ADTensorIsReturnedOrRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({4}), mesh, {Shard(0)});
    EXPECT_TRUE(distribute_tensor(d, mesh, {Shard(-1)}).is_same(d));
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_tensor(d, mesh, {Replicate()}); }),
                HasSubstr("[distribute_tensor] the tensor is already distributed: f64[4] S0 on "));
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_tensor(d, mesh, {Replicate()}); }),
                HasSubstr("fix: use d.redistribute(placements)"));
    const DeviceMesh other = init_device_mesh("cpu", {2, 1}, {"dp", "tp"}, {.group = mesh.root_group()});
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  distribute_tensor(d, other, {Shard(0), Replicate()});
                }),
                HasSubstr("not \"S0 R\" on mesh dp=2 tp=1"));
  });
}

TEST(DistributeTensor, RefusesWhatItCannotPlace) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = iota({4}).requires_grad_();
    EXPECT_EQ(error_text<c10::ValueError>([&] { distribute_tensor(x * 2, mesh); }),
              c10::str("[distribute_tensor] f64[4] is the result of an op that autograd recorded\n"
                       "  fix: pass full.detach(), or use DTensor::from_local, which is differentiable\n"
                       "  at:  rank ",
                       mesh.get_rank(), "/2"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_tensor({}, mesh); }),
                HasSubstr("the tensor is undefined"));
    EXPECT_THROW(distribute_tensor(iota({4}), mesh, {Shard(0), Shard(0)}), c10::ValueError);
    EXPECT_THROW(distribute_tensor(iota({4}), mesh, {Shard(1)}), c10::IndexError);
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_tensor(iota({4}).to(at::kInt), mesh, {Partial("avg")}); }),
                HasSubstr("P(avg) of i32"));
  });
}

TEST(DistributeTensor, ShapesThatDifferAreFound) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const bool is_first = mesh.get_rank() == 0;
    const std::string text =
        error_text<c10::ValueError>([&] { distribute_tensor(iota({is_first ? 6 : 4}), mesh, {Shard(0)}); });
    if (is_first) return;
    EXPECT_THAT(text, HasSubstr("this rank's tensor is [4], but the part that came from rank 0 of axis 0 is [3]"));
  });
}

}  // namespace
}  // namespace serried
