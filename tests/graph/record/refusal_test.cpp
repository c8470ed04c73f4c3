// What cannot be captured is refused with its reason, and what is called wrongly says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/objects.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/tape/tape.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using graph::CaptureError;
using graph::CaptureErrorKind;
using testing::error_text;
using ::testing::HasSubstr;

/// The report of the refusal within the first calls; the test fails where there is none.
template <class Step, class... Args>
CaptureError::Report refusal(Step& step, const Args&... args) {
  for (int i = 0; i < 6; ++i) {
    try {
      step(args...);
    } catch (const CaptureError& error) {
      return error.report();
    }
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

at::Tensor ones() {
  return torch::ones({3});
}

TEST(CaptureRefusal, NamesTheHostReadThatFeedsTheGraph) {
  at::Tensor state = torch::ones({1});
  auto step = capture([&](const at::Tensor& x) {
    state.add_(1);
    return x * state.item<double>();
  });
  const CaptureError::Report report = refusal(step, ones());
  EXPECT_EQ(report.kind, CaptureErrorKind::host_read);
  EXPECT_EQ(report.op, "aten::_local_scalar_dense");
  EXPECT_THAT(report.explanation, HasSubstr("3.0 in one call and 4.0 in the next"));
  EXPECT_THAT(report.line, HasSubstr("mul("));
  EXPECT_FALSE(report.hints.empty());
}

// Attention of torch::nn compares its arguments: that is no read of a number.
TEST(CaptureRefusal, DoesNotBlameAComparisonForANumber) {
  int calls = 0;
  auto scaled = capture([&](const at::Tensor& x) { return torch::equal(x, x) ? x * ++calls : x; });
  EXPECT_EQ(refusal(scaled, ones()).kind, CaptureErrorKind::changing_scalar);
}

TEST(CaptureRefusal, ANumberReadForTheLogIsWarnedOfOnce) {
  std::vector<double> logged;
  auto step = capture([&](const at::Tensor& x) {
    const at::Tensor loss = x.mul(3).sum();
    logged.push_back(loss.item<double>());
    return loss;
  });
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 6; ++i) EXPECT_EQ(step(ones() * i).item<double>(), 9. * i);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_GT(step.replays(), 0);
  EXPECT_EQ(logged.size(), 6 - step.replays());
  const std::string warning =
      "[capture] the function reads a tensor on the host (aten::_local_scalar_dense, which item() calls); replays do "
      "not, so what it read stays that of the recording\n"
      "  after: %2 = sum(%1)  # f32[]\n"
      "  fix: return the tensor, and read it outside of the captured function\n";
  EXPECT_THAT(text, HasSubstr(warning));
  EXPECT_EQ(text.find("warning] "), text.rfind("warning] ")) << text;
}

TEST(CaptureRefusal, ALearningRateThatIsAConstantIsWarnedOfUnlessItIsWatched) {
  const at::Tensor weight = ones().requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  const auto train = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    const at::Tensor loss = (weight * x).sum();
    loss.backward();
    optimizer.step();
    return loss.detach();
  };
  auto listed = capture(train, {.optimizers = {&optimizer}});
  auto unlisted = capture(train);
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 4; ++i) listed(ones());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 4; ++i) unlisted(ones());
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("[capture] a learning rate is a constant of the graph: replays step by it whatever a "
                              "scheduler has set since\n  in:  "));
  EXPECT_THAT(text, HasSubstr("alpha=-0.5"));
  EXPECT_THAT(text, HasSubstr("\n  fix: use serried::SGD, whose rate lies in a tensor, or list the optimizer: "
                              "capture(fn, {.optimizers = {&optimizer}})"));
}

TEST(CaptureRefusal, WhatReadsNoDataIsNotWarnedOf) {
  auto step = capture([&](const at::Tensor& x) { return x.is_same_size(ones()) && x.dim() == 1 ? x * 2 : x; });
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 6; ++i) step(ones());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_GT(step.replays(), 0);
}

TEST(CaptureRefusal, NamesAScalarThatChanges) {
  double scale = 1;
  auto step = capture([&](const at::Tensor& x) { return at::clamp_max(x, scale += 0.5); });
  const CaptureError::Report report = refusal(step, ones());
  EXPECT_EQ(report.kind, CaptureErrorKind::changing_scalar);
  EXPECT_EQ(report.op, "aten::clamp_max");
  EXPECT_THAT(report.explanation, HasSubstr("argument \"max\" of aten::clamp_max was 2.0 in one call and 2.5"));
}

