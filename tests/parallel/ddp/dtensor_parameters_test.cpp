// Data parallel training of a module whose parameters are distributed over another axis of the mesh.
#include "serried/parallel/ddp/parameters.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/reducer.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::dtensor_parameters_test {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using testing::full;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::gelu(fc1(x))); }
  torch::nn::Linear fc1{5, 7}, fc2{7, 3};
};
TORCH_MODULE(Mlp);

Mlp seeded_mlp(int seed = 0) {
  return seeded(seed, [] { return Mlp(); });
}

/// Columns of the first layer and rows of the second, unevenly.
void split(const Mlp& net, const DeviceMesh& tp) {
  distribute_parameter(net->fc1->weight, tp, {Shard(0)});
  distribute_parameter(net->fc1->bias, tp, {Shard(0)});
  distribute_parameter(net->fc2->weight, tp, {Shard(1)});
  distribute_parameter(net->fc2->bias, tp, {Replicate()});
}

void on_grid(const Sizes& shape, const std::function<void(const DeviceMesh&)>& fn) {
  const int ranks = int(shape[0] * shape[1]);
  run_ranks(ranks, [&](const Group& group) { fn(init_device_mesh("cpu", shape, {"dp", "tp"}, {.group = group})); });
}

/// Two rows for each place on the dp axis.
at::Tensor whole_batch(const DeviceMesh& mesh, int step = 0) {
  return seeded(100 + step, [&] { return at::randn({2 * mesh.size(0), 5}); });
}
at::Tensor batch_here(const DeviceMesh& mesh, int step = 0) {
  const at::Tensor rows = whole_batch(mesh, step).narrow(0, 2 * mesh.get_local_rank("dp"), 2);
  return DTensor::from_local(rows, mesh["tp"], {Replicate()});
}
at::Tensor loss_of(const at::Tensor& output) {
  return full(output).square().mean();
}

void expect_gradients_of(const Mlp& expected, torch::nn::Module& actual) {
  const auto wanted = expected->named_parameters();
  for (const auto& item : actual.named_parameters()) {
    const DTensor grad(item.value().grad());
    EXPECT_EQ(grad.placements(), DTensor(item.value()).placements()) << item.key();
    expect_close(grad.full_tensor(), wanted[item.key()].grad(), item.key());
  }
}

TEST(DdpOfDTensors, TrainsAsOneProcessDoes) {
  for (const Sizes& shape : {Sizes{2, 2}, Sizes{1, 3}, Sizes{3, 1}}) {
    on_grid(shape, [&](const DeviceMesh& mesh) {
      for (const bool as_view : {true, false}) {
        Mlp plain = seeded_mlp(), net = seeded_mlp();
        split(net, mesh["tp"]);
        DistributedDataParallel ddp(net, {.mesh = mesh["dp"], .gradient_as_bucket_view = as_view});
        torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 4; ++step) {
          plain_optimizer.zero_grad();
          optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
          plain(whole_batch(mesh, step)).square().mean().backward();
          loss_of(ddp(batch_here(mesh, step))).backward();
          expect_gradients_of(plain, *net);
          plain_optimizer.step();
          optimizer.step();
        }
        expect_close(full(net->fc1->weight).detach(), plain->fc1->weight.detach());
      }
    });
  }
}

TEST(DdpOfDTensors, NoSyncAddsUpAndTheNextBackwardSharesTheSum) {
  on_grid({2, 2}, [](const DeviceMesh& mesh) {
    Mlp plain = seeded_mlp(), net = seeded_mlp();
    split(net, mesh["tp"]);
    DistributedDataParallel ddp(net, {.mesh = mesh["dp"]});
    for (int step = 0; step < 4; ++step) {
      plain(whole_batch(mesh, step)).square().mean().backward();
      const auto run = [&] { loss_of(ddp(batch_here(mesh, step))).backward(); };
      if (step % 2 == 1) {
        run();
        continue;
      }
      const auto guard = ddp.no_sync();
      run();
    }
    expect_gradients_of(plain, *net);
  });
}

TEST(DdpOfDTensors, EveryReplicaStartsFromTheFirstOnesParts) {
  on_grid({2, 2}, [](const DeviceMesh& mesh) {
    Mlp first = seeded_mlp(0), net = seeded_mlp(int(mesh.get_local_rank("dp")));
    split(net, mesh["tp"]);
    DistributedDataParallel ddp(net, {.mesh = mesh["dp"]});
    const auto wanted = first->named_parameters();
    for (const auto& item : net->named_parameters()) {
      expect_equal(full(item.value()).detach(), wanted[item.key()].detach(), item.key());
    }
  });
}

