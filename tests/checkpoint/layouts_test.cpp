// Tensors that lie in unusual ways, of every dtype, saved under one layout and loaded under another.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/state_dict.h"
#include "serried/optim/adam.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "tests/checkpoint/folder.h"
#include "tests/checkpoint/tensor_bytes.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;

constexpr checkpoint::detail::FormatLimits kTiny = {.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 16};

// Bytes of 0 to 127, seen as numbers of the dtype; truth values are 0 and 1.
at::Tensor bytes_as(at::ScalarType dtype, at::IntArrayRef sizes) {
  const int64_t count = c10::multiply_integers(sizes) * int64_t(c10::elementSize(dtype));
  const at::Tensor bytes = torch::arange(count).remainder(dtype == at::kBool ? 2 : 61).to(at::kByte);
  return bytes.view(dtype).view(sizes);
}

void expect_same_bytes(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const auto bytes = [](const at::Tensor& t) {
    return std::string(static_cast<const char*>(t.const_data_ptr()), size_t(t.nbytes()));
  };
  EXPECT_EQ(bytes(actual.contiguous()), bytes(expected.contiguous())) << what;
}

TEST(CheckpointLayouts, EveryDtypeGoesFromColumnsToRowsAndBack) {
  const SmallLimits limits(kTiny);
  const std::vector<at::ScalarType> dtypes = {at::kDouble,        at::kFloat,       at::kHalf,   at::kBFloat16,
                                              at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kLong,   at::kInt,
                                              at::kShort,         at::kChar,        at::kUInt64, at::kUInt32,
                                              at::kUInt16,        at::kByte,        at::kBool,   at::kComplexFloat};
  ASSERT_EQ(dtypes.size(), 16u);
  for (const int64_t world_size : {1, 2, 4}) {
    const Folder folder;
    on_mesh({world_size}, [&](const DeviceMesh& mesh) {
      for (const at::ScalarType dtype : dtypes) {
        const std::string name = c10::toString(dtype), path = folder / name;
        const at::Tensor value = bytes_as(dtype, {9, 7});
        checkpoint::save(path, {{"x", distribute_tensor(value, mesh, {Shard(1)}, {.source = std::nullopt})}});
        expect_same_bytes(checkpoint::read_value(path, "x").toTensor(), value, name);
        for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
          const DTensor loaded =
              distribute_tensor(torch::zeros({9, 7}, dtype), mesh, {placement}, {.source = std::nullopt});
          checkpoint::load(path, {{"x", loaded}});
          const DTensor expected = distribute_tensor(value, mesh, {placement}, {.source = std::nullopt});
          expect_same_bytes(loaded.to_local(), expected.to_local(), name);
        }
      }
    });
  }
}

TEST(CheckpointLayouts, FloatsConvertUnderAnyLayout) {
  const SmallLimits limits(kTiny);
  const Folder folder;
  const at::Tensor value = torch::randn({9, 7}, at::kDouble);
  for (const auto from : {at::kBFloat16, at::kFloat, at::kDouble}) {
    const std::string path = folder / c10::toString(from);
    on_mesh({3}, [&](const DeviceMesh& mesh) {
      checkpoint::save(path, {{"x", distribute_tensor(value.to(from), mesh, {Shard(1)})}});
      for (const auto to : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
        for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
          const DTensor loaded = distribute_tensor(torch::zeros({9, 7}, to), mesh, {placement});
          checkpoint::load(path, {{"x", loaded}}, {.convert = true});
          expect_equal(full(loaded), value.to(from).to(to));
        }
      }
    });
  }
}

TEST(CheckpointLayouts, TransposedAndEmptyAndSingleElements) {
  const SmallLimits limits(kTiny);
  for (const Sizes& shape : usual_meshes()) {
    const Folder folder;
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const Placements cut(size_t(mesh.ndim()), Shard(0)), inner(size_t(mesh.ndim()), Shard(1)),
          whole(size_t(mesh.ndim()), Replicate());
      const at::Tensor value = iota({9, 7});
      const auto with = [&](const at::Tensor& t, const Placements& placements) {
        return distribute_tensor(t, mesh, placements);
      };
      const auto contents = [&](double factor) {
        return checkpoint::Contents{{"turned", at::Tensor(with(value * factor, cut)).t()},
                                    {"turned_inner", at::Tensor(with(value * factor, inner)).t()},
                                    {"number", with(torch::full({}, 3.0 * factor), whole)},
                                    {"one", with(torch::full({1}, 4.0 * factor), cut)},
                                    {"none", with(torch::zeros({0, 5}), cut)},
                                    {"none_inner", with(torch::zeros({5, 0}), inner)},
                                    {"none_between", with(torch::zeros({3, 0, 4}), cut)}};
      };
      checkpoint::save(folder / "c", contents(1));
      const checkpoint::Contents loaded = contents(0);
      checkpoint::load(folder / "c", loaded);
      const auto read = [&](const char* name) { return checkpoint::read_value(folder / "c", name).toTensor(); };
      expect_equal(read("turned"), value.t());
      expect_equal(read("turned_inner"), value.t());
      EXPECT_EQ(read("number").item<double>(), 3);
      EXPECT_EQ(read("one").item<double>(), 4);
      EXPECT_EQ(read("none_between").sizes(), at::IntArrayRef({3, 0, 4}));
      const checkpoint::StateDict state = checkpoint::get_state(loaded);
      for (const char* name : {"turned", "turned_inner", "number", "one"}) {
        expect_equal(state.at(name).tensors.at(name), read(name), name);
      }
    });
  }
}

