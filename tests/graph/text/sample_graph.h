// A small graph with a bit of everything, made by hand.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>

#include "serried/graph/graph.h"

namespace serried::testing {

inline c10::OperatorHandle op_named(const std::string& name, const std::string& overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
}

/// A contiguous f32 tensor of this shape.
inline graph::TensorMeta f32_meta(std::initializer_list<int64_t> sizes) {
  graph::TensorMeta meta;
  meta.sizes = c10::DimVector(sizes);
  meta.strides.resize(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= meta.sizes[d]) meta.strides[d] = step;
  return meta;
}

inline graph::Argument reduce_op(const c10d::ReduceOp& op) {
  return graph::Argument::of(c10::IValue(c10::make_intrusive<c10d::ReduceOp>(op)));
}

inline graph::Argument group_argument(const std::string& name) {
  return {graph::Argument::Kind::group, name, {}};
}

///     loss = all_reduce(x @ p * 0.5);  p.grad = x.t() @ loss;  p -= 0.1 * p.grad
inline graph::Graph sample_graph() {
  using graph::Argument;
  using graph::ValueKind;
  graph::Graph g;
  const auto computed = [&](std::initializer_list<int64_t> sizes, int32_t storage) {
    return g.add_value({.meta = f32_meta(sizes), .storage = storage});
  };
  const auto x = g.add_value({.kind = ValueKind::input, .meta = f32_meta({4, 3}), .storage = 0, .name = "x"});
  const auto p = g.add_value({.kind = ValueKind::persistent, .meta = f32_meta({3, 2}), .storage = 1});
  const auto c =
      g.add_value({.kind = ValueKind::constant, .meta = f32_meta({}), .tensor = at::scalar_tensor(0.5), .storage = 2});
  const auto product = computed({4, 2}, 3), scaled = computed({4, 2}, 4), loss = computed({4, 2}, 5);
  const auto turned = computed({3, 4}, 0), gradient = computed({3, 2}, 6);
  g.value(turned).meta.strides = {1, 3};
  g.inputs() = {x, graph::kNoValue};
  g.add_node({op_named("aten::mm"), {Argument::of_value(x), Argument::of_value(p)}, {{product}}});
  g.add_node({op_named("aten::mul", "Tensor"), {Argument::of_value(product), Argument::of_value(c)}, {{scaled}}});
  g.add_node(graph::make_node("serried::all_reduce",
                              {Argument::of_value(scaled), group_argument("dp"), reduce_op(c10d::ReduceOp::SUM)},
                              {{loss}}));
  g.add_node({op_named("aten::t"), {Argument::of_value(x)}, {{turned}}});
  g.add_node({op_named("aten::mm"), {Argument::of_value(turned), Argument::of_value(loss)}, {{gradient}}});
  g.add_node({op_named("aten::add_", "Tensor"),
              {Argument::of_value(p), Argument::of_value(gradient), Argument::of(-0.1)},
              {{p}}});
  g.gradients().push_back({"f32[3, 2]", gradient});
  g.outputs() = {loss};
  return g;
}

}  // namespace serried::testing
