// The ops of random programs that move elements, look them up, or write in place.
#include <ATen/ATen.h>

#include "tests/support/tensor_programs.h"

namespace serried::testing {
namespace {

using P = TensorProgram;
using T = at::Tensor;

bool has_dims(const T& t) {
  return t.dim() > 0;
}

// A view of a tensor with dims.
TensorOp view(const char* name, T (*fn)(P&, const T&)) {
  return {name, [fn](P& p) {
            const auto t = p.pick_where(has_dims);
            if (t) p.push_view(fn(p, *t), *t);
          }};
}

TensorOp moved(const char* name, T (*fn)(P&, const T&)) {
  return {name, [fn](P& p) {
            const auto t = p.pick_where(has_dims);
            if (t) p.push(fn(p, *t));
          }};
}

T slice(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  const int64_t begin = p.dice.below(t.size(d));
  return t.slice(d, begin, p.dice.between(begin + 1, t.size(d)), p.dice.between(1, 2));
}

T select(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  return t.select(d, p.dice.below(t.size(d)));
}

T permute(P& p, const T& t) {
  std::vector<int64_t> order;
  for (int64_t d = 0; d < t.dim(); ++d) order.insert(order.begin() + p.dice.below(d + 1), d);
  return t.permute(order);
}

T unflatten(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  const int64_t n = t.size(d);
  for (int64_t k = 2; k < n; ++k) {
    if (n % k == 0) return t.unflatten(d, {k, n / k});
  }
  return t.unsqueeze(d);
}

// Side by side: what writing to windows that overlap gives, plain LibTorch leaves open.
T unfold(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  const int64_t size = (t.size(d) + 1) / 2;
  return t.unfold(d, size, size);
}

T diagonal(P& p, const T& t) {
  return t.dim() >= 2 ? t.diagonal(p.dice.between(-1, 0), 0, -1) : t.alias();
}

T expanded(P& p, const T& t) {
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes.insert(sizes.begin(), p.dice.between(1, 3));
  return t.expand(sizes);
}

T cat(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  const auto other = p.pick_where([&](const T& o) {
    if (o.dim() != t.dim()) return false;
    for (int64_t k = 0; k < t.dim(); ++k) {
      if (k != d && o.size(k) != t.size(k)) return false;
    }
    return true;
  });
  return at::cat({t, *other}, d);
}

T index_select(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  return t.index_select(d, p.indices({p.dice.between(1, 5)}, t.size(d)));
}

T gather(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes[size_t(d)] = p.dice.between(1, 4);
  return t.gather(d, p.indices(sizes, t.size(d)));
}

T index(P& p, const T& t) {
  c10::List<std::optional<T>> list;
  list.push_back(p.indices({2, 1}, t.size(0)));
  if (t.dim() > 1 && p.dice.chance(0.5)) list.push_back(p.indices({3}, t.size(1)));
  return at::index(t, list);
}

T scatter_add(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  return t.scatter_add(d, p.indices(t.sizes(), t.size(d)), p.normal(t.sizes()));
}

T index_add(P& p, const T& t) {
  const int64_t d = p.dim_of(t);
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes[size_t(d)] = 3;
  return t.index_add(d, p.indices({3}, t.size(d)), p.normal(sizes), 0.5);
}

T index_put(P& p, const T& t) {
  c10::List<std::optional<T>> list;
  list.push_back(p.indices({4}, t.size(0)));
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes[0] = p.dice.chance(0.5) ? 4 : 1;
  return at::index_put(t, list, p.normal(sizes), /*accumulate=*/true);
}

T pad(P& p, const T& t) {
  return at::constant_pad_nd(t, {p.dice.between(0, 2), p.dice.between(0, 1)}, 0.5);
}

T triangle(P& p, const T& t) {
  return t.dim() >= 2 ? t.tril(p.dice.between(-1, 1)) : t.flip(0);
}

template <class Fn>
TensorOp write(const char* name, Fn fn) {
  return {name, [fn](P& p) {
            if (auto t = p.pick_writable()) fn(p, *t);
          }};
}

// One that can be written into `t`.
T beside(P& p, const T& t) {
  const auto other = p.pick_where([&](const T& o) {
    if (o.dim() > t.dim() || o.is_same(t)) return false;
    for (int64_t d = 1; d <= o.dim(); ++d) {
      if (o.size(-d) != t.size(-d) && o.size(-d) != 1) return false;
    }
    return true;
  });
  return other ? other->clone() : p.normal(t.sizes());
}

}  // namespace

const std::vector<TensorOp>& shape_ops() {
  static const std::vector<TensorOp> all = {
      view("slice", slice),
      view("select", select),
      view("permute", permute),
      view("transpose", [](P& p, const T& t) { return t.transpose(p.dim_of(t), p.dim_of(t)); }),
      view("unflatten", unflatten),
      view("diagonal", diagonal),
      view("expand", expanded),
      view("unsqueeze", [](P& p, const T& t) { return t.unsqueeze(p.dim_of(t)); }),
      view("squeeze", [](P&, const T& t) { return t.squeeze(); }),
      view("chunk", [](P& p, const T& t) { return t.chunk(2, p.dim_of(t))[0]; }),
      view("unbind", [](P& p, const T& t) { return t.unbind(p.dim_of(t)).back(); }),
      view("unfold", unfold),
      moved("flatten", [](P&, const T& t) { return t.reshape({-1}).clone(); }),
      moved("reshape",
            [](P&, const T& t) {
              return t.reshape({-1, t.size(0)}).clone();
            }),
      moved("cat", cat),
      moved("stack",
            [](P& p, const T& t) {
              return at::stack({t, t.tanh()}, p.dim_of(t));
            }),
      moved("flip", [](P& p, const T& t) { return t.flip(p.dim_of(t)); }),
      moved("roll", [](P& p, const T& t) { return t.roll(p.dice.between(-2, 2), p.dim_of(t)); }),
      moved("repeat", [](P&, const T& t) { return t.repeat(std::vector<int64_t>(size_t(t.dim()), 2)); }),
      moved("repeat_interleave", [](P& p, const T& t) { return t.repeat_interleave(2, p.dim_of(t)); }),
      moved("index_select", index_select),
      moved("gather", gather),
      moved("index", index),
      moved("scatter_add", scatter_add),
      moved("index_add", index_add),
      moved("index_put", index_put),
      moved("pad", pad),
      moved("triangle", triangle),
      moved("embedding",
            [](P& p, const T& t) {
              return t.dim() == 2 ? at::embedding(t, p.indices({2, 3}, t.size(0))) : t.flip(0);
            }),
  };
  return all;
}

const std::vector<TensorOp>& writing_ops() {
  static const std::vector<TensorOp> all = {
      write("add_", [](P& p, T& t) { t.add_(beside(p, t), 0.5); }),
      write("sub_", [](P& p, T& t) { t.sub_(beside(p, t)); }),
      write("mul_", [](P& p, T& t) { t.mul_(beside(p, t).tanh()); }),
      write("mul_ by number", [](P&, T& t) { t.mul_(0.75); }),
      write("copy_", [](P& p, T& t) { t.copy_(beside(p, t)); }),
      write("zero_", [](P&, T& t) { t.zero_(); }),
      write("fill_", [](P&, T& t) { t.fill_(0.5); }),
      write("tanh_", [](P&, T& t) { t.tanh_(); }),
      write("clamp_", [](P&, T& t) { t.clamp_(-1, 1); }),
      write("masked_fill_", [](P& p, T& t) { t.masked_fill_(beside(p, t).detach() > 0, 0.1); }),
      write("addcmul_", [](P& p, T& t) { t.addcmul_(beside(p, t), beside(p, t)); }),
      write("lerp_", [](P& p, T& t) { t.lerp_(beside(p, t), 0.3); }),
      write("write a row",
            [](P& p, T& t) {
              if (t.dim() > 0) select(p, t).mul_(2);
            }),
      write("write a slice",
            [](P& p, T& t) {
              if (t.dim() > 0) slice(p, t).add_(1);
            }),
      write("write a transpose",
            [](P& p, T& t) {
              if (t.dim() > 0) permute(p, t).sub_(0.5);
            }),
      write("write a slice of a view",
            [](P& p, T& t) {
              if (t.dim() > 0) slice(p, t.unsqueeze(0)).copy_(p.normal({1}));
            }),
      write("index_add_",
            [](P& p, T& t) {
              if (t.dim() > 0) t.copy_(index_add(p, t));
            }),
  };
  return all;
}

}  // namespace serried::testing
