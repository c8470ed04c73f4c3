// Captures a GPT under the fake backend, whose collectives need no peers.
#include "tools/serried/plan_gpt.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "serried/base/error.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/parts.h"

namespace serried::tools {
namespace {

namespace nn = torch::nn;

constexpr int64_t kDefaultRanks = 8;
constexpr int64_t kMaxRanks = 10'000'000;  // for which the mesh takes 4 GiB
constexpr int kMaxCalls = 10;              // until a step is captured: buckets are rebuilt once before

nn::LayerNorm layer_norm(int64_t width) {
  return nn::LayerNorm(nn::LayerNormOptions({width}));
}

// As in examples/06_gpt.cpp, but for the order inside of qkv: heads first, so that a cut of its rows is a cut of heads.
struct BlockImpl : nn::Module {
  explicit BlockImpl(const PlanWords& words)
      : heads(words.heads),
        norm_1(register_module("norm_1", layer_norm(words.width))),
        qkv(register_module("qkv", nn::Linear(nn::LinearOptions(words.width, 3 * words.width).bias(false)))),
        out(register_module("out", nn::Linear(words.width, words.width))),
        norm_2(register_module("norm_2", layer_norm(words.width))),
        up(register_module("up", nn::Linear(words.width, 4 * words.width))),
        down(register_module("down", nn::Linear(4 * words.width, words.width))) {}

  at::Tensor attention(const at::Tensor& x) {
    // [batch, time, 3 * width] -> query, key, value of [batch, heads, time, width / heads]
    const at::Tensor parts = qkv(x).unflatten(-1, {heads, 3, x.size(-1) / heads}).permute({3, 0, 2, 1, 4});
    const at::Tensor y =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, /*dropout_p=*/0, /*is_causal=*/true);
    return out(y.transpose(1, 2).flatten(2));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm_1(x));
    return x + down(torch::gelu(up(norm_2(x))));
  }

  int64_t heads;
  nn::LayerNorm norm_1;
  nn::Linear qkv, out;
  nn::LayerNorm norm_2;
  nn::Linear up, down;
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  explicit GptImpl(const PlanWords& words)
      : letters(register_module("letters", nn::Embedding(words.vocabulary, words.width))),
        places(register_parameter("places", at::zeros({words.context, words.width}))),
        blocks(register_module("blocks", nn::Sequential())),
        norm(register_module("norm", layer_norm(words.width))),
        head(register_module("head", nn::Linear(words.width, words.vocabulary))) {
    for (int64_t i = 0; i < words.layers; ++i) blocks->push_back(Block(words));
  }

  at::Tensor forward(const at::Tensor& ids) { return head(norm(blocks->forward(letters(ids) + places))); }

  nn::Embedding letters;
  at::Tensor places;
  nn::Sequential blocks;
  nn::LayerNorm norm;
  nn::Linear head;
};
TORCH_MODULE(Gpt);

// Columns of what leads into heads and hidden units, rows of what leads out of them; the rest stays whole.
const ParallelPlan kBlocks = {{"blocks.*.qkv", ColwiseParallel()},
                              {"blocks.*.up", ColwiseParallel()},
                              {"blocks.*.out", RowwiseParallel()},
                              {"blocks.*.down", RowwiseParallel()}};

struct Division {
  int64_t number;
  const char* what;
  int64_t parts;
  const char* into;
  const char* option;  // that can be set right
};

void check_divides(const Division& division) {
  if (division.number % division.parts == 0) return;
  raise<c10::ValueError>(
      {"plan",
       c10::str(division.number, " ", division.what, " do not divide by ", division.parts, ", into ", division.into),
       c10::str("pass a multiple of ", division.parts, " as ", division.option)});
}

void check_positive(const PlanWords& words) {
  const std::pair<const char*, int64_t> numbers[] = {{"--ranks", words.ranks.value_or(1)},
                                                     {"--dp", words.dp.value_or(1)},
                                                     {"--fsdp", words.fsdp.value_or(1)},
                                                     {"--tp", words.tp},
                                                     {"--layers", words.layers},
                                                     {"--width", words.width},
                                                     {"--heads", words.heads},
                                                     {"--context", words.context},
                                                     {"--vocabulary", words.vocabulary},
                                                     {"--batch", words.batch}};
  for (const auto& [option, number] : numbers) {
    if (number >= 1) continue;
    raise<c10::ValueError>(
        {"plan", c10::str(option, " is ", number, ", and there is no model or mesh of that size"), "pass 1 or more"});
  }
}

