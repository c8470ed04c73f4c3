// Stock optimizers on parameters that were converted in place, against plain training.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::expect_close;
using testing::full;
using testing::on_mesh;
using testing::usual_meshes;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(5, 7));
    down = register_module("down", torch::nn::Linear(7, 3));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

// Column then row: the hidden dim is cut along the last axis, the batch along the first of two.
void distribute(Mlp& net, const DeviceMesh& mesh) {
  const auto on_last = [&](Placement placement) {
    Placements placements(size_t(mesh.ndim()), Replicate());
    placements.back() = placement;
    return placements;
  };
  distribute_parameter(net->up->weight, mesh, on_last(Shard(0)));
  distribute_parameter(net->up->bias, mesh, on_last(Shard(0)));
  distribute_parameter(net->down->weight, mesh, on_last(Shard(1)));
  distribute_parameter(net->down->bias, mesh);
}

DTensor batch(const at::Tensor& x, const DeviceMesh& mesh) {
  Placements placements(size_t(mesh.ndim()), Replicate());
  if (mesh.ndim() > 1) placements.front() = Shard(0);
  return distribute_tensor(x, mesh, placements);
}

template <class Step>
std::vector<at::Tensor> train(Mlp net, const at::Tensor& x, const at::Tensor& y, const Step& step) {
  for (int i = 0; i < 4; ++i) {
    net->zero_grad();
    torch::mse_loss(net(x), y).backward();
    step();
  }
  std::vector<at::Tensor> values;
  for (const at::Tensor& p : net->parameters()) values.push_back(full(p).detach().clone());
  return values;
}

enum class State { made_in_steps, made_at_once };

// `make` gives a step function for a list of parameters. It is called before the parameters change, unless the
// optimizer makes its state at once.
template <class Make>
void compare(const std::string& name, const Make& make, State state = State::made_in_steps) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const auto [x, y] = seeded(5, [] {
        return std::make_pair(at::randn({5, 5}, at::kDouble), at::randn({5, 3}, at::kDouble));
      });
      Mlp plain = seeded(1, [] { return Mlp(); });
      Mlp net = seeded(1, [] { return Mlp(); });
      if (state == State::made_at_once) distribute(net, mesh);
      const auto step = make(net->parameters());
      if (state == State::made_in_steps) distribute(net, mesh);
      const std::vector<at::Tensor> expected = train(plain, x, y, make(plain->parameters()));
      const std::vector<at::Tensor> actual = train(net, batch(x, mesh), batch(y, mesh), step);
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_close(actual[i], expected[i], name + ", parameter " + std::to_string(i));
      }
      EXPECT_EQ(DTensor(net->up->weight).placements().back(), Shard(0)) << "placements do not drift";
    });
  }
}

template <class Optimizer, class Options>
auto stock(Options options) {
  return [options](const std::vector<at::Tensor>& parameters) {
    auto optimizer = std::make_shared<Optimizer>(parameters, options);
    return [optimizer] { optimizer->step(); };
  };
}

TEST(Optim, SgdTrainsLikePlain) {
  compare("SGD", stock<torch::optim::SGD>(torch::optim::SGDOptions(0.1)));
  compare("momentum",
          stock<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)));
}

TEST(Optim, AdamTrainsLikePlain) {
  compare("Adam", stock<torch::optim::Adam>(torch::optim::AdamOptions(0.05)));
  compare("amsgrad", stock<torch::optim::Adam>(torch::optim::AdamOptions(0.05).amsgrad(true).weight_decay(0.1)));
}

TEST(Optim, AdamWTrainsLikePlain) {
  compare("AdamW", stock<torch::optim::AdamW>(torch::optim::AdamWOptions(0.05)));
}

TEST(Optim, AdagradTrainsLikePlain) {
  compare("Adagrad", stock<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05)), State::made_at_once);
}

TEST(Optim, RmspropTrainsLikePlain) {
  compare("RMSprop", stock<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true)));
}

TEST(Optim, ForeachSgdTrainsLikePlain) {
  compare("foreach", [](const std::vector<at::Tensor>& parameters) {
    return [parameters] {
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> grads;
      for (const at::Tensor& p : parameters) grads.push_back(p.grad());
      const std::vector<at::Tensor> decayed = at::_foreach_add(grads, parameters, 0.01);
      at::_foreach_add_(parameters, decayed, -0.1);
    };
  });
}

TEST(Optim, FusedAdamWTrainsLikePlain) {
  compare("fused AdamW", [](const std::vector<at::Tensor>& parameters) {
    struct State {
      std::vector<at::Tensor> means, squares, steps;
    };
    auto state = std::make_shared<State>();
    return [parameters, state] {
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> grads;
      for (const at::Tensor& p : parameters) {
        grads.push_back(p.grad());
        if (state->steps.size() == parameters.size()) continue;
        state->means.push_back(at::zeros_like(p));
        state->squares.push_back(at::zeros_like(p));
        state->steps.push_back(at::zeros({}, at::kFloat));
      }
      at::_foreach_add_(state->steps, 1);
      at::_fused_adamw_(parameters, grads, state->means, state->squares, {}, state->steps, 0.05, 0.9, 0.999, 0.01, 1e-8,
                        false, false);
    };
  });
}

TEST(Optim, ClippingTheNormIsThatOfTheWhole) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = seeded(5, [] { return at::randn({5, 5}, at::kDouble); });
    Mlp plain = seeded(1, [] { return Mlp(); });
    Mlp net = seeded(1, [] { return Mlp(); });
    distribute(net, mesh);
    plain(x).pow(2).sum().backward();
    net(batch(x, mesh)).pow(2).sum().backward();
    const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1.0);
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0), expected, 1e-9);
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      expect_close(full(net->parameters()[i].grad()), plain->parameters()[i].grad(), std::to_string(i));
    }
  });
}

}  // namespace
}  // namespace serried
