// Checkpoints: ours load into LibTorch's optimizers, and theirs into ours.
#include <sstream>

#include "tests/optim/twins.h"

namespace serried {
namespace {

using testing::expect_near;
using testing::give_gradients;
using testing::make_parameters;
using testing::Tensors;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

template <class Optimizer>
void train(const Tensors& parameters, Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    give_gradients(parameters, step);
    optimizer.step();
  }
}

Tensors copies(const Tensors& parameters) {
  Tensors copied;
  for (const at::Tensor& t : parameters) copied.push_back(t.detach().clone().requires_grad_());
  return copied;
}

// Ten steps with a `First`, then ten with a `Second` that continues; 20 of LibTorch's own are what is expected.
template <class Stock, class First, class Second, class Options>
void compare_continued(const Options& options) {
  const Tensors expected = make_parameters(at::kDouble);
  Stock whole(expected, options);
  train(expected, whole, 0, 20);

  const Tensors before = make_parameters(at::kDouble);
  First first(before, options);
  train(before, first, 0, 10);
  std::stringstream file;
  torch::save(first, file);

  const Tensors after = copies(before);
  Second second(after, Options(123));
  train(after, second, 50, 52);  // what it has of its own is replaced
  for (size_t i = 0; i < after.size(); ++i) after[i].detach().copy_(before[i].detach());
  torch::load(second, file);
  train(after, second, 10, 20);
  expect_near(after, expected, 1e-12, "continued");
}

template <class Stock, class Ours, class Options>
void compare_all(const Options& options) {
  compare_continued<Stock, Ours, Ours>(options);
  compare_continued<Stock, Stock, Ours>(options);
  compare_continued<Stock, Ours, Stock>(options);
}

TEST(OptimCheckpoint, LoadsInOursAndInStock) {
  compare_all<torch::optim::Adam, Adam>(AdamOptions(0.01).amsgrad(true));
  compare_all<torch::optim::AdamW, AdamW>(AdamWOptions(0.01));
  compare_all<torch::optim::SGD, SGD>(SGDOptions(0.01).momentum(0.9).dampening(0.2));
}

}  // namespace
}  // namespace serried
