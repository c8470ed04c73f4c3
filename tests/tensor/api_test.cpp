// Meshes, placements and DTensors as users write them, through the one public header.
#include <serried/serried.h>

#include <gtest/gtest.h>

#include <iostream>

#include "tests/support/close.h"

namespace {

using namespace serried;
using serried::testing::expect_close;

// Every field that is promised, in the order in which they may be named.
[[maybe_unused]] void options(const Group& g, const DeviceMesh& mesh, const at::Tensor& t) {
  (void)MeshOptions{.group = g};
  (void)FromLocalOptions{.run_check = true, .shape = {8, 4}, .stride = t.strides()};
  (void)FromLocalOptions{.shape = t.sizes(), .stride = Sizes{4, 1}};
  (void)LocalMapOptions{.out_placements = {{Shard(0)}}, .in_placements = {{Shard(0)}, {Replicate()}}, .mesh = mesh};
}

[[maybe_unused]] void rules() {
  register_sharding("mylib::rope", "...d, !d, !d -> ...d");
}

TEST(MeshApi, HoldsAsDocumented) {
  run_ranks(4, [](const Group& g) {
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    { auto same = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = g}); }
    { auto unnamed = init_device_mesh("cpu", {2, 2}, {}, {.group = g}); }
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.size(1), 2);
    EXPECT_EQ(mesh.shape(), (Sizes{2, 2}));
    EXPECT_EQ(mesh.dim_names(), (std::vector<std::string>{"dp", "tp"}));
    EXPECT_TRUE(mesh.ranks().equal(at::arange(4).view({2, 2})));
    EXPECT_EQ(mesh["tp"].size(), 2);
    EXPECT_EQ(mesh.slice({"dp", "tp"}).size(), 4);
    EXPECT_EQ(mesh.flatten("all").ndim(), 1);
    EXPECT_EQ(mesh.get_group("tp")->getRank(), g->getRank() % 2);
    EXPECT_EQ(mesh.get_group(0)->getRank(), g->getRank() / 2);
    EXPECT_EQ(mesh.get_rank(), g->getRank());
    EXPECT_EQ(mesh.get_local_rank("dp"), g->getRank() / 2);
    const std::optional<std::vector<int64_t>> coordinate = mesh.get_coordinate();
    EXPECT_EQ(*coordinate, (Sizes{g->getRank() / 2, g->getRank() % 2}));
  });
}

TEST(PlacementApi, TextsComeBack) {
  Placements p = {Shard(0), Replicate()};
  EXPECT_TRUE(p == parse_placements("S0 R"));
  EXPECT_EQ(to_string(p), "S0 R");
  EXPECT_TRUE(to_string({Partial(), Partial("max"), Shard(1)}) == "P P(max) S1");
  EXPECT_THROW(parse_placements("S0 Q"), c10::ValueError);
}

at::Tensor whole() {
  return at::arange(32, at::kFloat).view({8, 4}) / 10;
}

