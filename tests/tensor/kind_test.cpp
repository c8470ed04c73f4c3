// Kinds of tensors beside DTensor: two that wrap another tensor, count the ops on it and forward them.
#include "serried/tensor/kind.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dispatch/op_info.h"
#include "serried/tensor/meta.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

thread_local int num_runs = 0;

struct WrapperMeta final : DistMeta {
  WrapperMeta(const TensorKind& kind, at::Tensor inner_) : DistMeta(kind), inner(std::move(inner_)) {}
  const at::Tensor inner;
};

extern const TensorKind kCounted;  // keeps to itself
extern const TensorKind kOpen;     // takes every other kind
extern const TensorKind kBroad;    // so does this one

at::Tensor wrapped(const TensorKind& kind, at::Tensor inner) {
  const TensorLooks looks{inner.sizes(), inner.strides(), inner.scalar_type()};
  return make_tensor(c10::make_intrusive<WrapperMeta>(kind, inner), looks);
}

const DistMeta* wrapper_meta(const at::Tensor& t) {
  const DistMeta* meta = t.defined() ? dist_meta(t.unsafeGetTensorImpl()) : nullptr;
  return meta != nullptr && meta->kind != &kDTensor ? meta : nullptr;
}

at::Tensor inner(const at::Tensor& t) {
  const DistMeta* meta = wrapper_meta(t);
  return meta != nullptr ? static_cast<const WrapperMeta*>(meta)->inner : t;
}

c10::IValue each(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& fn) {
  if (value.isTensor()) return value.toTensor().defined() ? fn(value.toTensor()) : value;
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& t : value.toTensorVector()) tensors.push_back(fn(t));
  return tensors;
}

// The op on what is inside, whatever kind that is.
template <const TensorKind* kind>
void forward(const c10::OperatorHandle& op, detail::OpInfo& info, torch::jit::Stack& stack) {
  ++num_runs;
  const torch::jit::Stack given(stack.end() - info.num_arguments, stack.end());
  torch::jit::drop(stack, info.num_arguments);
  torch::jit::Stack local;
  for (const c10::IValue& value : given) local.push_back(each(value, inner));
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    op.callBoxed(local);
  }
  for (int r = 0; r < info.num_returns; ++r) {
    const int alias = info.return_alias[r];
    const auto wrap_as_kind = [](const at::Tensor& t) { return wrapped(*kind, t); };
    stack.push_back(alias >= 0 ? given[alias] : each(local[r], wrap_as_kind));
  }
}

bool takes_all(const TensorKind&) {
  return true;
}

constinit const TensorKind kCounted{.name = "counted tensor",
                                    .to_plain = "inner()",
                                    .no_memory = "[data_ptr] a counted tensor has no memory\n  fix: use inner()",
                                    .run = forward<&kCounted>};
constinit const TensorKind kOpen{
    .name = "open tensor", .to_plain = "inner()", .no_memory = "none", .run = forward<&kOpen>, .takes = takes_all};
constinit const TensorKind kBroad{
    .name = "broad tensor", .to_plain = "inner()", .no_memory = "none", .run = forward<&kBroad>, .takes = takes_all};

int runs_of(const std::function<void()>& fn) {
  num_runs = 0;
  fn();
  return num_runs;
}

TEST(TensorKind, RunsTheCallsOfItsTensors) {
  const at::Tensor plain = iota({3, 4});
  const at::Tensor x = wrapped(kCounted, plain);
  const at::Tensor other = wrapped(kCounted, plain.t());
  EXPECT_EQ(x.sizes(), plain.sizes());
  EXPECT_FALSE(is_dtensor(x));
  // With an unboxed kernel for DTensors, without one, with plain tensors in between, lists, several results.
  EXPECT_EQ(runs_of([&] { expect_close(inner(x + x), plain + plain); }), 1);
  EXPECT_EQ(runs_of([&] { expect_close(inner(at::mm(x, other)), plain.mm(plain.t())); }), 1);
  EXPECT_EQ(runs_of([&] { expect_close(inner(at::sin(x)), plain.sin()); }), 1);
  EXPECT_EQ(runs_of([&] { expect_close(inner(at::maximum(plain, x)), plain); }), 1);
  EXPECT_EQ(runs_of([&] { expect_close(inner(at::cat({plain, x})), at::cat({plain, plain})); }), 1);
  EXPECT_EQ(runs_of([&] { expect_close(inner(std::get<0>(at::max(x, 1))), std::get<0>(plain.max(1))); }), 1);
  EXPECT_EQ(runs_of([&] { EXPECT_EQ(at::split(x, 2).size(), 2u); }), 1);
}

TEST(TensorKind, WritesInPlaceReturnTheTensorItself) {
  const at::Tensor x = wrapped(kCounted, at::ones({3}));
  at::Tensor same = x.add_(at::ones({3}));
  EXPECT_TRUE(same.is_same(x));
  expect_close(inner(x), at::full({3}, 2.f));
  at::sin_out(same, x);
  expect_close(inner(x), at::full({3}, 2.f).sin());
}