TEST(CaptureRefusal, NamesAFactorOfAReductionThatChanges) {
  run_ranks(2, [](const Group& group) {
    double factor = 1;
    auto step = capture([&](const at::Tensor& x) { return all_reduce(x, group, c10d::makePreMulSum(factor *= 2)); });
    const CaptureError::Report report = refusal(step, ones());
    EXPECT_EQ(report.kind, CaptureErrorKind::changing_scalar);
    EXPECT_THAT(report.explanation, HasSubstr("premul_sum(4.0) in one call and premul_sum(8.0) in the next"));
  });
}

TEST(CaptureRefusal, NamesATensorMadeOnTheHost) {
  float value = 1;
  auto step = capture([&](const at::Tensor& x) {
    at::Tensor filled = torch::empty({3});
    for (int i = 0; i < 3; ++i) filled.data_ptr<float>()[i] = value += 1;
    return x + filled;
  });
  const CaptureError::Report report = refusal(step, ones());
  EXPECT_EQ(report.kind, CaptureErrorKind::off_tape_tensor);
  EXPECT_THAT(report.explanation, HasSubstr("made without an op"));
}

TEST(CaptureRefusal, AHostTensorThatStaysIsAConstant) {
  auto step = capture([&](const at::Tensor& x) {
    at::Tensor filled = torch::empty({3});
    for (int i = 0; i < 3; ++i) filled.data_ptr<float>()[i] = float(i + 1);
    return x + filled;
  });
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(at::equal(step(ones() * i), torch::tensor({1.f + i, 2.f + i, 3.f + i})));
  EXPECT_EQ(step.replays(), 2);
}

TEST(CaptureRefusal, AConstantThatTheFunctionWritesStartsAnewEachTime) {
  auto step = capture([&](const at::Tensor& x) { return torch::tensor({1.f, 2.f, 3.f}).add_(x); });
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(at::equal(step(ones()), torch::tensor({2.f, 3.f, 4.f})));
  EXPECT_EQ(step.replays(), 3);
}

TEST(CaptureRefusal, NamesAShapeThatDependsOnData) {
  auto step = capture([&](const at::Tensor& x) { return x.masked_select(x > 0); });
  const CaptureError::Report report = refusal(step, ones());
  EXPECT_EQ(report.kind, CaptureErrorKind::data_dependent_shape);
  EXPECT_EQ(report.op, "aten::masked_select");
}

TEST(CaptureRefusal, AFunctionWithAShapeThatDependsOnDataMayRunEagerly) {
  int ends = 0;
  auto step = capture(
      [&](const at::Tensor& x) {
        at::Tensor positive = x.masked_select(x > 0);
        ++ends;
        return positive;
      },
      {.when_refused = WhenRefused::run_eager});
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(at::equal(step(torch::arange(i)), torch::arange(i).slice(0, 1)));
  EXPECT_EQ(ends, 5);
}

TEST(CaptureRefusal, AMaskAsIndexIsAShapeThatDependsOnData) {
  auto step = capture([&](const at::Tensor& x) { return x.index({x > 0}); });
  EXPECT_EQ(refusal(step, ones()).kind, CaptureErrorKind::data_dependent_shape);
}

TEST(CaptureRefusal, AnIndexOfNumbersIsFine) {
  auto step = capture([&](const at::Tensor& x, const at::Tensor& i) { return x.index({i}); });
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(at::equal(step(torch::arange(4), torch::tensor({i % 4, 1})), torch::tensor({i % 4, 1})));
  }
  EXPECT_EQ(step.replays(), 2);
}

TEST(CaptureRefusal, NamesAFunctionThatRunsOtherOpsEachTime) {
  int calls = 0;
  auto step = capture([&](const at::Tensor& x) { return ++calls % 2 ? x.sin() : x.cos(); });
  const CaptureError::Report report = refusal(step, ones());
  EXPECT_EQ(report.kind, CaptureErrorKind::different_program);
  EXPECT_THAT(report.explanation, HasSubstr("sin("));
  EXPECT_THAT(report.explanation, HasSubstr("cos("));
}