void check_not_too_many(int64_t ranks) {
  if (ranks <= kMaxRanks) return;
  raise<c10::ValueError>({"plan", c10::str(ranks, " ranks are more than a mesh can list here"),
                          c10::str("pass up to ", kMaxRanks, " as --ranks")});
}

struct Axes {
  int64_t dp, fsdp, tp;
  int64_t ranks() const { return dp * fsdp * tp; }
};

// What is not given follows from the rest.
Axes axes_of(const PlanWords& words) {
  for (int64_t number : {words.ranks.value_or(1), words.dp.value_or(1), words.fsdp.value_or(1), words.tp}) {
    check_not_too_many(number);
  }
  check_not_too_many(words.fsdp.value_or(1) * words.tp);
  Axes axes{words.dp.value_or(1), words.fsdp.value_or(1), words.tp};
  const bool follows = words.ranks.has_value() || (!words.dp.has_value() && !words.fsdp.has_value());
  if (follows && !words.dp.has_value()) {
    const int64_t ranks = words.ranks.value_or(kDefaultRanks);
    check_divides({ranks, "ranks", axes.fsdp * axes.tp, "copies of the model", "--ranks"});
    axes.dp = ranks / (axes.fsdp * axes.tp);
  }
  check_not_too_many(axes.ranks());
  if (axes.ranks() == words.ranks.value_or(axes.ranks())) return axes;
  raise<c10::ValueError>({"plan",
                          c10::str("--dp ", axes.dp, ", --fsdp ", axes.fsdp, " and --tp ", axes.tp, " make ",
                                   axes.ranks(), " ranks, and --ranks is ", *words.ranks),
                          "leave out --ranks, or one of the others, which then follows"});
}

void check_model(const PlanWords& words) {
  check_divides({words.width, "numbers of width", words.heads, "heads", "--width"});
  check_divides({words.heads, "heads", words.tp, "tensor-parallel parts", "--heads"});
}

// Axes that fully_shard does not need are left out.
std::vector<PlanAxis> named(const Axes& axes) {
  if (axes.fsdp == 1) return {{"dp", axes.dp}, {"tp", axes.tp}};
  if (axes.dp == 1) return {{"fsdp", axes.fsdp}, {"tp", axes.tp}};
  return {{"dp", axes.dp}, {"fsdp", axes.fsdp}, {"tp", axes.tp}};
}

DeviceMesh make_mesh(const Axes& axes) {
  const Group world = new_group("fake", {.rank = 0, .world_size = int(axes.ranks())});
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
  for (const PlanAxis& axis : named(axes)) sizes.push_back(axis.size), names.push_back(axis.name);
  return init_device_mesh("cpu", sizes, names, {.group = world});
}

// "dp" says more than the name that a group is registered under.
void name_axes(graph::Graph& graph, const DeviceMesh& mesh) {
  std::map<std::string, std::string> axes;
  for (const std::string& axis : mesh.dim_names()) axes[mesh.get_group(axis)->getGroupName()] = axis;
  for (graph::Node& node : graph.nodes()) {
    for (graph::Argument& argument : node.arguments) {
      if (argument.kind != graph::Argument::Kind::group) continue;
      const auto found = axes.find(argument.constant.toStringRef());
      if (found != axes.end()) argument.constant = found->second;
    }
  }
}

int64_t count_elements(const nn::Module& module) {
  int64_t count = 0;
  for (const at::Tensor& parameter : module.parameters()) count += parameter.numel();
  return count;
}

