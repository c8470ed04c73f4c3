// Our optimizers on parameters that lie on a mesh, alone and mixed with plain ones.
#include "serried/tensor/making/modules.h"
#include "tests/optim/tape.h"
#include "tests/optim/twins.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::expect_near;
using testing::full;
using testing::gradient;
using testing::on_mesh;
using testing::Tape;
using testing::Tensors;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

// Split unevenly, in both dims, replicated, with nothing for the fourth rank; the last two stay plain.
Tensors make_plain() {
  return {at::arange(35, at::kDouble).view({7, 5}),
          at::arange(18, at::kDouble).view({6, 3}),
          at::ones({3}, at::kDouble),
          at::ones({3, 2}, at::kDouble),
          at::ones({4}, at::kDouble),
          at::ones({2}, at::kDouble)};
}

Placements placements_of(size_t index, const DeviceMesh& mesh) {
  Placements placements(size_t(mesh.ndim()), Replicate());
  if (index == 0 || index == 3) placements.back() = Shard(0);
  if (index == 1) placements.front() = Shard(1);
  return placements;
}

bool is_on_mesh(size_t index) {
  return index < 4;
}

Tensors make_mixed(const DeviceMesh& mesh) {
  Tensors parameters = make_plain();
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].requires_grad_();
    if (is_on_mesh(i)) distribute_parameter(parameters[i], mesh, placements_of(i, mesh));
  }
  return parameters;
}

// Whether gradients come in the placements of their parameters, or every other one in others.
enum class Grads { alike, moved };

// Into the same memory from the second time on.
void give_mixed(const Tensors& parameters, const DeviceMesh& mesh, int step, Grads grads = Grads::moved) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor grad = gradient(parameters[i], step, i);
    if (is_on_mesh(i))
      grad = distribute_tensor(grad, mesh, grads == Grads::moved && i % 2 ? Placements{} : placements_of(i, mesh));
    at::Tensor& slot = parameters[i].mutable_grad();
    if (slot.defined()) {
      slot.copy_(grad);
    } else {
      slot = grad;
    }
  }
}

Tensors all_full(const Tensors& parameters) {
  Tensors values;
  for (const at::Tensor& t : parameters) values.push_back(full(t).detach());
  return values;
}

template <class Stock, class Options>
Tensors train_stock(const Options& options, int num_steps) {
  Tensors parameters = make_plain();
  for (at::Tensor& t : parameters) t.requires_grad_();
  Stock stock(parameters, options);
  for (int step = 0; step < num_steps; ++step) {
    testing::give_gradients(parameters, step);
    stock.step();
  }
  return parameters;
}

using Train = std::function<Tensors(const DeviceMesh&)>;

void compare_on_meshes(const Tensors& expected, const Train& train) {
  for (const Sizes& shape : {Sizes{1}, Sizes{2}, Sizes{4}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const Tensors parameters = train(mesh);
      expect_near(all_full(parameters), expected, 1e-12, c10::str(mesh.size(), " ranks"));
      EXPECT_EQ(DTensor(parameters[0]).placements(), placements_of(0, mesh));
    });
  }
}

template <class Ours, class Stock, class Options>
void compare_mixed(const Options& options) {
  compare_on_meshes(train_stock<Stock>(options, 8), [&](const DeviceMesh& mesh) {
    const Tensors parameters = make_mixed(mesh);
    Ours optimizer(parameters, options);
    for (int step = 0; step < 8; ++step) {
      give_mixed(parameters, mesh, step);
      optimizer.step();
    }
    return parameters;
  });
}

template <class Ours, class Stock, class Options>
void compare_captured(const Options& options) {
  compare_on_meshes(train_stock<Stock>(options, 8), [&](const DeviceMesh& mesh) {
    const Tensors parameters = make_mixed(mesh);
    Ours optimizer(parameters, options);
    Tape tape;
    give_mixed(parameters, mesh, 0, Grads::alike);
    tape.record([&] { optimizer.step(); });
    for (int step = 1; step < 8; ++step) {
      give_mixed(parameters, mesh, step, Grads::alike);
      tape.replay();
    }
    return parameters;
  });
}

TEST(OptimDTensor, MixedParametersTrainAsPlainOnes) {
  compare_mixed<AdamW, torch::optim::AdamW>(AdamWOptions(0.1));
  compare_mixed<Adam, torch::optim::Adam>(AdamOptions(0.1).amsgrad(true).weight_decay(0.1));
  compare_mixed<SGD, torch::optim::SGD>(SGDOptions(0.1));
  compare_mixed<SGD, torch::optim::SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.2).weight_decay(0.1));
}

TEST(OptimDTensor, ReplaysTrainAsPlainSteps) {
  compare_captured<AdamW, torch::optim::AdamW>(AdamWOptions(0.1));
  compare_captured<SGD, torch::optim::SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.2).weight_decay(0.1));
}

// Takes another way than longer dtypes.
TEST(OptimDTensor, SgdTrainsShortDtypesAsPlainOnes) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor start = at::arange(70).view({7, 10}).to(at::kBFloat16);
    const at::Tensor plain = start.clone().requires_grad_();
    const at::Tensor sharded = start.clone().requires_grad_();
    distribute_parameter(sharded, mesh, {Shard(0)});
    const SGDOptions options = SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1);
    SGD first(Tensors{plain}, options);
    SGD second(Tensors{sharded}, options);
    for (int step = 0; step < 5; ++step) {
      plain.mutable_grad() = gradient(plain, step, 0);
      sharded.mutable_grad() = distribute_tensor(plain.grad(), mesh, {Shard(0)});
      first.step();
      second.step();
    }
    EXPECT_TRUE(at::equal(full(sharded), plain));
  });
}

TEST(OptimDTensor, StateLiesAsItsParameter) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const Tensors parameters = make_mixed(mesh);
    AdamW optimizer(parameters);
    give_mixed(parameters, mesh, 0);
    optimizer.step();
    auto& state =
        static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameters[0].unsafeGetTensorImpl()));
    EXPECT_EQ(DTensor(state.exp_avg()).placements(), placements_of(0, mesh));
    EXPECT_EQ(state.exp_avg().sizes(), parameters[0].sizes());
  });
}

// As after loading a checkpoint of plain training.
TEST(OptimDTensor, StateOfPlainTrainingIsDistributedWithItsParameter) {
  const Tensors expected = train_stock<torch::optim::AdamW>(AdamWOptions(0.1), 8);
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    Tensors parameters = make_plain();
    for (at::Tensor& t : parameters) t.requires_grad_();
    AdamW optimizer(parameters, AdamWOptions(0.1));
    for (int step = 0; step < 4; ++step) {
      testing::give_gradients(parameters, step);
      optimizer.step();
    }
    optimizer.zero_grad();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (is_on_mesh(i)) distribute_parameter(parameters[i], mesh, placements_of(i, mesh));
    }
    for (int step = 4; step < 8; ++step) {
      give_mixed(parameters, mesh, step);
      optimizer.step();
    }
    expect_near(all_full(parameters), expected, 1e-12, "distributed midway");
  });
}

}  // namespace
}  // namespace serried
