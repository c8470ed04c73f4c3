// Factories: only the part is allocated, the tensor is what torch's function gives.
#include "serried/tensor/making/factories.h"

#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_equal;

void on_ranks(int world_size, const std::function<void(const DeviceMesh&)>& fn) {
  run_ranks(world_size, [&](const Group&) { fn(init_device_mesh("cpu", {world_size}, {"dp"})); });
}

void on_grid(const std::function<void(const DeviceMesh&)>& fn) {
  run_ranks(4, [&](const Group&) { fn(init_device_mesh("cpu", {2, 2}, {"dp", "tp"})); });
}

std::string at_rank(const DeviceMesh& mesh) {
  return c10::str("\n  at:  rank ", mesh.get_rank(), "/", mesh.root_group()->getSize());
}

at::Tensor seeded_whole(const std::function<at::Tensor(const at::Generator&)>& make) {
  return make(at::detail::createCPUGenerator(7));
}

TEST(Factories, FillTheWholeTensorWithOneValue) {
  on_grid([](const DeviceMesh& mesh) {
    for (const Placements& placements : std::vector<Placements>{{Shard(0), Shard(1)}, {Shard(0), Shard(0)}, {}}) {
      expect_equal(zeros({5, 3}, mesh, placements).full_tensor(), at::zeros({5, 3}));
      expect_equal(ones({5, 3}, mesh, placements, at::kLong).full_tensor(), at::ones({5, 3}, at::kLong));
      expect_equal(full({5, 3}, 2.5, mesh, placements).full_tensor(), at::full({5, 3}, 2.5));
      EXPECT_EQ(empty({5, 3}, mesh, placements).sizes(), at::IntArrayRef({5, 3}));
    }
  });
}

TEST(Factories, AllocateThePartOnly) {
  on_ranks(4, [](const DeviceMesh& mesh) {
    const DTensor t = zeros({5, 3}, mesh, {Shard(0)});
    const int64_t rows = local_size(5, 0, t.placements(), mesh.position());
    EXPECT_EQ(t.to_local().sizes(), at::IntArrayRef({rows, 3}));
    EXPECT_EQ(dtensor_meta(t)->local.storage().nbytes(), size_t(rows * 3 * 4));
  });
}

TEST(Factories, FullTakesTheDtypeOfItsValueLikeTorch) {
  on_ranks(2, [](const DeviceMesh& mesh) {
    EXPECT_EQ(full({2}, 3, mesh).scalar_type(), at::full({2}, 3).scalar_type());
    EXPECT_EQ(full({2}, true, mesh).scalar_type(), at::full({2}, true).scalar_type());
    EXPECT_EQ(full({2}, 1.5, mesh).scalar_type(), at::full({2}, 1.5).scalar_type());
    EXPECT_EQ(full({2}, 3, mesh, {}, at::kHalf).scalar_type(), at::kHalf);
  });
}

TEST(Factories, APartialHoldsTheValueOnce) {
  on_grid([](const DeviceMesh& mesh) {
    for (const char* kind : {"sum", "max", "min", "product", "avg"}) {
      expect_equal(full({3, 2}, 2., mesh, {Partial(kind), Shard(0)}).full_tensor(), at::full({3, 2}, 2.), kind);
      expect_equal(zeros({3, 2}, mesh, {Partial(kind), Partial(kind)}).full_tensor(), at::zeros({3, 2}), kind);
    }
    expect_equal(ones({3, 2}, mesh, {Partial(), Partial()}).full_tensor(), at::ones({3, 2}));
  });
}

TEST(Factories, RandomTensorsEqualTorchsForTheSameSeed) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [](const DeviceMesh& mesh) {
      for (const Placements& placements : std::vector<Placements>{{Shard(0)}, {Shard(1)}, {Replicate()}}) {
        manual_seed(7, mesh);
        expect_equal(randn({5, 9}, mesh, placements).full_tensor(), seeded_whole([](auto& generator) {
                       return at::randn({5, 9}, generator);
                     }));
        manual_seed(7, mesh);
        expect_equal(rand({5, 9}, mesh, placements, at::kDouble).full_tensor(), seeded_whole([](auto& generator) {
                       return at::rand({5, 9}, generator, at::kDouble);
                     }));
        manual_seed(7, mesh);
        expect_equal(randint(-2, 9, {5, 9}, mesh, placements).full_tensor(), seeded_whole([](auto& generator) {
                       return at::randint(-2, 9, {5, 9}, generator, at::kLong);
                     }));
      }
      manual_seed(7, mesh);
      expect_equal(randperm(11, mesh, {Shard(0)}).full_tensor(),
                   seeded_whole([](auto& generator) { return at::randperm(11, generator, at::kLong); }));
    });
  }
}

