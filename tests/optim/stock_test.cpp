// Our optimizers against LibTorch's: the same numbers over 50 steps with all options.
#include "tests/optim/twins.h"

namespace serried {
namespace {

using testing::expect_near;
using testing::give_gradients;
using testing::gradient;
using testing::make_parameters;
using testing::Tensors;
using testing::tolerance_of;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

constexpr int kSteps = 50;

// LibTorch's rounds after every op, ours only what it stores: for short dtypes the reference computes in double and
// rounds what a step leaves.
at::ScalarType reference_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kDouble : dtype;
}

void round_to(at::ScalarType dtype, const Tensors& tensors) {
  for (const at::Tensor& t : tensors) {
    if (t.defined()) t.detach().copy_(t.detach().to(dtype));
  }
}

void round_state(at::ScalarType dtype, torch::optim::OptimizerParamState& base) {
  if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&base)) {
    round_to(dtype, {adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq()});
  }
  if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(&base)) {
    round_to(dtype, {adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq()});
  }
  if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(&base)) round_to(dtype, {sgd->momentum_buffer()});
}

Tensors copies_as(const Tensors& parameters, at::ScalarType dtype) {
  Tensors copies;
  for (const at::Tensor& t : parameters) copies.push_back(t.detach().to(dtype, false, /*copy=*/true).requires_grad_());
  return copies;
}

template <class Ours, class Stock, class Options>
void compare(const std::string& what, const Options& options, at::ScalarType dtype = at::kDouble) {
  at::set_num_threads(1);  // fused kernels split even tiny tensors, and threads wait long on a busy machine
  const Tensors actual = make_parameters(dtype);
  const Tensors expected = copies_as(actual, reference_dtype(dtype));
  Ours ours(actual, options);
  Stock stock(expected, options);
  for (int step = 0; step < kSteps; ++step) {
    give_gradients(actual, step);
    for (size_t i = 0; i < actual.size(); ++i) {
      expected[i].mutable_grad() = actual[i].grad().to(expected[i].scalar_type(), false, /*copy=*/true);
    }
    ours.step();
    stock.step();
    round_to(dtype, expected);
    for (const auto& entry : stock.state()) round_state(dtype, *entry.second);
  }
  expect_near(copies_as(actual, reference_dtype(dtype)), expected, tolerance_of(dtype),
              c10::str(what, " ", c10::toString(dtype)));
}

template <class Ours, class Stock, class Options>
void compare_adam() {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    compare<Ours, Stock>("default", Options(0.01), dtype);
    compare<Ours, Stock>("decay", Options(0.01).weight_decay(0.3), dtype);
    compare<Ours, Stock>("no decay", Options(0.01).weight_decay(0), dtype);
    compare<Ours, Stock>("amsgrad", Options(0.01).amsgrad(true), dtype);
    compare<Ours, Stock>("amsgrad, decay", Options(0.01).amsgrad(true).weight_decay(0.2), dtype);
    compare<Ours, Stock>("betas, eps", Options(0.01).betas({0.5, 0.6}).eps(1e-3), dtype);
    compare<Ours, Stock>("zero betas", Options(0.01).betas({0, 0}), dtype);
  }
}

TEST(StockOptim, AdamGivesTheSameNumbers) {
  compare_adam<Adam, torch::optim::Adam, AdamOptions>();
}

TEST(StockOptim, AdamWGivesTheSameNumbers) {
  compare_adam<AdamW, torch::optim::AdamW, AdamWOptions>();
}

// parameters() lists a tied weight once for each module that has it.
template <class Ours, class Stock, class Options>
void compare_repeated(const Options& options) {
  at::Tensor actual = at::ones({3}, at::kDouble).requires_grad_(),
             expected = at::ones({3}, at::kDouble).requires_grad_();
  Ours ours({actual, actual}, options);
  Stock stock({expected, expected}, options);
  auto step = capture([&] {
    ours.zero_grad();
    actual.square().sum().backward();
    ours.step();
  });
  for (int i = 0; i < 6; ++i) {
    step();
    stock.zero_grad();
    expected.square().sum().backward();
    stock.step();
    EXPECT_LE((actual - expected).abs().max().template item<double>(), 1e-12) << "step " << i;
  }
  EXPECT_GT(step.replays(), 0);
}