// What differs may also be the gradients that it finds.
TEST(CaptureRefusal, OtherOpsAroundABackwardMentionGradients) {
  const at::Tensor weight = ones().requires_grad_();
  int calls = 0;
  auto step = capture([&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    const at::Tensor y = weight * x;
    (++calls % 2 == 0 ? y.sum() : y.mean()).backward();
  });
  const CaptureError::Report report = refusal(step, ones());
  EXPECT_EQ(report.kind, CaptureErrorKind::different_program);
  EXPECT_EQ(report.explanation,
            "the function runs other ops each time: line 1 was \"%3 = sum(%2)  # f32[]\" and then \"%3 = mean(%2)  # "
            "f32[]\"");
  EXPECT_EQ(report.hints, (std::vector<std::string>{
                              "let it do the same at every call: no branch on a counter or on data",
                              "let it find gradients in one state: zero them in one way, best by zero_grad() inside"}));
}

TEST(CaptureRefusal, AResultThatNeedsBackwardIsRefused) {
  const at::Tensor weight = torch::ones({3}, at::requires_grad());
  auto step = capture([&](const at::Tensor& x) { return (x * weight).sum(); });
  const CaptureError::Report report = refusal(step, ones());
  EXPECT_EQ(report.kind, CaptureErrorKind::pending_gradient);
  EXPECT_THAT(report.explanation, HasSubstr("calls no backward"));
}

TEST(CaptureRefusal, StockAdamSaysWhichOptimizerToUse) {
  torch::nn::Linear net(3, 2);
  torch::optim::AdamW optimizer(net->parameters());
  auto step = capture([&](const at::Tensor& x) {
    optimizer.zero_grad();
    at::Tensor loss = net(x).square().sum();
    loss.backward();
    optimizer.step();
    return loss;
  });
  try {
    for (int i = 0; i < 5; ++i) step(torch::ones({2, 3}));
    FAIL() << "torch::optim::AdamW was captured";
  } catch (const c10::NotImplementedError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("use serried::AdamW"));
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("changing scalar"));
  }
}

TEST(CaptureRefusal, AdagradSaysWhatToKeepFixed) {
  torch::nn::Linear net(3, 2);
  torch::optim::Adagrad optimizer(net->parameters(), torch::optim::AdagradOptions(0.1).lr_decay(0.1));
  auto step = capture([&](const at::Tensor& x) {
    optimizer.zero_grad();
    net(x).square().sum().backward();
    optimizer.step();
  });
  const CaptureError::Report report = refusal(step, torch::ones({2, 3}));
  EXPECT_EQ(report.kind, CaptureErrorKind::changing_scalar);
  EXPECT_THAT(report.hints.at(0), HasSubstr("Adagrad: lr_decay = 0"));
}

TEST(CaptureRefusal, NamesTensorsThatAreNotInStridedMemory) {
  struct Case {
    const char* form;
    at::Tensor (*fn)(const at::Tensor&);
  };
  const Case cases[] = {
      {"of layout Sparse", [](const at::Tensor& x) { return x.to_sparse(); }},
      {"of layout Sparse", [](const at::Tensor& x) { return at::_sparse_mm(x.to_sparse(), x.t()); }},
      {"of layout SparseCsr", [](const at::Tensor& x) { return x.to_sparse_csr().to_dense(); }},
      {"of layout Mkldnn", [](const at::Tensor& x) { return x.to_mkldnn().to_dense(); }},
      {"a quantized tensor",
       [](const at::Tensor& x) { return at::quantize_per_tensor(x, 0.1, 10, at::kQInt8).dequantize(); }},
      {"a nested tensor",
       [](const at::Tensor& x) {
         return at::_nested_tensor_from_tensor_list({x, x}).to_padded_tensor(0);
       }},
  };
  for (const Case& each : cases) {
    auto step = capture(each.fn);
    const CaptureError::Report report = refusal(step, torch::ones({4, 5}));
    EXPECT_EQ(report.kind, CaptureErrorKind::unsupported);
    EXPECT_THAT(report.op, HasSubstr("aten::"));
    EXPECT_THAT(report.explanation, HasSubstr(each.form));
    EXPECT_THAT(report.explanation, HasSubstr("a graph holds tensors in strided memory only"));
    EXPECT_FALSE(report.hints.empty());
  }
}

TEST(CaptureRefusal, NamesASparseTensorFromOutside) {
  const at::Tensor eye = torch::eye(3).to_sparse();
  auto used = capture([&](const at::Tensor& x) { return at::_sparse_mm(eye, x); });
  EXPECT_THAT(refusal(used, torch::ones({3, 2})).explanation,
              HasSubstr("an operand of aten::_sparse_addmm is a tensor"));
  auto returned = capture([&](const at::Tensor&) { return eye; });
  EXPECT_THAT(refusal(returned, ones()).explanation, HasSubstr("[3, 3] of layout Sparse"));
  auto given = capture([](const at::Tensor& x) { return x.to_dense(); });
  EXPECT_THAT(refusal(given, eye).explanation, HasSubstr("an argument of the function is a tensor [3, 3]"));
}

