// The stock styles: each places the parameters of a module and writes down what the ops that consume them ask for.
#include "serried/parallel/tensor_parallel/styles.h"

#include <torch/nn/modules/dropout.h>

#include "serried/base/error.h"
#include "serried/parallel/tensor_parallel/consumers.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"

namespace serried {
namespace {

using detail::AskedLayout;
using detail::check_not_sharded;
using detail::Consumer;
using detail::consumer_of;
using detail::ConsumerKind;
using detail::described;
using detail::Role;
using detail::RoleLayouts;

constexpr const char* kStyles = "parallelize_module";

[[noreturn]] void raise_unknown(const char* style, const torch::nn::Module& module, const char* known,
                                const std::string& fix) {
  raise<c10::NotImplementedError>(
      {kStyles, c10::str(style, " does not know ", described(module), ", only ", known), fix});
}

void check_axis(const char* style, const char* option, const Placements& placements) {
  if (placements.size() == 1) return;
  raise<c10::ValueError>({kStyles,
                          c10::str(style, " has ", placements.size(), " placements as ", option, ": \"",
                                   to_string(placements), "\", and its mesh has one axis"),
                          "pass one placement"});
}

// Places a parameter that no style has placed before.
void place(const char* style, torch::nn::Module& module, const at::Tensor& parameter, const DeviceMesh& mesh,
           Placement placement) {
  if (!parameter.defined()) return;
  if (is_dtensor(parameter)) {
    const DTensor placed(parameter);
    const Placements due = checked_placements(kStyles, {placement}, parameter.dim(), 1);
    if (placed.device_mesh() == mesh && placed.placements() == due) return;
    raise<c10::ValueError>(
        {kStyles,
         c10::str("a parameter of ", described(module), " is \"", to_string(placed.placements()), "\" on ",
                  placed.device_mesh().to_string(), " already, and ", style, " wants \"", to_string(due), "\" on ",
                  mesh.to_string()),
         "parallelise a module once, by one plan that names all of its parts; weights that are shared need styles that "
         "place them alike, such as RowwiseParallel on the embedding and ColwiseParallel on the head"});
  }
  distribute_parameter(parameter, mesh, {placement});
}

void ask(const char* style, torch::nn::Module& module, const Consumer& consumer, const DeviceMesh& mesh,
         RoleLayouts layouts) {
  if (!consumer.weight.defined()) return;
  const RoleLayouts* known = detail::role_of(consumer.weight, consumer.role);
  if (known != nullptr && known->by_style) {
    raise<c10::ValueError>({kStyles,
                            c10::str(described(module), " has a style already, and ", style, " is another one"),
                            "name a module once, in one plan: patterns may not overlap"});
  }
  layouts.by_style = true;
  detail::set_role(consumer.weight, mesh, consumer.role, std::move(layouts));
}

// A bias is added after the output has moved: it lies as that does.
Placement bias_placement(const Placements& output, int64_t fused) {
  const bool is_moved = !output.empty() && output[0] != StridedShard(-1, fused);
  return is_moved ? Replicate() : StridedShard(0, fused);
}

void check_fused(const torch::nn::Module& module, const at::Tensor& weight, int64_t fused) {
  if (fused >= 1 && weight.size(0) % fused == 0) return;
  raise<c10::ValueError>({kStyles,
                          c10::str("ColwiseParallel has fused = ", fused, ", and ", described(module), " has ",
                                   weight.size(0), " outputs"),
                          "pass the number of equal projections that stand side by side in the weight, 3 for q, k, v"});
}

bool is_attention_with_one_matrix(const std::optional<Consumer>& consumer) {
  return consumer.has_value() && consumer->kind == ConsumerKind::attention && consumer->weight.defined();
}

// Whose input and output a layout can be asked of.
bool is_prepared(const std::optional<Consumer>& consumer) {
  return consumer.has_value() && consumer->weight.defined();
}

}  // namespace

void ColwiseParallel::apply(torch::nn::Module& module, const DeviceMesh& mesh) const {
  constexpr const char* kStyle = "ColwiseParallel";
  check_not_sharded(module);
  check_axis(kStyle, "input", options_.input);
  if (!options_.output.empty()) check_axis(kStyle, "output", options_.output);
  const std::optional<Consumer> consumer = consumer_of(module);
  const bool is_attention = is_attention_with_one_matrix(consumer);
  if (!consumer.has_value() || consumer->kind == ConsumerKind::norm ||
      (consumer->kind == ConsumerKind::attention && !is_attention)) {
    raise_unknown(kStyle, module, "Linear, Embedding and MultiheadAttention with one size for queries, keys and values",
                  "name the Linear or Embedding modules within it, or place its parameters by a style of your own: a "
                  "struct with void apply(torch::nn::Module&, const DeviceMesh&) const");
  }
  if (consumer->kind == ConsumerKind::embedding) {
    place(kStyle, module, consumer->weight, mesh, Shard(1));
    const Placements output = options_.output.empty() ? Placements{Shard(-1)} : options_.output;
    return ask(kStyle, module, *consumer, mesh, {AskedLayout(options_.input), AskedLayout(output)});
  }
  const int64_t fused = is_attention && options_.fused == 1 ? 3 : options_.fused;
  check_fused(module, consumer->weight, fused);
  place(kStyle, module, consumer->weight, mesh, StridedShard(0, fused));
  place(kStyle, module, consumer->bias, mesh, bias_placement(options_.output, fused));
  const Placements output = options_.output.empty() ? Placements{StridedShard(-1, fused)} : options_.output;
  ask(kStyle, module, *consumer, mesh, {AskedLayout(options_.input), AskedLayout(output)});
}

void RowwiseParallel::apply(torch::nn::Module& module, const DeviceMesh& mesh) const {
  constexpr const char* kStyle = "RowwiseParallel";
  check_not_sharded(module);
  if (!options_.input.empty()) check_axis(kStyle, "input", options_.input);
  check_axis(kStyle, "output", options_.output);
  const std::optional<Consumer> consumer = consumer_of(module);
  const bool is_table = consumer.has_value() && consumer->kind == ConsumerKind::embedding;
  if (!is_table && (!consumer.has_value() || consumer->kind != ConsumerKind::linear)) {
    raise_unknown(kStyle, module, "Linear and Embedding",
                  "name the Linear or Embedding modules within it, such as \"out_proj\" of a MultiheadAttention, or "
                  "place its parameters by a style of your own: a struct with void apply(torch::nn::Module&, const "
                  "DeviceMesh&) const");
  }
  place(kStyle, module, consumer->weight, mesh, Shard(is_table ? 0 : 1));
  place(kStyle, module, consumer->bias, mesh, Replicate());
  const Placements usual = {is_table ? Replicate() : Shard(-1)};
  const Placements& input = options_.input.empty() ? usual : options_.input;
  ask(kStyle, module, *consumer, mesh, {AskedLayout(input), AskedLayout(options_.output)});
}

void SequenceParallel::apply(torch::nn::Module& module, const DeviceMesh& mesh) const {
  constexpr const char* kStyle = "SequenceParallel";
  check_not_sharded(module);
  if (module.as<torch::nn::DropoutImpl>() != nullptr) return;
  const std::optional<Consumer> consumer = consumer_of(module);
  if (!consumer.has_value() || consumer->kind != ConsumerKind::norm) {
    raise_unknown(kStyle, module, "LayerNorm, GroupNorm and Dropout",
                  c10::str("leave it out of the plan, then its parameters are Replicate, and mark its input: "
                           "constrain(x, {Shard(",
                           options_.dim, ")})"));
  }
  place(kStyle, module, consumer->weight, mesh, Replicate());
  place(kStyle, module, consumer->bias, mesh, Replicate());
  const AskedLayout tokens({Shard(options_.dim)});
  ask(kStyle, module, *consumer, mesh, {tokens, tokens});
}

void PrepareModuleInput::apply(torch::nn::Module& module, const DeviceMesh& mesh) const {
  constexpr const char* kStyle = "PrepareModuleInput";
  check_not_sharded(module);
  check_axis(kStyle, "desired", options_.desired);
  bool found = false;
  module.apply([&](torch::nn::Module& each) {
    const std::optional<Consumer> consumer = consumer_of(each);
    if (!is_prepared(consumer)) return;
    found = true;
    const RoleLayouts* known =
        is_dtensor(consumer->weight) ? detail::role_of(consumer->weight, consumer->role) : nullptr;
    if (known != nullptr && known->input.is_asked()) return;
    if (!is_dtensor(consumer->weight)) place(kStyle, each, consumer->weight, mesh, Replicate());
    RoleLayouts layouts = known != nullptr ? *known : RoleLayouts();
    layouts.input = AskedLayout(options_.desired);
    detail::set_role(consumer->weight, mesh, consumer->role, std::move(layouts));
  });
  if (found) return;
  raise_unknown(kStyle, module, "modules with a Linear, Embedding or norm within",
                "mark the place in forward: constrain(x, placements)");
}

void PrepareModuleOutput::apply(torch::nn::Module& module, const DeviceMesh& mesh) const {
  constexpr const char* kStyle = "PrepareModuleOutput";
  check_not_sharded(module);
  check_axis(kStyle, "desired", options_.desired);
  const std::optional<Consumer> consumer = consumer_of(module);
  if (!is_prepared(consumer) || consumer->kind == ConsumerKind::attention) {
    raise_unknown(kStyle, module, "Linear, Embedding, LayerNorm and GroupNorm with a weight",
                  "mark the place in forward: constrain(y, placements)");
  }
  if (!is_dtensor(consumer->weight)) place(kStyle, module, consumer->weight, mesh, Replicate());
  const RoleLayouts* known = detail::role_of(consumer->weight, consumer->role);
  RoleLayouts layouts = known != nullptr ? *known : RoleLayouts();
  layouts.output = AskedLayout(options_.desired);
  detail::set_role(consumer->weight, mesh, consumer->role, std::move(layouts));
}

}  // namespace serried