TEST(TensorKind, GradientsAreOfTheKind) {
  const at::Tensor plain = iota({3, 4});
  const at::Tensor x = wrapped(kCounted, plain).requires_grad_();
  at::mul(x, x).sum().backward();
  ASSERT_TRUE(x.grad().defined());
  expect_close(inner(x.grad()), 2 * plain);
  EXPECT_NE(wrapper_meta(x.grad()), nullptr);
}

TEST(TensorKind, SaysByItselfThatItHasNoMemory) {
  EXPECT_EQ(error_text<c10::Error>([] { wrapped(kCounted, at::ones({2})).data_ptr(); }),
            "[data_ptr] a counted tensor has no memory\n  fix: use inner()");
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const DTensor d = place(at::ones({2}), mesh, {Shard(0)});
    EXPECT_NE(error_text<c10::Error>([&] { d.data_ptr(); }).find("[data_ptr] a DTensor has no memory"),
              std::string::npos);
  });
}

std::string mixed_text(const std::string& op, const std::string& first, const std::string& second, bool dtensor_first) {
  const std::string dtensor = "DTensor by to_local() or full_tensor()", counted = "counted tensor by inner()";
  return "[" + op + "] argument " + first + " is a " + (dtensor_first ? "DTensor" : "counted tensor") +
         " and argument " + second + " a " + (dtensor_first ? "counted tensor" : "DTensor") +
         ", and no kind in this call takes the others\n  fix: make one of them a plain tensor, the " +
         (dtensor_first ? dtensor : counted) + ", the " + (dtensor_first ? counted : dtensor);
}

TEST(TensorKind, KindsThatDoNotTakeEachOtherAreRefusedByName) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const Sizes& sizes : {Sizes{3, 4}, Sizes{1}, Sizes{}}) {
      const at::Tensor d = place(iota(sizes), mesh, {Replicate()});
      const at::Tensor c = wrapped(kCounted, iota(sizes));
      const auto text = [](const std::function<void()>& fn) {
        std::string whole = error_text<c10::TypeError>(fn);
        return whole.substr(0, whole.find("\n  at:"));
      };
      EXPECT_EQ(text([&] { d + c; }), mixed_text("aten::add.Tensor", "0 \"self\"", "1 \"other\"", true));
      EXPECT_EQ(text([&] { c + d; }), mixed_text("aten::add.Tensor", "0 \"self\"", "1 \"other\"", false));
      EXPECT_EQ(text([&] { d.add_(c); }), mixed_text("aten::add_.Tensor", "0 \"self\"", "1 \"other\"", true));
      EXPECT_EQ(text([&] { at::maximum(d, c); }), mixed_text("aten::maximum", "0 \"self\"", "1 \"other\"", true));
      EXPECT_EQ(text([&] {
                  at::stack({d, d, c});
                }),
                mixed_text("aten::stack", "0 \"tensors\"[0]", "0 \"tensors\"[2]", true));
      at::Tensor out = c;
      EXPECT_EQ(text([&] { at::sin_out(out, d); }), mixed_text("aten::sin.out", "0 \"self\"", "1 \"out\"", true));
    }
  });
}

TEST(TensorKind, OneThatTakesTheOtherRunsTheCall) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor plain = iota({5, 4});
    const at::Tensor d = place(plain, mesh, {Shard(0)});
    const at::Tensor x = wrapped(kOpen, place(plain, mesh, {Shard(1)}));
    for (const auto& [a, b] : {std::pair(d, x), std::pair(x, d)}) {
      EXPECT_EQ(runs_of([&] { expect_close(full(inner(a + b)), plain + plain); }), 1);
      EXPECT_EQ(runs_of([&] { expect_close(full(inner(at::maximum(a, b))), plain); }), 1);
      EXPECT_EQ(runs_of([&] { expect_close(full(inner(at::cat({a, b}))), at::cat({plain, plain})); }), 1);
      EXPECT_EQ(wrapper_meta(a + b)->kind, &kOpen);
    }
  });
}

TEST(TensorKind, OfTwoThatTakeEachOtherTheFirstRuns) {
  const at::Tensor open = wrapped(kOpen, at::ones({2})), broad = wrapped(kBroad, at::ones({2}));
  EXPECT_EQ(wrapper_meta(open + broad)->kind, &kOpen);
  EXPECT_EQ(wrapper_meta(broad + open)->kind, &kBroad);
  EXPECT_EQ(wrapper_meta(at::stack({at::ones({2}), broad, open}))->kind, &kBroad);
}

TEST(TensorKind, OneThatTakesAllRunsACallOfThree) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor d = place(at::ones({2}), mesh, {Shard(0)});
    const at::Tensor counted = wrapped(kCounted, at::ones({2})), open = wrapped(kOpen, at::ones({2}));
    EXPECT_EQ(runs_of([&] {
                EXPECT_EQ(error_text<c10::TypeError>([&] { at::addcmul(counted, d, d); }).find("[aten::addcmul]"), 0u);
              }),
              0);
    EXPECT_EQ(wrapper_meta(at::addcmul(counted, open, counted))->kind, &kOpen);
  });
}

}  // namespace
}  // namespace serried::testing
