// Parameters and modules that become DTensors in place.
#include "serried/tensor/making/modules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/spmd/register_sharding.h"
#include "serried/spmd/registry.h"
#include "serried/tensor/dispatch/dispatch.h"
#include "serried/tensor/guards.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using ::testing::ElementsAre;
using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::on_mesh;

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    fc1 = register_module("fc1", torch::nn::Linear(5, 7));
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
    fc2 = register_module("fc2", torch::nn::Linear(torch::nn::LinearOptions(7, 3).bias(false)));
    scale = register_parameter("scale", torch::ones({3}));
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(at::relu(norm(fc1(x)))) * scale; }

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Net);

Net seeded_net(uint64_t seed = 0) {
  return seeded(seed, [] { return Net(); });
}

TEST(DistributeParameter, MemberListAndOptimizerSeeIt) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Net net = seeded_net();
    const at::Tensor before = net->fc1->weight.detach().clone();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    distribute_parameter(net->fc1->weight, mesh, {Shard(0)});
    EXPECT_TRUE(is_dtensor(net->fc1->weight));
    EXPECT_TRUE(is_dtensor(net->named_parameters()["fc1.weight"]));
    size_t seen = 0;
    for (const at::Tensor& p : optimizer.param_groups()[0].params()) seen += is_dtensor(p) ? 1 : 0;
    EXPECT_EQ(seen, 1u);
    EXPECT_TRUE(net->fc1->weight.is_leaf());
    EXPECT_TRUE(net->fc1->weight.requires_grad());
    expect_equal(DTensor(net->fc1->weight).full_tensor().detach(), before);
  });
}

TEST(DistributeParameter, TheFirstRanksValuesCount) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    Net net = seeded_net(uint64_t(mesh.get_rank()));
    distribute_parameter(net->fc1->weight, mesh, {Shard(0), Shard(1)});
    distribute_parameter(net->fc1->bias, mesh);
    Net first = seeded_net(0);
    expect_equal(DTensor(net->fc1->weight).full_tensor().detach(), first->fc1->weight.detach());
    expect_equal(DTensor(net->fc1->bias).full_tensor().detach(), first->fc1->bias.detach());
  });
}

TEST(DistributeParameter, ItsGradientArrivesInItsPlacements) {
  for (const Placements& placements : {Placements{Shard(0)}, Placements{Shard(1)}, Placements{Replicate()}}) {
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      torch::nn::Linear plain = seeded(1, [] { return torch::nn::Linear(5, 7); });
      torch::nn::Linear net = seeded(1, [] { return torch::nn::Linear(5, 7); });
      distribute_parameter(net->weight, mesh, placements);
      distribute_parameter(net->bias, mesh);
      const at::Tensor x = seeded(2, [] { return at::randn({4, 5}); });
      net(distribute_tensor(x, mesh, {Shard(0)})).pow(2).sum().backward();
      plain(x).pow(2).sum().backward();
      EXPECT_EQ(DTensor(net->weight.grad()).placements(), placements);
      EXPECT_EQ(DTensor(net->bias.grad()).placements(), (Placements{Replicate()}));
      expect_close(DTensor(net->weight.grad()).full_tensor(), plain->weight.grad(), to_string(placements));
      expect_close(DTensor(net->bias.grad()).full_tensor(), plain->bias.grad());
    });
  }
}

TEST(DistributeParameter, AnExistingGradientIsDistributedToo) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor p = at::ones({5, 3}).requires_grad_();
    p.mutable_grad() = at::full({5, 3}, 2.0);
    distribute_parameter(p, mesh, {Shard(0)});
    EXPECT_EQ(DTensor(p.grad()).placements(), (Placements{Shard(0)}));
    expect_equal(DTensor(p.grad()).full_tensor(), at::full({5, 3}, 2.0));
  });
}

TEST(DistributeParameter, TwiceTheSameIsFineOtherwiseNot) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor p = at::ones({5, 3}).requires_grad_();
    distribute_parameter(p, mesh, {Shard(0)});
    EXPECT_NO_THROW(distribute_parameter(p, mesh, {Shard(-2)}));
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_parameter(p, mesh, {Shard(1)}); }),
                HasSubstr("[distribute_parameter] the parameter is already distributed: f32[5,3] S0 on mesh"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_parameter(at::Tensor(), mesh); }),
                HasSubstr("[distribute_parameter] the parameter is undefined"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_parameter(at::ones(3).requires_grad_() * 2, mesh); }),
                HasSubstr("f32[3] is the result of an op that autograd recorded"));
    EXPECT_THROW(distribute_parameter(at::ones(3), mesh, {Shard(1)}), c10::IndexError);
  });
}

