// What our optimizers refuse, and the text they refuse it with.
#include "serried/base/error.h"
#include "tests/optim/twins.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using testing::Tensors;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

template <class Optimizer, class Options>
std::string text_for(const Options& options) {
  return error_text<c10::ValueError>([&] { Optimizer(Tensors{at::ones(3)}, options); });
}

std::string text(std::string_view where, const std::string& what, const std::string& fix) {
  return format_error({where, what, fix});
}

TEST(OptimErrors, AdamOptionsOutOfRange) {
  EXPECT_EQ(text_for<Adam>(AdamOptions(-1)), text("Adam", "lr is -1", "pass 0 or more"));
  EXPECT_EQ(text_for<AdamW>(AdamWOptions(-1)), text("AdamW", "lr is -1", "pass 0 or more"));
  EXPECT_EQ(text_for<AdamW>(AdamWOptions().eps(-2)), text("AdamW", "eps is -2", "pass 0 or more"));
  EXPECT_EQ(text_for<AdamW>(AdamWOptions().betas({1, 0})),
            text("AdamW", "the first of betas is 1", "pass 0 or more, below 1"));
  EXPECT_EQ(text_for<AdamW>(AdamWOptions().betas({0, 1.5})),
            text("AdamW", "the second of betas is 1.5", "pass 0 or more, below 1"));
  EXPECT_EQ(text_for<AdamW>(AdamWOptions().weight_decay(-0.5)),
            text("AdamW", "weight_decay is -0.5", "pass 0 or more"));
}

TEST(OptimErrors, SgdOptionsOutOfRange) {
  EXPECT_EQ(text_for<SGD>(SGDOptions(-1)), text("SGD", "lr is -1", "pass 0 or more"));
  EXPECT_EQ(text_for<SGD>(SGDOptions(1).momentum(-1)), text("SGD", "momentum is -1", "pass 0 or more"));
  EXPECT_EQ(text_for<SGD>(SGDOptions(1).weight_decay(-1)), text("SGD", "weight_decay is -1", "pass 0 or more"));
  EXPECT_EQ(text_for<SGD>(SGDOptions(1).nesterov(true)),
            text("SGD", "nesterov with momentum 0 and dampening 0", "pass a momentum above 0 and no dampening"));
}

TEST(OptimErrors, OptionsOfAGroupOutOfRange) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{at::ones(3)}, std::make_unique<AdamWOptions>(AdamWOptions().eps(-2)));
  EXPECT_EQ(error_text<c10::ValueError>([&] { AdamW{groups}; }), text("AdamW", "eps is -2", "pass 0 or more"));
}

template <class Optimizer, class Options>
std::string text_of_sparse_step(const Options& options) {
  const at::Tensor w = at::ones({4, 2}).requires_grad_();
  w.mutable_grad() = at::ones({4, 2}).to_sparse();
  Optimizer optimizer(Tensors{w}, options);
  return error_text<c10::ValueError>([&] { optimizer.step(); });
}

TEST(OptimErrors, SparseGradients) {
  EXPECT_EQ(text_of_sparse_step<AdamW>(AdamWOptions()),
            text("AdamW", "a gradient of layout Sparse",
                 "make it dense, e.g. torch::nn::EmbeddingOptions(...).sparse(false), or use serried::SGD"));
  EXPECT_EQ(text_of_sparse_step<SGD>(SGDOptions(1).weight_decay(0.5)),
            text("SGD", "weight_decay 0.5 with a gradient of layout Sparse",
                 "put this parameter into a group of its own without weight decay"));
}

TEST(OptimErrors, AGradientOfAnotherShape) {
  const at::Tensor w = at::ones({4, 2}).requires_grad_();
  w.mutable_grad() = at::ones({8});
  AdamW optimizer(Tensors{w});
  EXPECT_EQ(error_text<c10::ValueError>([&] { optimizer.step(); }),
            text("AdamW", "a gradient of shape [8] for a parameter of shape [4, 2]",
                 "give the gradient the parameter's shape"));
}

TEST(OptimErrors, StateOfAnotherShape) {
  const at::Tensor w = at::ones({4, 2}).requires_grad_();
  w.mutable_grad() = at::ones({4, 2});
  SGD optimizer(Tensors{w}, SGDOptions(0.1).momentum(0.9));
  auto state = std::make_unique<torch::optim::SGDParamState>();
  state->momentum_buffer(at::ones({3}));
  optimizer.state()[w.unsafeGetTensorImpl()] = std::move(state);
  EXPECT_EQ(error_text<c10::ValueError>([&] { optimizer.step(); }),
            text("SGD", "the state \"momentum_buffer\" has shape [3], its parameter [4, 2]",
                 "load a checkpoint of the same model, or erase this parameter's state()"));
}

}  // namespace
}  // namespace serried