// The net on its ranks, and one step of it.
class Training {
 public:
  Training(const PlanWords& words, const Axes& axes, const DeviceMesh& mesh)
      : net_(words), tp_(axes.tp > 1 ? std::optional(mesh["tp"]) : std::nullopt) {
    num_parameters_ = count_elements(*net_);
    if (tp_) parallelize_module(*net_, *tp_, kBlocks);
    if (axes.fsdp > 1) shard(axes.dp > 1 ? mesh.slice({"dp", "fsdp"}) : mesh["fsdp"]);
    if (axes.fsdp == 1 && axes.dp > 1) ddp_.emplace(net_, DDPOptions{.mesh = mesh["dp"]});
    optimizer_.emplace(net_->parameters(), torch::optim::AdamWOptions(1e-3));
  }

  at::Tensor step(const at::Tensor& ids, const at::Tensor& next) {
    optimizer_->zero_grad();
    const at::Tensor logits = ddp_ ? (*ddp_)(ids) : net_(ids);
    at::Tensor loss = torch::cross_entropy_loss(logits.flatten(0, 1), placed(next).flatten());
    loss.backward();
    optimizer_->step();
    return loss;
  }

  /// Runs a step.
  ModuleExplanation explained(const at::Tensor& ids, const at::Tensor& next) {
    return explain(*net_, [&] { step(ids, next); });
  }

  /// After a step that was not captured.
  PlanMemory memory() {
    PlanMemory memory;
    for (const at::Tensor& t : net_->parameters()) {
      memory.parameters += int64_t(part_of(t).nbytes());
      memory.gradients += int64_t(part_of(t.grad()).nbytes());
      const auto& state =
          static_cast<const torch::optim::AdamWParamState&>(*optimizer_->state().at(t.unsafeGetTensorImpl()));
      memory.optimizer += int64_t(part_of(state.exp_avg()).nbytes() + part_of(state.exp_avg_sq()).nbytes());
    }
    const FullyShardUsage usage = sharded_ ? sharded_->usage() : FullyShardUsage();
    memory.gathered = usage.peak_gathered_bytes;
    memory.whole_gradients = usage.peak_gradient_bytes;
    return memory;
  }

  int64_t num_parameters() const { return num_parameters_; }

 private:
  void shard(const DeviceMesh& mesh) {
    for (const auto& block : *net_->blocks) fully_shard(*block.ptr(), {.mesh = mesh});
    sharded_ = fully_shard(*net_, {.mesh = mesh});
  }

  at::Tensor placed(const at::Tensor& t) const {
    return tp_ ? at::Tensor(DTensor::from_local(t, *tp_, {Replicate()})) : t;
  }

  Gpt net_;
  int64_t num_parameters_ = 0;
  std::optional<DeviceMesh> tp_;
  std::optional<FullyShardHandle> sharded_;
  std::optional<DistributedDataParallel<Gpt>> ddp_;
  std::optional<AdamW> optimizer_;
};

template <class Step>
double median_us(int count, const Step& step) {
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    step();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + count / 2, times.end());
  return times[size_t(count / 2)];
}

}  // namespace

std::vector<PlanAxis> mesh_axes(const PlanWords& words) {
  check_positive(words);
  return named(axes_of(words));
}

Plan make_plan(const PlanWords& words, const OnStage& on_stage) {
  check_positive(words);
  const Axes axes = axes_of(words);
  check_model(words);
  on_stage(0, "groups of the mesh");
  const DeviceMesh mesh = make_mesh(axes);
  on_stage(1, "the model");
  torch::manual_seed(1);
  Training training(words, axes, mesh);
  const auto letters = [&] { return at::randint(words.vocabulary, {words.batch, words.context}, at::kLong); };
  on_stage(2, "calls of the step, until it is captured");
  ModuleExplanation modules = training.explained(letters(), letters());
  Plan plan{.graph = {},
            .report = {},
            .memory = training.memory(),
            .modules = std::move(modules),
            .mesh = mesh.to_string(),
            .num_parameters = training.num_parameters()};
  auto step = capture([&](const at::Tensor& ids, const at::Tensor& next) { return training.step(ids, next); });
  for (int i = 0; i < kMaxCalls && step.captures() == 0; ++i) step(letters(), letters());
  on_stage(3, "the report");
  if (words.num_timed > 0) plan.replay_us = median_us(words.num_timed, [&] { step(letters(), letters()); });
  plan.graph = step.graph();
  name_axes(plan.graph, mesh);
  plan.report = report(plan.graph);
  return plan;
}

}  // namespace serried::tools