// Of two entries each has a "weight" of one size.
TEST(CheckpointLayouts, RanksOfAMeshThatLoadDifferentEntriesAreRefused) {
  const SmallLimits limits(kTiny);
  const Folder folder;
  const auto net_of = [](double value) {
    auto net = std::make_shared<torch::nn::Module>();
    net->register_parameter("weight", torch::full({8, 8}, value));
    return net;
  };
  checkpoint::save(folder / "c", {{"a", state_of(net_of(1))}, {"b", state_of(net_of(2))}});
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const auto net = net_of(0);
    at::Tensor weight = net->named_parameters()["weight"];
    distribute_parameter(weight, mesh, {Shard(1)});
    const std::string mine = mesh.get_rank() == 0 ? "a" : "b";
    const std::string text = load_error(folder / "c", {{mine, state_of(net)}});
    EXPECT_EQ(text.find("[checkpoint::load] rank 1 of the mesh of ranks [0,1] loads other DTensors than rank 0\n  fix: "
                        "load the same contents on every rank of a mesh"),
              0u)
        << text;
    EXPECT_EQ(full(weight.detach()).sum().item<double>(), 0);
  });
}

TEST(CheckpointLayouts, ColumnsAreBroughtToRowsOneTensorAfterTheOther) {
  const Folder folder;
  constexpr int64_t kCount = 10, kRows = 256, kColumns = 1024, kPart = kRows * kColumns * 4 / 2;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    checkpoint::Contents contents;
    for (int64_t i = 0; i < kCount; ++i) {
      const at::Tensor value = torch::full({kRows, kColumns}, double(i + 1));
      contents.push_back({c10::str("x", i), distribute_tensor(value, mesh, {Shard(1)})});
    }
    for (const bool is_load : {false, true}) {
      const auto bytes = std::make_shared<TensorBytes>();
      const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, bytes);
      is_load ? checkpoint::load(folder / "c", contents) : checkpoint::save(folder / "c", contents);
      EXPECT_GE(bytes->most, kPart);
      EXPECT_LE(bytes->most, 4 * kPart) << (is_load ? "load" : "save");
    }
  });
}

TEST(CheckpointLayouts, FrozenParametersOfShardsComeBack) {
  const Folder folder;
  struct Net : torch::nn::Module {
    torch::nn::Linear frozen{nullptr}, trained{nullptr};
    explicit Net(double value) {
      frozen = register_module("frozen", torch::nn::Linear(7, 5));
      trained = register_module("trained", torch::nn::Linear(5, 3));
      const at::NoGradGuard no_grad;
      for (const at::Tensor& p : parameters()) p.copy_(value * iota(p.sizes()).to(at::kFloat));
      for (at::Tensor& p : frozen->parameters()) p.requires_grad_(false);
    }
    at::Tensor forward(const at::Tensor& x) { return trained->forward(frozen->forward(x)); }
  };
  std::vector<at::Tensor> expected;
  const auto train = [](Net& net, torch::optim::Optimizer& optimizer) {
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      net.forward(torch::ones({2, 7})).square().mean().backward();
      optimizer.step();
    }
  };
  run_ranks(2, [&](const Group& group) {
    Net net(0.01);
    fully_shard(net);
    serried::AdamW optimizer(net.trained->parameters(), torch::optim::AdamWOptions(0.1));
    train(net, optimizer);
    checkpoint::save(folder / "c", {{"model", state_of(net)}, {"optim", state_of(optimizer)}});
    train(net, optimizer);
    std::vector<at::Tensor> values;
    for (const at::Tensor& p : net.parameters()) values.push_back(full(p.detach()).clone());
    if (group->getRank() == 0) expected = values;
  });
  run_ranks(3, [&](const Group&) {
    Net net(0);
    fully_shard(*net.frozen);
    fully_shard(net);
    serried::AdamW optimizer(net.trained->parameters(), torch::optim::AdamWOptions(0.5));
    net.forward(torch::ones({2, 7}));  // whole ones are in use
    checkpoint::load(folder / "c", {{"model", state_of(net)}, {"optim", state_of(optimizer)}});
    train(net, optimizer);
    const std::vector<at::Tensor> found = net.parameters();
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_FALSE(i < 2 && found[i].requires_grad());
      EXPECT_LE((full(found[i].detach()) - expected[i]).abs().max().item<double>(), 1e-5) << i;
    }
  });
}

TEST(CheckpointLayouts, PartsOfOneMemoryAreWrittenAndElementsThatShareOnePlaceAreNot) {
  const Folder folder;
  const at::Tensor memory = torch::arange(20, at::kFloat), before = memory.clone();
  torch::nn::Module net;
  net.register_parameter("a", memory.slice(0, 0, 10));
  net.register_parameter("b", memory.slice(0, 10, 20, 2));
  checkpoint::save(folder / "c", {{"model", state_of(net)}});
  net.register_buffer("same", torch::ones({1}).expand({4}));
  checkpoint::save(folder / "d", {{"model", state_of(net)}});
  memory.fill_(-1);
  EXPECT_EQ(
      load_error(folder / "d", {{"model", state_of(net)}}),
      "[checkpoint::load] \"model.same\" is loaded into f32[4], elements of which share memory\n  fix: clone() it "
      "first");
  EXPECT_TRUE(memory.eq(-1).all().item<bool>()) << "nothing is written before all is compared";
  checkpoint::load(folder / "d", {{"model", state_of(net)}}, {.only = "a"});
  checkpoint::load(folder / "d", {{"model", state_of(net)}}, {.only = "b"});
  expect_equal(memory.slice(0, 0, 10), before.slice(0, 0, 10));
  expect_equal(memory.slice(0, 10, 20, 2), before.slice(0, 10, 20, 2));
  expect_equal(memory.slice(0, 11, 20, 2), torch::full({5}, -1.0f));
}

}  // namespace
}  // namespace serried::testing