TEST(Factories, StreamsGoOnFromTensorToTensor) {
  on_ranks(3, [](const DeviceMesh& mesh) {
    manual_seed(7, mesh);
    randn({5, 7}, mesh, {Shard(0)});
    const at::Tensor second = randn({2, 3}, mesh, {Shard(1)}).full_tensor();
    const at::Generator generator = at::detail::createCPUGenerator(7);
    at::randn({5, 7}, generator);
    expect_equal(second, at::randn({2, 3}, generator));
  });
}

TEST(Factories, CountingTensorsEqualTorchs) {
  on_ranks(3, [](const DeviceMesh& mesh) {
    expect_equal(arange(7, mesh, {Shard(0)}).full_tensor(), at::arange(7));
    expect_equal(eye(5, mesh, {Shard(1)}).full_tensor(), at::eye(5));
  });
}

TEST(Factories, RequiresGradMakesALeaf) {
  on_ranks(2, [](const DeviceMesh& mesh) {
    const DTensor t = randn({4, 2}, mesh, {Shard(0)}, at::TensorOptions().requires_grad(true));
    EXPECT_TRUE(t.requires_grad());
    EXPECT_TRUE(t.is_leaf());
    EXPECT_FALSE(zeros({4}, mesh).requires_grad());
  });
}

TEST(Factories, OtherMemoryFormatsAreKept) {
  on_ranks(2, [](const DeviceMesh& mesh) {
    const auto options = at::TensorOptions(at::kFloat).memory_format(at::MemoryFormat::ChannelsLast);
    const DTensor t = ones({3, 4, 2, 5}, mesh, {Shard(0)}, options);
    EXPECT_EQ(t.strides(), at::empty({3, 4, 2, 5}, options).strides());
  });
}

TEST(Factories, BadArgumentsRaise) {
  on_ranks(2, [](const DeviceMesh& mesh) {
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                zeros({2, -1}, mesh);
              }),
              "[zeros] sizes are [2, -1]\n  fix: pass sizes of 0 or more" + at_rank(mesh));
    EXPECT_EQ(error_text<c10::ValueError>([&] { zeros({2}, mesh, {}, at::TensorOptions(at::kSparse)); }),
              "[zeros] layout is Sparse\n  fix: leave the layout out: a DTensor is strided" + at_rank(mesh));
    EXPECT_EQ(error_text<c10::ValueError>([&] { ones({2}, mesh, {}, at::TensorOptions(at::kMeta)); }),
              "[ones] device is meta\n  fix: leave the device out: the mesh decides, and it is cpu" + at_rank(mesh));
    EXPECT_EQ(
        error_text<c10::ValueError>([&] { ones({2}, mesh, {Partial("avg")}, at::kLong); }),
        "[ones] an average of Long is not exact\n  fix: use Partial(\"sum\") or a floating dtype" + at_rank(mesh));
    EXPECT_EQ(error_text<c10::ValueError>([&] { randint(3, 3, {2}, mesh); }),
              "[randint] there is no integer from 3 up to but not 3\n  fix: pass low < high" + at_rank(mesh));
    EXPECT_EQ(error_text<c10::ValueError>([&] { rand({2}, mesh, {Partial()}); }),
              "[rand] random numbers cannot be placed as f32[2] P on " + mesh.to_string() +
                  "\n  fix: place the tensor with Replicate or Shard instead of Partial" + at_rank(mesh));
    EXPECT_NE(error_text<c10::ValueError>([&] { zeros({2}, mesh, {Shard(0), Shard(0)}); }), "no error");
    EXPECT_NE(error_text<c10::IndexError>([&] { zeros({2}, mesh, {Shard(1)}); }), "no error");
  });
}

TEST(Factories, ARankOutsideTheMeshRaises) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    if (group->getRank() < 2) return;
    EXPECT_EQ(error_text<c10::ValueError>([&] { zeros({2}, mesh); }),
              "[zeros] rank 2 is not in " + mesh.to_string() +
                  "\n  fix: call it on the ranks of the mesh only: if (mesh.contains_this_rank())\n  at:  rank 2/3");
  });
}

}  // namespace
}  // namespace serried
