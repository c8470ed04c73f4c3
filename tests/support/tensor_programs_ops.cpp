// The ops of random programs that compute new tensors: pointwise, reductions, products, layers and losses.
#include <torch/torch.h>

#include "tests/support/tensor_programs.h"

namespace serried::testing {
namespace {

using P = TensorProgram;
using T = at::Tensor;
namespace F = torch::nn::functional;

TensorOp unary(const char* name, T (*fn)(const T&)) {
  return {name, [fn](P& p) { p.push(fn(p.pick())); }};
}

TensorOp binary(const char* name, T (*fn)(const T&, const T&)) {
  return {name, [fn](P& p) {
            const T a = p.pick();
            const T b = p.pick_beside(a);
            p.push(fn(a, b));
          }};
}

// Three tensors that broadcast against each other: both others beside the first, and with one another.
TensorOp ternary(const char* name, T (*fn)(const T&, const T&, const T&)) {
  return {name, [fn](P& p) {
            const T a = p.pick();
            const T b = p.pick_beside(a);
            const T both = a + b;
            p.push(fn(a, b, p.pick_beside(both)));
          }};
}

TensorOp along(const char* name, T (*fn)(const T&, int64_t, bool)) {
  return {name, [fn](P& p) {
            const auto t = p.pick_where([](const T& t) { return t.dim() > 0; });
            if (t) p.push(fn(*t, p.dim_of(*t), p.dice.chance(0.4)));
          }};
}

// Over several dims at once.
TensorOp over(const char* name, T (*fn)(const T&, at::IntArrayRef, bool)) {
  return {name, [fn](P& p) {
            const T t = p.pick();
            std::vector<int64_t> dims;
            for (int64_t d = 0; d < t.dim(); ++d) {
              if (p.dice.chance(0.6)) dims.push_back(d);
            }
            if (!dims.empty()) p.push(fn(t, dims, p.dice.chance(0.4)));
          }};
}

at::Scalar correction(const T& t, at::IntArrayRef dims) {
  int64_t count = 1;
  for (int64_t d : dims) count *= t.size(d);
  return count > 1 ? 1 : 0;
}

std::vector<TensorOp> pointwise() {
  return {
      unary("tanh", [](const T& t) { return t.tanh(); }),
      unary("sin", [](const T& t) { return t.sin(); }),
      unary("sigmoid", [](const T& t) { return t.sigmoid(); }),
      unary("exp of tanh", [](const T& t) { return t.tanh().exp(); }),
      unary("softplus", [](const T& t) { return at::softplus(t); }),
      unary("relu", [](const T& t) { return t.relu(); }),
      unary("gelu", [](const T& t) { return at::gelu(t); }),
      unary("silu", [](const T& t) { return at::silu(t); }),
      unary("abs", [](const T& t) { return t.abs(); }),
      unary("neg", [](const T& t) { return -t; }),
      unary("square of tanh", [](const T& t) { return t.tanh().square(); }),
      unary("sqrt", [](const T& t) { return (t * t + 1).sqrt(); }),
      unary("rsqrt", [](const T& t) { return (t.abs() + 1).rsqrt(); }),
      unary("log", [](const T& t) { return (t * t + 0.5).log(); }),
      unary("log1p", [](const T& t) { return t.abs().log1p(); }),
      unary("erf", [](const T& t) { return t.erf(); }),
      unary("atan", [](const T& t) { return t.atan(); }),
      unary("leaky_relu", [](const T& t) { return at::leaky_relu(t, 0.1); }),
      unary("hardtanh", [](const T& t) { return at::hardtanh(t); }),
      unary("elu", [](const T& t) { return at::elu(t); }),
      unary("logsigmoid", [](const T& t) { return at::log_sigmoid(t); }),
      unary("mish", [](const T& t) { return at::mish(t); }),
      unary("reciprocal", [](const T& t) { return (t * t + 1).reciprocal(); }),
      unary("clamp", [](const T& t) { return t.clamp(-0.5, 1.0); }),
      unary("affine", [](const T& t) { return 1.5 - t * 0.7; }),
      unary("detach", [](const T& t) { return t.detach() * 1; }),
      unary("clone", [](const T& t) { return t.clone(); }),
      unary("contiguous", [](const T& t) { return t.contiguous() + 0; }),
      binary("add", [](const T& a, const T& b) { return a + b; }),
      binary("sub", [](const T& a, const T& b) { return at::sub(a, b, 0.3); }),
      binary("mul", [](const T& a, const T& b) { return a * b.tanh(); }),
      binary("div", [](const T& a, const T& b) { return a / (b * b + 1); }),
      binary("maximum", [](const T& a, const T& b) { return at::maximum(a, b); }),
      binary("minimum", [](const T& a, const T& b) { return at::minimum(a, b); }),
      binary("atan2", [](const T& a, const T& b) { return at::atan2(a, b.abs() + 1); }),
      binary("hypot", [](const T& a, const T& b) { return at::hypot(a, b.abs() + 1); }),
      binary("pow", [](const T& a, const T& b) { return at::pow(a.sigmoid() + 0.5, b.tanh()); }),
      binary("logaddexp", [](const T& a, const T& b) { return at::logaddexp(a, b); }),
      binary("lerp", [](const T& a, const T& b) { return at::lerp(a, b, 0.3); }),
      binary("masked_fill", [](const T& a, const T& b) { return a.masked_fill(b.detach() > 0, 0.25); }),
      binary("where", [](const T& a, const T& b) { return at::where(a.detach() > b.detach(), a, b); }),
      binary("mse", [](const T& a, const T& b) { return (a - b).square().mean(); }),
      binary("smooth_l1",
             [](const T& a, const T& b) { return at::smooth_l1_loss(a.expand_as(a + b), b.expand_as(a + b)); }),
      ternary("lerp tensor", [](const T& a, const T& b, const T& c) { return at::lerp(a, b, c.sigmoid()); }),
      ternary("where 3", [](const T& a, const T& b, const T& c) { return at::where(a.detach() > 0, b, c); }),
      ternary("addcmul", [](const T& a, const T& b, const T& c) { return at::addcmul(a, b.tanh(), c, 0.5); }),
      ternary("addcdiv", [](const T& a, const T& b, const T& c) { return at::addcdiv(a, b, c.abs() + 1, -0.5); }),
      ternary("clamp tensors", [](const T& a, const T& b, const T& c) { return at::clamp(a, b.detach() - 1, c + 1); }),
  };
}

std::vector<TensorOp> reductions() {
  return {
      unary("sum all", [](const T& t) { return t.sum(); }),
      unary("mean all", [](const T& t) { return t.mean(); }),
      unary("norm all", [](const T& t) { return t.norm(); }),
      unary("amax all", [](const T& t) { return t.amax(); }),
      unary("max all", [](const T& t) { return t.max(); }),
      over("sum", [](const T& t, at::IntArrayRef d, bool k) { return t.sum(d, k); }),
      over("mean", [](const T& t, at::IntArrayRef d, bool k) { return t.mean(d, k); }),
      over("var", [](const T& t, at::IntArrayRef d, bool k) { return at::var(t, d, correction(t, d), k); }),
      over("std", [](const T& t, at::IntArrayRef d, bool k) { return at::std(t, d, correction(t, d), k); }),
      over("logsumexp", [](const T& t, at::IntArrayRef d, bool k) { return t.logsumexp(d, k); }),
      over("amax", [](const T& t, at::IntArrayRef d, bool k) { return t.amax(d, k); }),
      over("amin", [](const T& t, at::IntArrayRef d, bool k) { return t.amin(d, k); }),
      over("norm 1", [](const T& t, at::IntArrayRef d, bool k) { return at::linalg_vector_norm(t, 1, d, k); }),
      over("norm 2", [](const T& t, at::IntArrayRef d, bool k) { return at::linalg_vector_norm(t, 2, d, k); }),
      over("norm 3", [](const T& t, at::IntArrayRef d, bool k) { return at::linalg_vector_norm(t, 3, d, k); }),
      over("norm inf", [](const T& t, at::IntArrayRef d, bool k) { return at::linalg_vector_norm(t, INFINITY, d, k); }),
      over("var_mean",
           [](const T& t, at::IntArrayRef d, bool k) {
             const auto [variance, mean] = at::var_mean(t, d, correction(t, d), k);
             return variance - mean;
           }),
      along("prod", [](const T& t, int64_t d, bool k) { return t.tanh().prod(d, k); }),
      along("max", [](const T& t, int64_t d, bool k) { return std::get<0>(t.max(d, k)); }),
      along("min", [](const T& t, int64_t d, bool k) { return std::get<0>(t.min(d, k)); }),
      along("median", [](const T& t, int64_t d, bool k) { return std::get<0>(t.median(d, k)); }),
      along("cumsum", [](const T& t, int64_t d, bool) { return t.cumsum(d); }),
      along("cumprod", [](const T& t, int64_t d, bool) { return (t.sigmoid() + 0.5).cumprod(d); }),
      along("logcumsumexp", [](const T& t, int64_t d, bool) { return t.logcumsumexp(d); }),
      along("softmax", [](const T& t, int64_t d, bool) { return t.softmax(d); }),
      along("log_softmax", [](const T& t, int64_t d, bool) { return t.log_softmax(d); }),
      along("sort", [](const T& t, int64_t d, bool down) { return std::get<0>(t.sort(d, down)); }),
      along("topk", [](const T& t, int64_t d, bool) { return std::get<0>(t.topk((t.size(d) + 1) / 2, d)); }),
      along("renorm", [](const T& t, int64_t d, bool) { return t.dim() > 1 ? t.renorm(2, d, 1.5) : t * 2; }),
  };
}

std::vector<TensorOp> products() {
  const auto matrix = [](const T& t) { return t.dim() == 2; };
  const auto batch = [](const T& t) { return t.dim() == 3; };
  const auto some = [](const T& t) { return t.dim() >= 1; };
  return {
      {"mm",
       [=](P& p) {
         if (auto t = p.pick_where(matrix)) p.push(t->mm(t->t()));
       }},
      {"mm of weight",
       [=](P& p) {
         if (auto t = p.pick_where(matrix)) p.push(t->mm(p.normal({t->size(1), p.dice.between(1, 5)})));
       }},
      {"matmul",
       [=](P& p) {
         if (auto t = p.pick_where(some)) p.push(t->matmul(p.normal({t->size(-1), 3})));
       }},
      {"matmul of vector",
       [=](P& p) {
         if (auto t = p.pick_where(some)) p.push(t->matmul(p.normal({t->size(-1)})));
       }},
      {"linear",
       [=](P& p) {
         if (auto t = p.pick_where(some)) p.push(at::linear(*t, p.normal({4, t->size(-1)}), p.normal({4})));
       }},
      {"bmm",
       [=](P& p) {
         if (auto t = p.pick_where(batch)) p.push(t->bmm(t->transpose(1, 2)));
       }},
      {"baddbmm",
       [=](P& p) {
         const auto t = p.pick_where(batch);
         if (!t) return;
         const std::vector<int64_t> bias = {p.dice.chance(0.5) ? 1 : t->size(0), p.dice.chance(0.5) ? 1 : t->size(1),
                                            2};
         p.push(at::baddbmm(p.normal(bias), *t, p.normal({t->size(0), t->size(2), 2}), 0.5, 2));
       }},
      {"addmm",
       [=](P& p) {
         const auto t = p.pick_where(matrix);
         if (!t) return;
         const std::vector<int64_t> bias = {p.dice.chance(0.5) ? 1 : t->size(0), p.dice.chance(0.5) ? 1 : 3};
         p.push(at::addmm(p.normal(bias), *t, p.normal({t->size(1), 3}), 0.5, 2));
       }},
      {"einsum",
       [=](P& p) {
         if (auto t = p.pick_where(matrix)) p.push(at::einsum("ij,kj->ik", {*t, p.normal({2, t->size(1)})}));
       }},
      {"outer",
       [=](P& p) {
         if (auto t = p.pick_where([](const T& x) { return x.dim() == 1; })) p.push(at::outer(*t, p.normal({3})));
       }},
      {"layer_norm",
       [=](P& p) {
         if (auto t = p.pick_where([](const T& x) { return x.dim() >= 1 && x.size(-1) > 1; }))
           p.push(at::layer_norm(*t, {t->size(-1)}, p.normal({t->size(-1)}), p.normal({t->size(-1)})));
       }},
      {"batch_norm",
       [=](P& p) {
         if (auto t = p.pick_where([](const T& x) { return x.dim() >= 2 && x.numel() > x.size(1); }))
           p.push(at::batch_norm(*t, p.normal({t->size(1)}), {}, {}, {}, true, 0.1, 1e-3, false));
       }},
      {"attention",
       [=](P& p) {
         const auto t = p.pick_where(batch);
         if (!t) return;
         const T keys = p.normal({t->size(0), 3, t->size(2)});
         const T values = p.normal({t->size(0), 3, t->size(2)});
         // Of three dims the formula for all backends makes a causal mask of its own, a plain tensor.
         const auto heads = [](const T& x) { return x.unsqueeze(1); };
         p.push(p.dice.chance(0.3)
                    ? at::scaled_dot_product_attention(heads(*t), heads(keys), heads(values), {}, 0, true)
                    : at::scaled_dot_product_attention(*t, keys, values));
       }},
      {"cross_entropy",
       [=](P& p) {
         const auto t = p.pick_where(matrix);
         if (t) p.push(at::cross_entropy_loss(*t, p.indices({t->size(0)}, t->size(1))));
       }},
      {"conv1d",
       [=](P& p) {
         if (auto t = p.pick_where([](const T& x) { return x.dim() == 3 && x.size(2) >= 2; }))
           p.push(at::conv1d(*t, p.normal({2, t->size(1), 2}), p.normal({2})));
       }},
  };
}

}  // namespace

const std::vector<TensorOp>& tensor_ops() {
  static const std::vector<TensorOp> all = [] {
    std::vector<TensorOp> ops;
    for (auto* group : {&pointwise, &reductions, &products}) {
      for (TensorOp& op : group()) ops.push_back(std::move(op));
    }
    return ops;
  }();
  return all;
}

}  // namespace serried::testing