TEST(DistributeModule, VisitsEveryModuleAndReplicatesTheRest) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Net net = seeded_net();
    std::vector<std::string> names;
    distribute_module(*net, mesh, [&](const std::string& name, torch::nn::Module& module, const DeviceMesh& on) {
      names.push_back(name);
      if (name == "fc1") distribute_parameter(dynamic_cast<torch::nn::LinearImpl&>(module).weight, on, {Shard(0)});
    });
    EXPECT_THAT(names, ElementsAre("", "fc1", "norm", "fc2"));
    EXPECT_EQ(DTensor(net->fc1->weight).placements(), (Placements{Shard(0)}));
    for (const at::Tensor& t : net->parameters()) EXPECT_TRUE(is_dtensor(t));
    for (const at::Tensor& t : net->buffers()) EXPECT_EQ(DTensor(t).placements(), (Placements{Replicate()}));
    EXPECT_TRUE(is_dtensor(net->norm->running_mean)) << "the member too";
  });
}

TEST(DistributeModule, ASecondTimeIsAnError) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Net net = seeded_net();
    distribute_module(*net, mesh);
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_module(*net, mesh); }),
                HasSubstr("is already distributed"));
    Net other = seeded_net();
    for (const at::Tensor& p : other->parameters()) distribute_parameter(p, mesh);
    EXPECT_NO_THROW(distribute_module(*other, mesh)) << "single parameters may be distributed before";
  });
}

TEST(DistributeModule, TrainsLikeThePlainOne) {
  for (const Sizes& shape : {Sizes{1}, Sizes{2}, Sizes{3}}) {
    on_mesh(shape, [](const DeviceMesh& mesh) {
      Net plain = seeded_net();
      Net net = seeded_net();
      distribute_module(*net, mesh, [](const std::string& name, torch::nn::Module& module, const DeviceMesh& on) {
        if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
          distribute_parameter(linear->weight, on, {Shard(name == "fc1" ? 0 : 1)});
        }
      });
      const at::Tensor x = seeded(2, [] { return at::randn({6, 5}); });
      const at::Tensor d = distribute_tensor(x, mesh);
      torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        plain_optimizer.zero_grad();
        optimizer.zero_grad();
        const at::Tensor expected = plain->forward(x).pow(2).mean();
        const at::Tensor loss = net->forward(d).pow(2).mean();
        expect_close(DTensor(loss).full_tensor().detach(), expected.detach());
        expected.backward();
        loss.backward();
        plain_optimizer.step();
        optimizer.step();
      }
      for (const auto& item : plain->named_parameters()) {
        expect_close(DTensor(net->named_parameters()[item.key()]).full_tensor().detach(), item.value().detach(),
                     item.key());
      }
      expect_close(DTensor(net->norm->running_mean).full_tensor(), plain->norm->running_mean);
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 3);
    });
  }
}

TEST(DistributeModule, ACloneIsADeepCopy) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Net net = seeded_net();
    distribute_module(*net, mesh, [](const std::string& name, torch::nn::Module& module, const DeviceMesh& on) {
      if (name == "fc1") distribute_parameter(dynamic_cast<torch::nn::LinearImpl&>(module).weight, on, {Shard(0)});
    });
    const auto copy = std::dynamic_pointer_cast<NetImpl>(net->clone());
    EXPECT_EQ(DTensor(copy->fc1->weight).placements(), (Placements{Shard(0)}));
    EXPECT_TRUE(copy->fc1->weight.requires_grad());
    EXPECT_TRUE(is_dtensor(copy->norm->running_mean));
    at::NoGradGuard no_grad;
    const at::Tensor before = DTensor(copy->fc1->weight).full_tensor().clone();
    net->fc1->weight.zero_();
    expect_equal(DTensor(copy->fc1->weight).full_tensor(), before);
  });
}

TEST(RegisterSharding, ChecksTheOpAndTheRule) {
  EXPECT_THAT(error_text<c10::ValueError>([] { register_sharding("mylib::nothing", "... -> ..."); }),
              HasSubstr("[register_sharding] there is no op \"mylib::nothing\""));
  EXPECT_THAT(error_text<c10::ValueError>([] { register_sharding("aten::mm.nothing", "mk, kn -> mn"); }),
              HasSubstr("fix: pass one of \"aten::mm\""));
  EXPECT_THROW(register_sharding("aten::mm", "mk, kn mn"), c10::ValueError);
  register_sharding("aten::mm", "mk, kn -> mn");
  spmd::unregister_rule("aten::mm");
}

TEST(RegisterSharding, ReachesTheOtherRanksOfTheProcess) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor a = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    const auto barrier = [&] { mesh.get_group(0)->barrier()->wait(); };
    at::mm(a, a);
    reset_dispatch_stats();
    at::mm(a, a);
    EXPECT_EQ(dispatch_stats().misses, 0u);
    barrier();
    if (mesh.get_rank() == 0) register_sharding("aten::mm", "mk, kn -> mn");
    barrier();
    at::mm(a, a);
    EXPECT_GE(dispatch_stats().misses, 1u) << "rank " << mesh.get_rank() << " kept its plan";
    barrier();
    if (mesh.get_rank() == 0) spmd::unregister_rule("aten::mm");
  });
}

}  // namespace
}  // namespace serried
