// Parameters that are gathered on use: which calls need the whole value, and which do not.
#include "serried/tensor/gather_on_use.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dispatch/handlers.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

// A strategy that gathers at every use, and counts.
struct Counted final : detail::GatherOnUse {
  at::Tensor whole(const DTensorMeta& meta) override {
    ++num_gathers;
    return detail::whole_local(meta).clone();
  }
  at::Tensor part_of_whole(const DTensorMeta& meta, const at::Tensor& whole) override {
    const Span span = chunk(whole.size(0), meta.spec->mesh.size(), meta.spec->mesh.get_rank());
    return whole.narrow(0, span.begin, span.size);
  }
  bool is_parameter() const override { return true; }
  void note_write() override { ++num_writes; }

  int num_gathers = 0;
  int num_writes = 0;
};

struct Marked {
  at::Tensor tensor;
  std::shared_ptr<Counted> counted = std::make_shared<Counted>();

  Marked(const at::Tensor& full, const DeviceMesh& mesh) : tensor(place(full, mesh, {Shard(0)})) {
    set_use(tensor, std::make_shared<const ParameterUse>(ParameterUse{.layouts = nullptr, .gather = counted}));
  }
  int gathers_of(const std::function<void()>& fn) {
    counted->num_gathers = 0;
    fn();
    return counted->num_gathers;
  }
};

TEST(GatherOnUse, ViewsWaitAndAnOpOnThemGathersOnce) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor full = iota({7, 4});
    Marked w(full, mesh);
    at::Tensor view;
    EXPECT_EQ(w.gathers_of([&] { view = w.tensor.t().slice(1, 1, 6).unsqueeze(0); }), 0);
    EXPECT_EQ(view.sizes(), at::IntArrayRef({1, 4, 5}));
    EXPECT_EQ(view.strides(), full.t().slice(1, 1, 6).unsqueeze(0).strides());
    at::Tensor result;
    EXPECT_EQ(w.gathers_of([&] { result = view + at::ones({1, 4, 5}, at::kDouble); }), 1);
    EXPECT_FALSE(is_dtensor(result));
    expect_equal(result, full.t().slice(1, 1, 6).unsqueeze(0) + 1);
    EXPECT_EQ(w.gathers_of([&] { result = at::mm(w.tensor, w.tensor.t()); }), 2);
    expect_equal(result, full.mm(full.t()));
  });
}

TEST(GatherOnUse, AmongTheirLikeTensorsStayInParts) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Marked w(iota({5, 4}), mesh);
    const at::NoGradGuard no_grad;
    EXPECT_EQ(w.gathers_of([&] {
      const at::Tensor state = at::zeros_like(w.tensor);
      state.mul_(0.9).add_(w.tensor, 0.1);
      const at::Tensor denominator = state.square().sqrt().add_(1e-8);
      w.tensor.mul_(0.5).addcdiv_(state, denominator, -0.1);
      EXPECT_TRUE(is_dtensor(denominator));
    }),
              0);
    EXPECT_EQ(w.counted->num_writes, 2);
    const at::Tensor state = 0.1 * iota({5, 4});
    expect_close(full(w.tensor), iota({5, 4}) * 0.5 - 0.1 * state / (state.square().sqrt() + 1e-8));
  });
}

TEST(GatherOnUse, StateThatMeetsAPlainTensorIsOneValue) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    Marked w(iota({5, 4}), mesh);
    const at::NoGradGuard no_grad;
    const at::Tensor state = w.tensor * 2;
    EXPECT_TRUE(is_dtensor(state));
    const at::Tensor sum = state + at::ones({5, 4}, at::kDouble);
    EXPECT_FALSE(is_dtensor(sum));
    expect_equal(sum, iota({5, 4}) * 2 + 1);
    expect_close(at::ones({2, 4}, at::kDouble).mm(state.sqrt().t()),
                 at::ones({2, 4}, at::kDouble).mm((iota({5, 4}) * 2).sqrt().t()));
  });
}

TEST(GatherOnUse, WritesThroughViewsReachTheParts) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    at::Tensor plain = iota({7, 4});
    Marked w(plain, mesh);
    const at::NoGradGuard no_grad;
    w.tensor[2].zero_();
    w.tensor.t().mul_(at::arange(7, at::kDouble));
    plain[2].zero_();
    plain.t().mul_(at::arange(7, at::kDouble));
    EXPECT_EQ(w.counted->num_writes, 2);
    expect_equal(full(w.tensor), plain);
  });
}

TEST(GatherOnUse, AutogradSavesNoMemoryOfTheWholeValue) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Marked w(iota({5, 4}), mesh);
    w.tensor.requires_grad_();
    const at::Tensor x = at::ones({2, 4}, at::kDouble).requires_grad_();
    at::Tensor y;
    EXPECT_EQ(w.gathers_of([&] { y = at::linear(x, w.tensor); }), 1);
    EXPECT_EQ(w.gathers_of([&] { y.sum().backward(); }), 1);
    expect_equal(x.grad(), iota({5, 4}).sum(0).expand({2, 4}));
    // Nobody averages here: the gradient is this rank's own.
    expect_equal(w.tensor.grad(), at::full({5, 4}, 2.0, at::kDouble));
  });
}

}  // namespace
}  // namespace serried::testing