TEST(CaptureRefusal, NamesSparseGradients) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(7, 3).sparse(true));
  auto step = capture([&](const at::Tensor& i) {
    table->zero_grad();
    table(i).sum().backward();
  });
  const CaptureError::Report report = refusal(step, torch::tensor({1, 4, 1}));
  EXPECT_EQ(report.kind, CaptureErrorKind::unsupported);
  EXPECT_THAT(report.hints.at(0), HasSubstr("Embedding without sparse gradients"));
}

TEST(CaptureRefusal, NamesArgumentsThatAreLazyViews) {
  const at::Tensor z = torch::ones({3}, at::kComplexFloat);
  auto step = capture([](const at::Tensor& x) { return x * 2; });
  const CaptureError::Report conjugate = refusal(step, z.conj());
  EXPECT_EQ(conjugate.kind, CaptureErrorKind::unsupported);
  EXPECT_THAT(conjugate.explanation, HasSubstr("[3] is a conjugate view"));
  EXPECT_EQ(conjugate.hints, std::vector<std::string>{"pass t.resolve_conj()"});
  EXPECT_EQ(refusal(step, at::imag(z.conj())).hints, std::vector<std::string>{"pass t.resolve_neg()"});
}

TEST(CaptureRefusal, MayRunEagerlyInstead) {
  double scale = 1;
  auto step = capture([&](const at::Tensor& x) { return at::clamp_max(x * 10, scale += 0.5); },
                      {.when_refused = WhenRefused::run_eager});
  for (int i = 1; i < 8; ++i) EXPECT_TRUE(at::equal(step(ones()), ones() * (1 + 0.5 * i)));
  EXPECT_EQ(step.replays(), 0);
}

TEST(CaptureRefusal, ARefusedStepHasBeenTaken) {
  at::Tensor state = torch::zeros({1});
  double one = 1;
  auto step = capture([&](const at::Tensor& x) {
    state.add_(1);
    return at::clamp_max(x, one += 1);
  });
  int calls = 0;
  bool is_refused = false;
  while (!is_refused && calls < 6) {
    ++calls;
    try {
      step(ones());
    } catch (const CaptureError&) {
      is_refused = true;
    }
  }
  EXPECT_TRUE(is_refused);
  EXPECT_EQ(state.item<int>(), calls);
}

TEST(CaptureMisuse, AnErrorOfTheFunctionLeavesItUsable) {
  bool fails = false;
  auto step = capture([&](const at::Tensor& x) {
    at::Tensor y = x + 1;
    if (fails) throw std::runtime_error("no luck");
    return y * 2;
  });
  step(ones());
  fails = true;
  EXPECT_THROW(step(ones()), std::runtime_error);
  EXPECT_FALSE(tape::is_recording());
  fails = false;
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(step(ones()), ones() * 4));
  EXPECT_EQ(step.captures(), 1);
  EXPECT_EQ(step.replays(), 2);
}

TEST(CaptureMisuse, AnErrorInAReplayLeavesTheGraphUsable) {
  auto step = capture([](const at::Tensor& table, const at::Tensor& i) { return at::embedding(table, i); });
  const at::Tensor table = torch::rand({4, 2});
  for (int i = 0; i < 3; ++i) step(table, torch::tensor({1, 2}));
  EXPECT_ANY_THROW(step(table, torch::tensor({1, 9})));
  EXPECT_TRUE(at::equal(step(table, torch::tensor({3, 0})), table.index({torch::tensor({3, 0})})));
  EXPECT_EQ(step.captures(), 1);
}

TEST(CaptureMisuse, AnotherThreadIsRefused) {
  auto step = capture([](const at::Tensor& x) { return x + 1; });
  step(ones());
  std::string text;
  std::thread([&] { text = error_text<c10::ValueError>([&] { step(ones()); }); }).join();
  EXPECT_THAT(text, HasSubstr("called from another thread"));
}

TEST(CaptureMisuse, ACaptureInsideOfACaptureIsRefused) {
  auto inner = capture([](const at::Tensor& x) { return x + 1; });
  auto outer = capture([&](const at::Tensor& x) { return inner(x) * 2; });
  outer(ones());
  EXPECT_THAT(error_text<c10::ValueError>([&] { outer(ones()); }), HasSubstr("inside of a captured function"));
}