TEST(DdpOfDTensors, BucketsAndHooksSeeThisRanksPart) {
  on_grid({2, 2}, [](const DeviceMesh& mesh) {
    Mlp net = seeded_mlp();
    split(net, mesh["tp"]);
    DistributedDataParallel ddp(net, {.mesh = mesh["dp"]});
    int64_t seen = 0;
    ddp.register_comm_hook([&, group = ddp.process_group()](c10d::GradBucket& bucket) {
      for (const at::Tensor& gradient : bucket.getGradients()) seen += gradient.numel();
      std::vector<at::Tensor> tensors = {bucket.getBufferRef().div_(group->getSize())};
      return group->allreduce(tensors)->getFuture();
    });
    loss_of(ddp(batch_here(mesh))).backward();
    const int64_t hidden = mesh.get_local_rank("tp") == 0 ? 4 : 3;
    EXPECT_EQ(seen, hidden * 5 + hidden + 3 * hidden + 3);
    EXPECT_EQ(ddp.reducer().bucket_sizes(), std::to_string(4 * seen));
    Mlp plain = seeded_mlp();
    plain(whole_batch(mesh)).square().mean().backward();
    expect_gradients_of(plain, *net);
  });
}

TEST(DdpOfDTensors, ARankMayHoldNoPart) {
  on_grid({2, 3}, [](const DeviceMesh& mesh) {
    torch::nn::Linear plain = seeded(0, [] { return torch::nn::Linear(5, 2); });
    torch::nn::Linear net = seeded(0, [] { return torch::nn::Linear(5, 2); });
    distribute_parameter(net->weight, mesh["tp"], {Shard(0)});
    distribute_parameter(net->bias, mesh["tp"], {Shard(0)});
    DistributedDataParallel ddp(net, {.mesh = mesh["dp"]});
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      ddp.zero_grad();
      plain(whole_batch(mesh, step)).square().mean().backward();
      loss_of(ddp(batch_here(mesh, step))).backward();
      expect_close(full(net->weight.grad()), plain->weight.grad());
      expect_close(full(net->bias.grad()), plain->bias.grad());
    }
  });
}

struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(const DeviceMesh& tp) {
    weight = register_parameter("weight", distribute_tensor(testing::iota({3}, at::kFloat), tp));
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Scale);

TEST(DdpOfDTensors, AGradientThatIsPartialIsSummedOverItsOwnAxisFirst) {
  on_grid({2, 2}, [](const DeviceMesh& mesh) {
    Scale net(mesh["tp"]);
    DistributedDataParallel ddp(net, {.mesh = mesh["dp"]});
    const at::Tensor x = testing::iota({4, 3}, at::kFloat) + 100 * mesh.get_local_rank("dp");
    const DTensor rows = distribute_tensor(x, mesh["tp"], {Shard(0)}, {.source = std::nullopt});
    full(ddp(rows)).sum().backward();
    EXPECT_EQ(to_string(DTensor(net->weight.grad()).placements()), "R");
    expect_equal(full(net->weight.grad()), (testing::iota({4, 3}, at::kFloat) + 50).sum(0));
  });
}

TEST(DdpOfDTensors, GradientsTakeTheParametersPlacements) {
  testing::on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor value = testing::iota({5, 3});
    const DTensor parameter = distribute_tensor(value, mesh, {Shard(0)});
    for (const char* text : {"P", "R", "S1", "S0"}) {
      const DTensor grad = testing::place(value, mesh, parse_placements(text));
      const at::Tensor part = detail::gradient_part(grad, parameter);
      EXPECT_FALSE(is_dtensor(part));
      expect_close(part, parameter.to_local(), text);
      expect_close(full(detail::as_gradient(part, parameter)), value, text);
    }
    EXPECT_TRUE(detail::gradient_part(value, value).is_same(value));
    EXPECT_TRUE(detail::as_gradient(value, value).is_same(value));
  });
}

TEST(DdpOfDTensors, RanksWithOtherPlacementsAreToldApart) {
  on_grid({2, 2}, [](const DeviceMesh& mesh) {
    Mlp net = seeded_mlp();
    distribute_parameter(net->fc1->weight, mesh["tp"], {Shard(mesh.get_local_rank("dp"))});
    const std::string text =
        error_text<c10::ValueError>([&] { DistributedDataParallel ddp(net, {.mesh = mesh["dp"]}); });
    EXPECT_NE(text.find("the ranks wrap different models: parameter 0 is\n    on rank 0: fc1.weight ["),
              std::string::npos)
        << text;
  });
}

TEST(DdpOfDTensors, AParameterOnTheSameAxisIsAnError) {
  on_grid({2, 2}, [](const DeviceMesh& mesh) {
    Mlp net = seeded_mlp();
    distribute_parameter(net->fc1->weight, mesh, {Replicate(), Shard(0)});
    const std::string text =
        error_text<c10::ValueError>([&] { DistributedDataParallel ddp(net, {.mesh = mesh["dp"]}); });
    EXPECT_EQ(text.substr(0, text.find("\n  at:")),
              "[DistributedDataParallel] fc1.weight is f32[7,5] R S0 on mesh dp=2 tp=2, distributed over ranks of "
              "mesh dp=2 that would average it\n  fix: distribute parameters over another axis than the one given "
              "here, such as mesh[\"tp\"]");
  });
}

}  // namespace
}  // namespace serried::dtensor_parameters_test
