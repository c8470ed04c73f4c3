// Tensors of the surroundings that lie elsewhere, are made anew, or lie in memory that torch does not own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/optim/sgd.h"
#include "tests/graph/captured_calls.h"

namespace serried {
namespace {

using testing::compare_with_eager;
using testing::Comparison;
using ::testing::HasSubstr;
using testing::Surroundings;

at::Tensor counted(at::IntArrayRef sizes, float first = 1) {
  const int64_t n = c10::multiply_integers(sizes);
  return torch::arange(first, first + float(n)).view(sizes);
}

using Change = std::function<void(Surroundings&)>;

/// Changes one tensor of the surroundings after `first` calls, and every `period` from then on.
Comparison compare_with_changes(const Change& change, int first, int period) {
  return compare_with_eager(
      [] {
        return Surroundings{{counted({4, 4}), counted({4, 4}, 50)}};
      },
      [](Surroundings& s, const at::Tensor& x) { return x + s[0].sum(0) * s[1].sum(); },
      [&](Surroundings& s, int call) {
        if (call >= first && (call - first) % period == 0) change(s);
        return counted({1}, float(call));
      },
      14);
}

TEST(CaptureSurroundings, OtherSizesStridesAndOffsetsAreNoticed) {
  const std::vector<Change> changes = {
      [](Surroundings& s) { s[0].t_(); },
      [](Surroundings& s) { s[0].dim() < 6 ? s[0].unsqueeze_(0) : s[0].squeeze_(); },
      [](Surroundings& s) {
        s[0].resize_({2, int64_t(s[0].size(-1)) == 4 ? 2 : 4});
      },
      [](Surroundings& s) {
        s[0].as_strided_({2, 2}, {4, 1}, s[0].storage_offset() == 0 ? 5 : 0);
      },
      [](Surroundings& s) {
        s[0].set_data(s[0].storage_offset() == 0 ? s[0].flatten().slice(0, 2, 6) : s[0].flatten());
      },
      [](Surroundings& s) { s[0].transpose_(0, -1); },
      [](Surroundings& s) { s[0].swapaxes_(0, -1); },
      [](Surroundings& s) {
        s[0].set_(s[1].storage(), s[0].storage_offset() == 0 ? 4 : 0, {2, 2}, {2, 1});
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    for (const int first : {2, 3, 5}) {
      for (const int period : {1, 4, 100}) {
        SCOPED_TRACE(c10::str("change ", i, " after ", first, " calls, each ", period));
        const Comparison result = compare_with_changes(changes[i], first, period);
        if (period == 100) EXPECT_EQ(result.refusal, "");
        if (period == 100) EXPECT_GE(result.replays, 5);
      }
    }
  }
}

TEST(CaptureSurroundings, AnotherPieceOfOneTensorAtEachCallIsRefused) {
  const std::vector<at::Tensor> batches = counted({12}).split(3);
  at::Tensor batch;
  auto step = capture([&](const at::Tensor& x) { return x * batch; });
  std::string refusal;
  for (size_t i = 0; i < 4 && refusal.empty(); ++i) {
    batch = batches[i];
    try {
      EXPECT_TRUE(at::equal(step(counted({3})), counted({3}) * batch)) << i;
    } catch (const graph::CaptureError& error) {
      refusal = error.what_without_backtrace();
    }
  }
  EXPECT_EQ(refusal,
            "[capture] tensor made off the tape: the tensor f32[3] that aten::mul.Tensor uses is another part of one "
            "memory in each call: first strides [1] from element 3 on, then strides [1] from element 6 on\n"
            "  op: aten::mul.Tensor\n"
            "  line: %2 = mul(%in0, %p1)  # f32[3]\n"
            "  fix: pass it to the captured function as an argument; or keep one tensor, and copy_ into it");
}

TEST(CaptureSurroundings, AChangeOfLayoutInsideIsRefused) {
  const std::vector<std::function<void(at::Tensor&)>> changes = {
      [](at::Tensor& t) { t.t_(); },
      [](at::Tensor& t) { t.unsqueeze_(0); },
      [](at::Tensor& t) { t.set_data(t.clone()); },
      [](at::Tensor& t) { t.set_(t.clone()); },
  };
  for (const auto& change : changes) {
    for (const bool is_undone : {false, true}) {
      const Comparison result = compare_with_eager(
          [] {
            return Surroundings{{counted({3, 3})}};
          },
          [&](Surroundings& s, const at::Tensor& x) {
            const at::Tensor y = x + s[0].sum(0, true);
            change(s[0]);
            return y;
          },
          [&](Surroundings& s, int call) {
            if (is_undone && call > 0) s[0] = counted({3, 3});
            return counted({1}, float(call));
          });
      EXPECT_NE(result.refusal, "");
    }
  }
}

TEST(CaptureSurroundings, AnotherHistoryIsNoticed) {
  at::Tensor w = torch::full({3}, 2.f, at::requires_grad()), h = w * 3;
  at::Tensor v = torch::full({3}, 2.f, at::requires_grad()), k = v * 3;
  auto step = capture([&](const at::Tensor& x) { (h * x).sum().backward({}, /*retain_graph=*/true); });
  for (int i = 0; i < 12; ++i) {
    if (i == 6) h.add_(w), k.add_(v);  // the same memory
    const at::Tensor x = counted({3}, float(i));
    step(x);
    (k * x).sum().backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(at::equal(w.grad(), v.grad())) << i;
  }
  EXPECT_EQ(step.last_recapture_reason(), "the tensor f32[3] has another history than when recorded");
}

TEST(CaptureSurroundings, AHistoryThatTheFunctionGivesIsRefused) {
  const at::Tensor w = torch::ones({3}, at::requires_grad());
  const auto refusal_of = [&](const std::function<void(const at::Tensor&, const at::Tensor&)>& write) {
    at::Tensor state = torch::zeros({3});
    auto step = capture([&](const at::Tensor& x) {
      const at::Tensor y = x * w;
      y.sum().backward();
      write(state, y);
    });
    try {
      for (int i = 0; i < 8; ++i, state.detach_()) step(counted({3}, float(i)));
    } catch (const graph::CaptureError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  EXPECT_EQ(
      refusal_of([](const at::Tensor& state, const at::Tensor& y) { state.copy_(y); }),
      "[capture] unsupported: the function changes whether the tensor f32[3] of its surroundings requires "
      "gradients, or its history (requires_grad_, detach_, an in-place op with a tensor that requires gradients); "
      "a replay would not\n"
      "  fix: write into it under torch::NoGradGuard, or what detach() gives; or change requires_grad outside of "
      "the captured function");
  EXPECT_EQ(refusal_of([](const at::Tensor& state, const at::Tensor& y) { state.copy_(y.detach()); }), "");
}

TEST(CaptureSurroundings, ATensorThatIsMadeAnewForEachCallIsRefused) {
  at::Tensor scale;
  auto step = capture([&](const at::Tensor& x) { return x * scale; });
  std::string refusal;
  for (int i = 0; i < 8 && refusal.empty(); ++i) {
    scale = torch::tensor(i < 5 ? 2.f : 3.f);  // equal in the first calls
    try {
      EXPECT_TRUE(at::equal(step(counted({3})), counted({3}) * scale)) << i;
    } catch (const graph::CaptureError& error) {
      refusal = error.what_without_backtrace();
    }
  }
  EXPECT_EQ(
      refusal,
      "[capture] tensor made off the tape: the tensor f32[] that aten::mul.Tensor uses is another one in each "
      "call, made without an op or outside of the function: equal in two of them, which says nothing of the next\n"
      "  op: aten::mul.Tensor\n"
      "  line: %2 = mul(%in0, %p1)  # f32[3]\n"
      "  fix: pass it to the captured function as an argument; or keep one tensor, and copy_ into it");
}

TEST(CaptureSurroundings, ATensorThatIsReplacedOnceIsNoticed) {
  for (const int when : {1, 2, 3, 5}) {
    SCOPED_TRACE(when);
    const Comparison result = compare_with_eager([] { return Surroundings{{counted({3})}}; },
                                                 [](Surroundings& s, const at::Tensor& x) { return x * s[0]; },
                                                 [&](Surroundings& s, int call) {
                                                   if (call == when) s[0] = counted({3}, 9);
                                                   return counted({3}, float(call));
                                                 },
                                                 12);
    // Calls 1 and 2 are recorded and compared: what is replaced just between them looks as if it always were.
    if (when == 2) {
      EXPECT_THAT(result.refusal, HasSubstr("its data differs from call to call"));
      continue;
    }
    EXPECT_EQ(result.refusal, "");
    EXPECT_GE(result.replays, 4);
  }
}

TEST(CaptureSurroundings, ATensorThatIsSeenThroughDataOnlyIsRefused) {
  const at::Tensor average = counted({3});
  auto step = capture([&](const at::Tensor& x) { average.data().mul_(0.5).add_(x); });
  std::string refusal;
  for (int i = 0; i < 6 && refusal.empty(); ++i) {
    try {
      step(counted({3}, float(i)));
    } catch (const graph::CaptureError& error) {
      refusal = error.what_without_backtrace();
    }
  }
  EXPECT_EQ(
      refusal,
      "[capture] tensor made off the tape: the tensor f32[3] that aten::mul_.Scalar uses is seen through copies of "
      "its handle only (.data()): another one in its place would not show\n"
      "  op: aten::mul_.Scalar\n"
      "  line: mul_(%p1, other=0.5)\n"
      "  fix: use detach(), or NoGradGuard, instead of .data(); or pass it to the captured function as an argument");
}

TEST(CaptureForeignMemory, OfALocalVariableIsRefused) {
  float first = 1;
  auto step = capture([&](const at::Tensor& x) {
    std::vector<float> local = {first, 2, 3};
    return x * torch::from_blob(local.data(), {3}).clone();
  });
  std::string refusal;
  for (int i = 0; i < 6 && refusal.empty(); ++i) {
    try {
      EXPECT_TRUE(at::equal(step(counted({3})), counted({3}) * torch::tensor({first, 2.f, 3.f}))) << i;
    } catch (const graph::CaptureError& error) {
      refusal = error.what_without_backtrace();
    }
  }
  EXPECT_EQ(
      refusal,
      "[capture] tensor made off the tape: the tensor f32[3] that aten::clone uses lies in memory that torch does "
      "not own (from_blob) and is another one in each call\n"
      "  op: aten::clone\n"
      "  line: %2 = clone(%p1)  # f32[3]\n"
      "  fix: pass it to the captured function as an argument; or make it of the numbers: torch::tensor(vector)");
}

TEST(CaptureForeignMemory, WithADeleterIsRefusedToo) {
  auto step = capture([&](const at::Tensor& x) {
    auto* numbers = new float[3]{1, 2, 3};
    const auto free = [](void* p) { delete[] static_cast<float*>(p); };
    return x * torch::from_blob(numbers, {3}, free);
  });
  EXPECT_THROW(for (int i = 0; i < 6; ++i) step(counted({3})), graph::CaptureError);
}

TEST(CaptureForeignMemory, ThatStaysIsReadAnewAtEachCall) {
  std::vector<float> buffer = {1, 2, 3};
  const at::Tensor view = torch::from_blob(buffer.data(), {3});
  auto step = capture([&](const at::Tensor& x) { return x * view; });
  for (int i = 0; i < 7; ++i) {
    buffer[1] = float(i);
    EXPECT_TRUE(at::equal(step(counted({3})), counted({3}) * view)) << i;
  }
  EXPECT_EQ(step.replays(), 4);
}

TEST(CaptureForeignMemory, AsAnArgumentIsFine) {
  auto step = capture([&](const at::Tensor& x) { return x * 2; });
  for (int i = 0; i < 7; ++i) {
    std::vector<float> buffer = {1, 2, float(i)};
    EXPECT_TRUE(at::equal(step(torch::from_blob(buffer.data(), {3})), torch::tensor({2.f, 4.f, 2.f * float(i)}))) << i;
  }
  EXPECT_EQ(step.replays(), 4);
}

TEST(CaptureForeignMemory, UnderTwoNamesIsNoticed) {
  // Of the argument and of what the function finds: two storages, one memory.
  std::vector<float> buffer(6);
  const at::Tensor held = torch::from_blob(buffer.data(), {3});
  const auto eager = [&](const at::Tensor& x) {
    const at::Tensor before = held * 2;
    x.add_(1);
    return before + held;
  };
  auto step = capture(eager);
  for (int i = 0; i < 12; ++i) {
    buffer.assign(6, float(i));
    const bool shares = i > 5;
    const at::Tensor x = shares ? torch::from_blob(buffer.data() + i % 3, {3}) : torch::zeros({3});
    try {
      const at::Tensor actual = step(x);
      buffer.assign(6, float(i));
      EXPECT_TRUE(at::equal(actual, eager(x))) << i;
    } catch (const graph::CaptureError& error) {
      EXPECT_TRUE(shares) << "must be right: " << error.what();
      EXPECT_THAT(error.what(), HasSubstr("fix:"));
    }
    if (i == 5) EXPECT_GE(step.replays(), 1);  // a graph is there that must not be used for what follows
  }
}

TEST(CaptureHandles, NumbersOfAnotherTypeAreOtherArguments) {
  auto by_scalar = capture([](const at::Tensor& x, const at::Scalar& s) { return x * s; });
  auto by_type = capture([](const at::Tensor& x, auto s) { return x * s; });
  const at::Tensor x = torch::arange(3);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(by_scalar(x, at::Scalar(2)).scalar_type(), at::kLong);
    EXPECT_EQ(by_type(x, 2).scalar_type(), at::kLong);
  }
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(by_scalar(x, at::Scalar(2.0)).scalar_type(), at::kFloat);
    EXPECT_EQ(by_type(x, 2.0).scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(by_type(x, 0.1f), x * 0.1f));
    EXPECT_TRUE(at::equal(by_type(x.to(at::kDouble), 0.1), x.to(at::kDouble) * 0.1));
    EXPECT_TRUE(at::equal(by_type(x.to(at::kDouble), 0.1f), x.to(at::kDouble) * 0.1f));
  }
  const at::Tensor flags = torch::ones({2}, at::kBool);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(by_scalar(flags, at::Scalar(true)).scalar_type(), at::kBool);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(by_scalar(flags, at::Scalar(1)).scalar_type(), at::kLong);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(by_type(flags, true).scalar_type(), at::kBool);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(by_type(flags, 1).scalar_type(), at::kLong);
}

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() { layer = register_module("layer", torch::nn::Linear(3, 2)); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  void replace() {
    unregister_module("layer");
    old.push_back(layer);
    layer = register_module("layer", torch::nn::Linear(3, 2));
  }
  torch::nn::Linear layer{nullptr};
  std::vector<torch::nn::Linear> old;  // the tensors of it live on
};
TORCH_MODULE(TwoLayers);

TEST(CaptureHandles, AReplacedSubmoduleOfAListedModuleIsNoticed) {
  const at::NoGradGuard no_grad;
  TwoLayers net;
  auto step = capture([&](const at::Tensor& x) { return net(x); }, {.modules = {net.ptr()}});
  for (int i = 0; i < 14; ++i) {
    if (i == 5) net->replace();
    const at::Tensor x = counted({2, 3}, float(i));
    EXPECT_TRUE(at::equal(step(x), net(x))) << i;
  }
  EXPECT_GE(step.replays(), 8);
}

// Every way to give a module another part; all the old ones live on, so that nothing is gone.
struct PartsImpl : torch::nn::Module {
  PartsImpl() {
    layer = register_module("layer", torch::nn::Linear(3, 3));
    inner = register_module("inner", TwoLayers());
    list = register_module("list", torch::nn::ModuleList(torch::nn::Linear(2, 2)));
    gain = register_parameter("gain", torch::ones({2}));
    act = register_module("act", torch::nn::Functional(torch::relu));
  }
  at::Tensor forward(const at::Tensor& x) {
    return act(list[0]->as<torch::nn::Linear>()->forward(inner(layer(x)))) * gain;
  }
  torch::nn::Linear layer{nullptr};
  TwoLayers inner{nullptr};
  torch::nn::ModuleList list{nullptr};
  torch::nn::Functional act{nullptr};
  at::Tensor gain;
  std::vector<std::shared_ptr<torch::nn::Module>> old;
};
TORCH_MODULE(Parts);

using Replacement = std::function<void(Parts&)>;

const std::vector<std::pair<const char*, Replacement>> kReplacements = {
    {"replace_module",
     [](Parts& net) {
       net->old.push_back(net->layer.ptr());
       net->layer = net->replace_module("layer", torch::nn::Linear(3, 3));
     }},
    {"a member holder alone", [](Parts& net) { net->layer = torch::nn::Linear(3, 3); }},
    {"a member holder of a part", [](Parts& net) { net->inner->layer = torch::nn::Linear(3, 2); }},
    {"a part with parts",
     [](Parts& net) {
       net->old.push_back(net->inner.ptr());
       net->inner = net->replace_module("inner", TwoLayers());
     }},
    {"replace_module of a part", [](Parts& net) { net->inner->replace(); }},
    {"a part without parameters",
     [](Parts& net) {
       net->old.push_back(net->act.ptr());
       net->act = net->replace_module("act", torch::nn::Functional(torch::tanh));
     }},
    {"one of a ModuleList",
     [](Parts& net) {
       net->old.push_back(net->list->ptr(0));
       net->list->replace_module("0", std::shared_ptr<torch::nn::Module>(torch::nn::Linear(2, 2).ptr()));
     }},
    {"a weight of a Linear",
     [](Parts& net) {
       net->layer->weight = torch::randn({3, 3});
     }},
    {"a parameter of the module", [](Parts& net) { net->gain = torch::full({2}, 2.f); }},
    {"values", [](Parts& net) { net->gain.fill_(3); }},
    {"other memory",
     [](Parts& net) {
       net->layer->weight.set_data(torch::randn({3, 3}));
     }},
    {"load",
     [](Parts& net) {
       std::stringstream file;
       torch::save(torch::nn::Linear(3, 3), file);
       torch::load(net->layer, file);
     }},
};

TEST(CaptureHandles, WhateverAListedModuleIsMadeOfIsNoticed) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, replace] : kReplacements) {
    Parts net;
    auto step = capture([&](const at::Tensor& x) { return net(x); }, {.modules = {net.ptr()}});
    for (int i = 0; i < 14; ++i) {
      if (i == 5) replace(net);
      const at::Tensor x = counted({2, 3}, float(i));
      EXPECT_TRUE(at::equal(step(x), net(x))) << name << " " << i;
    }
    EXPECT_GE(step.replays(), 6) << name;
  }
}

TEST(CaptureHandles, APartThatIsListedTooAndHoldersThatComeAndGoEndInReplays) {
  const at::NoGradGuard no_grad;
  Parts net;
  auto step = capture([&](const at::Tensor& x) { return net(x); },
                      {.modules = {net.ptr(), net->inner.ptr(), net->layer.ptr()}});
  for (int i = 0; i < 30; ++i) {
    const auto taken = i % 2 == 0 ? net->modules() : std::vector<std::shared_ptr<torch::nn::Module>>();
    const at::Tensor x = counted({2, 3}, float(i));
    EXPECT_TRUE(at::equal(step(x), net(x))) << i;
  }
  EXPECT_LE(step.captures(), 2);
  EXPECT_GE(step.replays(), 22);
}

}  // namespace
}  // namespace serried