TEST(CaptureMisuse, ATensorOfAnotherDeviceIsRecordedAnew) {
  auto step = capture([](const at::Tensor& x) { return x * 2; });
  for (int i = 0; i < 4; ++i) step(ones());
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(step(ones().to(at::kMeta)).is_meta());
  EXPECT_EQ(step.last_recapture_reason(), "device of input 0 was cpu and is meta");
  EXPECT_EQ(step.captures(), 2);
}

TEST(CaptureRefusal, NamesANumberInTheResultThatChanges) {
  auto step = capture([](const at::Tensor& x) { return std::make_tuple(x * 2, x.sum().item<double>()); });
  double sum = 0;
  const auto call = [&] { return step(torch::full({3}, sum += 1)); };
  EXPECT_EQ(std::get<1>(call()), 3);
  EXPECT_EQ(std::get<1>(call()), 6);
  EXPECT_EQ(
      error_text<CaptureError>(call),
      "[capture] changing scalar: value 0 of the result, which is no tensor, was 6 in one call and 9 in the next; a "
      "replay would return the last one\n"
      "  fix: return the tensor, and read it outside");
}

// Equal in both recordings, and another one later.
TEST(CaptureRefusal, NamesTheHostReadOfAFunctionThatReturnsNumbers) {
  auto step = capture([](const at::Tensor& x) { return std::make_tuple(x * 2, x.sum().item<double>()); });
  for (int i = 0; i < 2; ++i) step(ones());
  EXPECT_EQ(error_text<CaptureError>([&] { step(ones()); }),
            "[capture] host read: the function reads a number from a tensor and returns values that are no tensors; a "
            "replay would return those of the recording\n"
            "  op: aten::_local_scalar_dense\n"
            "  fix: return the tensor, and read it outside");
  auto numbers = capture([](const at::Tensor& x) { return std::make_pair(std::vector<at::Tensor>{x * 2}, 7); });
  auto tensors = capture([](const at::Tensor& x) {
    if (x.sum().item<double>() > 100) return std::vector<at::Tensor>{x};
    return std::vector<at::Tensor>{x * 2};
  });
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(numbers(ones()).second, 7);
    EXPECT_EQ(tensors(ones()).size(), 1);
  }
}

TEST(CaptureRefusal, ValuesThatRanksSendEachOther) {
  run_ranks(2, [](const Group& group) {
    const auto error_of = [](auto step) {
      return error_text<c10::NotImplementedError>([&] {
        for (int i = 0; i < 6; ++i) step(ones());
      });
    };
    EXPECT_EQ(error_of(capture([&](const at::Tensor& x) { return x * all_gather_object(2.0, group)[0]; })),
              c10::str("[all_gather_object] a captured function cannot hold values that ranks send each other\n"
                       "  fix: call it outside of the captured function, or send a tensor\n"
                       "  at:  rank ",
                       group->getRank(), "/2"));
    EXPECT_THAT(error_of(capture([&](const at::Tensor& x) { return x * broadcast_object(2.0, group); })),
                HasSubstr("[broadcast_object] a captured"));
  });
}

TEST(CaptureMisuse, OptionsThatMakeNoSenseAreNamed) {
  const auto error_of = [](CaptureOptions options) {
    return error_text<c10::ValueError>([&] { capture([](const at::Tensor& x) { return x * 2; }, options); });
  };
  EXPECT_EQ(error_of({.max_graphs = 0}), "[capture] max_graphs is 0\n  fix: keep at least one graph");
  EXPECT_EQ(error_of({.max_recaptures = -1}), "[capture] max_recaptures is -1\n  fix: give 0 or more");
  EXPECT_EQ(error_of({.modules = {nullptr}}), "[capture] modules[0] is null\n  fix: list modules that exist");
  EXPECT_EQ(error_of({.passes = {{"mine", nullptr}}}),
            "[capture] the pass \"mine\" has no function\n  fix: give it one, or leave it out");
}

TEST(CaptureMisuse, DynamicShapesAreNotBuilt) {
  const auto make = [] { return capture([](const at::Tensor& x) { return x; }, {.dynamic = true}); };
  EXPECT_THROW(make(), c10::NotImplementedError);
}

TEST(CaptureMisuse, AskingForAGraphTooEarlyIsAnError) {
  auto step = capture([](const at::Tensor& x) { return x + 1; });
  EXPECT_THAT(error_text<c10::ValueError>([&] { step.graph(); }), HasSubstr("there is no graph yet"));
}

}  // namespace
}  // namespace serried