TEST(StockOptim, AParameterThatIsListedTwiceStepsTwice) {
  compare_repeated<AdamW, torch::optim::AdamW>(AdamWOptions(0.1));
  compare_repeated<Adam, torch::optim::Adam>(AdamOptions(0.1));
  compare_repeated<SGD, torch::optim::SGD>(SGDOptions(0.1).momentum(0.9));
}

TEST(StockOptim, SgdGivesTheSameNumbers) {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kComplexDouble}) {
    const auto check = [&](const std::string& what, const SGDOptions& options) {
      compare<SGD, torch::optim::SGD>(what, options, dtype);
    };
    check("default", SGDOptions(0.01));
    check("decay", SGDOptions(0.01).weight_decay(0.3));
    check("momentum", SGDOptions(0.01).momentum(0.9));
    check("dampening", SGDOptions(0.01).momentum(0.9).dampening(0.4));
    check("dampening, decay", SGDOptions(0.01).momentum(0.7).dampening(0.4).weight_decay(0.2));
    check("nesterov", SGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.1));
  }
}

// Python's definition: LibTorch's C++ Adam squares complex numbers.
TEST(StockOptim, AdamTakesAComplexParameterAsPairsOfRealOnes) {
  const Tensors complex = make_parameters(at::kComplexDouble);
  Tensors real;
  for (const at::Tensor& t : complex) real.push_back(at::view_as_real(t.detach()).clone().requires_grad_());
  Adam ours(complex, AdamOptions(0.01).amsgrad(true));
  torch::optim::Adam stock(real, AdamOptions(0.01).amsgrad(true));
  for (int step = 0; step < kSteps; ++step) {
    give_gradients(complex, step);
    for (size_t i = 0; i < real.size(); ++i) real[i].mutable_grad() = at::view_as_real(complex[i].grad()).clone();
    ours.step();
    stock.step();
  }
  Tensors actual;
  for (const at::Tensor& t : complex) actual.push_back(at::view_as_real(t.detach()));
  expect_near(actual, real, 1e-12, "complex");
}

// Parameters join and leave: some always have gradients, some in every third step, some never.
template <class Ours, class Stock, class Options>
void compare_partial(const Options& options) {
  const Tensors actual = make_parameters(at::kDouble);
  const Tensors expected = make_parameters(at::kDouble);
  Ours ours(actual, options);
  Stock stock(expected, options);
  for (int step = 0; step < kSteps; ++step) {
    for (const Tensors& parameters : {actual, expected}) {
      give_gradients(parameters, step);
      if (step % 3 != 0) parameters[0].mutable_grad().reset();
      if (step < 7) parameters[2].mutable_grad().reset();
      parameters[4].mutable_grad().reset();
    }
    ours.step();
    stock.step();
  }
  expect_near(actual, expected, 1e-12, "some gradients");
  EXPECT_EQ(ours.state().count(actual[4].unsafeGetTensorImpl()), 0u) << "no state without a step";
}

TEST(StockOptim, ParametersWithoutGradientsAreLeftAlone) {
  compare_partial<Adam, torch::optim::Adam>(AdamOptions(0.01));
  compare_partial<AdamW, torch::optim::AdamW>(AdamWOptions(0.01));
  compare_partial<SGD, torch::optim::SGD>(SGDOptions(0.01).momentum(0.9).dampening(0.1));
}

TEST(StockOptim, StepCountsAreThoseOfEachParameter) {
  const Tensors parameters = make_parameters(at::kFloat);
  AdamW optimizer(parameters, AdamWOptions(0.01));
  for (int step = 0; step < 6; ++step) {
    give_gradients(parameters, step);
    if (step % 2 == 0) parameters[1].mutable_grad().reset();
    optimizer.step();
  }
  const auto steps_of = [&](size_t i) {
    auto& state = *optimizer.state().at(parameters[i].unsafeGetTensorImpl());
    return static_cast<torch::optim::AdamWParamState&>(state).step();
  };
  EXPECT_EQ(steps_of(0), 6);
  EXPECT_EQ(steps_of(1), 3);
}

template <class Options>
std::vector<OptimizerParamGroup> two_groups(const Tensors& parameters, const Options& second) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors(parameters.begin(), parameters.begin() + 2));
  groups.emplace_back(Tensors(parameters.begin() + 2, parameters.end() - 1), std::make_unique<Options>(second));
  return groups;
}