TEST(DTensorApi, HoldsAsDocumented) {
  run_ranks(4, [](const Group&) {
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    const at::Tensor full = whole(), w = at::ones({3, 4});
    DTensor d = distribute_tensor(full, mesh, {Shard(0), Replicate()});
    const at::Tensor local = full.slice(0, 4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4);
    DTensor e = DTensor::from_local(local, mesh, {Shard(0), Replicate()});
    expect_close(e.full_tensor(), full);
    {
      const at::Tensor t = full;
      DTensor f = DTensor::from_local(local, mesh, {Shard(0), Replicate()},
                                      {.run_check = true, .shape = {8, 4}, .stride = t.strides()});
      DTensor h =
          DTensor::from_local(local, mesh, {Shard(0), Replicate()}, {.shape = t.sizes(), .stride = t.strides()});
      expect_close(f.full_tensor(), full);
      expect_close(h.full_tensor(), full);
    }
    at::Tensor l = d.to_local();
    at::Tensor f = d.full_tensor();
    expect_close(l, local);
    expect_close(f, full);
    DTensor r = d.redistribute({Replicate(), Replicate()});
    expect_close(r.to_local(), full);
    EXPECT_EQ(d.placements(), (Placements{Shard(0), Replicate()}));
    EXPECT_EQ(d.device_mesh().size(), 4);
    EXPECT_EQ(d.sizes(), (Sizes{8, 4}));
    at::Tensor t = d;
    EXPECT_TRUE(is_dtensor(t));
    EXPECT_EQ(DTensor(t).placements(), d.placements());
    EXPECT_THROW(DTensor(at::ones({2})), c10::TypeError);
    DTensor h(at::relu(d));
    expect_close(h.full_tensor(), full);
    const DTensor weight = distribute_tensor(w, mesh, {Replicate(), Shard(0)});
    at::Tensor y = at::gelu(at::linear(d, weight)) + 1;
    expect_close(DTensor(y).full_tensor(), at::gelu(at::linear(full, w)) + 1);
  });
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(4, 6));
    fc2 = register_module("fc2", torch::nn::Linear(6, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(fc1(x).relu()); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

TEST(DTensorApi, FactoriesAndModulesHoldAsDocumented) {
  const at::Tensor drawn = seeded(7, [] { return at::randn({8, 4}); });
  const at::Tensor expected = seeded(0, [] { return Net(); })->forward(whole());
  run_ranks(2, [&](const Group&) {
    auto mesh = init_device_mesh("cpu", {2}, {"tp"});
    DTensor z = zeros({8, 4}, mesh, {Shard(0)});
    expect_close(z.full_tensor(), at::zeros({8, 4}));
    expect_close(ones({8, 4}, mesh, {Shard(0)}, at::kDouble).full_tensor(), at::ones({8, 4}, at::kDouble));
    expect_close(full({8, 4}, 3, mesh, {Shard(0)}).full_tensor(), at::full({8, 4}, 3));
    EXPECT_EQ(empty({8, 4}, mesh, {Shard(0)}).to_local().size(0), 4);
    EXPECT_EQ(rand({8, 4}, mesh, {Shard(0)}).sizes(), (Sizes{8, 4}));
    manual_seed(7, mesh);
    expect_close(randn({8, 4}, mesh, {Shard(0)}).full_tensor(), drawn);

    Net net = seeded(0, [] { return Net(); });
    distribute_parameter(net->fc1->weight, mesh, {Shard(0)});
    distribute_module(*net, mesh, [](const std::string& name, torch::nn::Module& m, const DeviceMesh& mesh) {
      if (name == "fc2") distribute_parameter(m.as<torch::nn::LinearImpl>()->weight, mesh, {Shard(1)});
    });
    const at::Tensor y = net->forward(distribute_tensor(whole(), mesh, {Replicate()}));
    expect_close(DTensor(y).full_tensor(), expected);
  });
}

TEST(DTensorApi, ToolsHoldAsDocumented) {
  run_ranks(2, [](const Group&) {
    auto mesh = init_device_mesh("cpu", {2}, {"tp"});
    const DTensor a = distribute_tensor(whole(), mesh, {Shard(0)}), b = distribute_tensor(whole(), mesh, {Replicate()});
    const auto fn = [](const at::Tensor& x, const at::Tensor& y) { return x + y.sum(); };
    auto out = local_map(
        fn, {.out_placements = {{Shard(0)}}, .in_placements = {{Shard(0)}, {Replicate()}}, .mesh = mesh})(a, b);
    expect_close(DTensor(out).full_tensor(), whole() + whole().sum());
    {
      ImplicitReplication guard;
      expect_close(DTensor(a + whole()).full_tensor(), whole() * 2);
    }
    {
      ExplicitRedistribution guard;
      EXPECT_THROW(at::mm(a, a.t()), c10::Error);  // a row needs every column
    }
    CommDebugMode comm;
    a.full_tensor();
    EXPECT_EQ(comm.count("all_gather"), 1);
    EXPECT_EQ(comm.counts(), (std::map<std::string, int64_t>{{"all_gather", 1}}));
    EXPECT_EQ(comm.bytes(), 4 * 4 * 4);  // its own half
    EXPECT_NE(comm.report().find("all_gather"), std::string::npos);
    EXPECT_NE(visualize_sharding(a), "");
    EXPECT_NE(visualize_sharding(a, {.format = "svg"}).find("<svg"), std::string::npos);
    EXPECT_NE(explain("aten::mm", {a.t(), b}).find("rule"), std::string::npos);
  });
}

}  // namespace