// With a third group that is added later and a scheduler that changes all rates.
template <class Ours, class Stock, class Options>
void compare_groups(const Options& defaults, const Options& second) {
  const Tensors actual = make_parameters(at::kDouble);
  const Tensors expected = make_parameters(at::kDouble);
  Ours ours(two_groups(actual, second), defaults);
  Stock stock(two_groups(expected, second), defaults);
  ours.add_param_group(OptimizerParamGroup({actual.back()}));
  stock.add_param_group(OptimizerParamGroup({expected.back()}));
  torch::optim::StepLR our_schedule(ours, 5, 0.7);
  torch::optim::StepLR stock_schedule(stock, 5, 0.7);
  for (int step = 0; step < kSteps; ++step) {
    give_gradients(actual, step);
    give_gradients(expected, step);
    ours.step();
    stock.step();
    our_schedule.step();
    stock_schedule.step();
  }
  expect_near(actual, expected, 1e-12, "groups");
}

TEST(StockOptim, GroupsAndSchedulersWork) {
  compare_groups<Adam, torch::optim::Adam>(AdamOptions(0.01), AdamOptions(0.3).weight_decay(0.2));
  compare_groups<AdamW, torch::optim::AdamW>(AdamWOptions(0.01), AdamWOptions(0.3).betas({0.8, 0.9}));
  compare_groups<SGD, torch::optim::SGD>(SGDOptions(0.01), SGDOptions(0.3).momentum(0.2));
}

TEST(StockOptim, ReduceOnPlateauLowersTheRateOfTheNextStep) {
  const Tensors parameters = {at::ones({3}).requires_grad_()};
  SGD optimizer(parameters, SGDOptions(0.5));
  torch::optim::ReduceLROnPlateauScheduler schedule(optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.5, 0);
  schedule.step(1.f);
  schedule.step(2.f);
  parameters[0].mutable_grad() = at::ones({3});
  optimizer.step();
  expect_near(parameters, {at::full({3}, 0.75)}, 1e-6, "half the rate");
}

TEST(StockOptim, StepReturnsTheLossOfItsClosure) {
  const at::Tensor w = at::ones({3}).requires_grad_();
  SGD optimizer(Tensors{w}, SGDOptions(0.5));
  const at::Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    const at::Tensor sum = (w * w).sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_EQ(w.sum().item<float>(), 0);
}

// Transposed, with gaps, and with gradients that lie otherwise.
TEST(StockOptim, ParametersMayLieInAnyOrder) {
  const auto make = [] {
    return Tensors{at::arange(12, at::kDouble).view({3, 4}).t().detach().requires_grad_(),
                   at::arange(24, at::kDouble).view({4, 6}).slice(1, 0, 6, 2).detach().requires_grad_()};
  };
  const Tensors actual = make();
  const Tensors expected = make();
  AdamW ours(actual, AdamWOptions(0.01));
  torch::optim::AdamW stock(expected, AdamWOptions(0.01));
  for (int step = 0; step < kSteps; ++step) {
    for (const Tensors& parameters : {actual, expected}) give_gradients(parameters, step);
    if (step % 2 == 0) actual[0].mutable_grad() = actual[0].grad().t().contiguous().t();
    ours.step();
    stock.step();
  }
  expect_near(actual, expected, 1e-12, "strides");
}

TEST(StockOptim, SgdTakesSparseGradients) {
  for (const SGDOptions& options :
       {SGDOptions(0.1), SGDOptions(0.1).momentum(0.9).dampening(0.3), SGDOptions(0.1).momentum(0.9).nesterov(true)}) {
    const Tensors actual = {at::ones({5, 3}, at::kDouble).requires_grad_()};
    const Tensors expected = {at::ones({5, 3}, at::kDouble).requires_grad_()};
    SGD ours(actual, options);
    torch::optim::SGD stock(expected, options);
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor rows = torch::tensor({{step % 5, 2, 2}}, at::kLong);
      const at::Tensor values = gradient(at::empty({3, 3}, at::kDouble), step, 0);
      for (const at::Tensor& t : {actual[0], expected[0]}) {
        t.mutable_grad() = at::sparse_coo_tensor(rows, values.clone(), {5, 3}, at::TensorOptions(at::kDouble));
      }
      ours.step();
      stock.step();
    }
    expect_near(actual, expected, 1e-12, "sparse");
  }
}

TEST(StockOptim, AutogradNoticesThatAParameterChanged) {
  const at::Tensor w = at::ones({3}).requires_grad_();
  w.mutable_grad() = at::ones({3});
  const at::Tensor loss = (w * w).sum();
  AdamW(Tensors{w}, AdamWOptions(0.1)).step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

}  // namespace
}  // namespace serried
