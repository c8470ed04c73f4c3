// Captures a GPT under the fake backend, whose collectives need no peers.
#include "tools/serried/plan_gpt.h"

#include <torch/torch.h>

#include <map>

#include "serried/base/error.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/making/modules.h"

namespace serried::tools {
namespace {

namespace nn = torch::nn;

constexpr int64_t kMaxRanks = 10'000'000;  // for which the mesh takes 4 GiB
constexpr int kMaxCalls = 10;              // until a step is captured: buckets are rebuilt once before

nn::LayerNorm layer_norm(int64_t width) {
  return nn::LayerNorm(nn::LayerNormOptions({width}));
}

// Where the parts of a cut model meet: a sum over "tp" here, or in backward.
at::Tensor whole(const at::Tensor& x) {
  return is_dtensor(x) ? at::Tensor(DTensor(x).redistribute({Replicate()})) : x;
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
    x = x + whole(attention(norm_1(x)));
    return x + whole(down(torch::gelu(up(norm_2(x)))));
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
void cut_block(const std::string&, nn::Module& module, const DeviceMesh& tp) {
  auto* block = module.as<BlockImpl>();
  if (block == nullptr) return;
  for (const at::Tensor& t : {block->qkv->weight, block->up->weight, block->up->bias}) {
    distribute_parameter(t, tp, {Shard(0)});
  }
  for (const at::Tensor& t : {block->out->weight, block->down->weight}) distribute_parameter(t, tp, {Shard(1)});
}

struct Division {
  int64_t number;
  const char* what;
  int64_t parts;
  const char* into;
  const char* option;  // that can be set right
};

void check(const PlanWords& words) {
  for (int64_t number : {words.ranks, words.tensor_parallel, words.layers, words.width, words.heads, words.context,
                         words.vocabulary, words.batch}) {
    if (number >= 1) continue;
    raise<c10::ValueError>({"plan", c10::str("there is no model or mesh of size ", number), "give numbers from 1 on"});
  }
  if (words.ranks > kMaxRanks) {
    raise<c10::ValueError>({"plan", c10::str(words.ranks, " ranks are more than a mesh can list here"),
                            c10::str("pass up to ", kMaxRanks, " as --ranks")});
  }
  const Division divisions[] = {
      {words.ranks, "ranks", words.tensor_parallel, "groups of tensor-parallel ones", "--ranks"},
      {words.width, "numbers of width", words.heads, "heads", "--width"},
      {words.heads, "heads", words.tensor_parallel, "tensor-parallel parts", "--heads"},
  };
  for (const Division& division : divisions) {
    if (division.number % division.parts == 0) continue;
    raise<c10::ValueError>(
        {"plan",
         c10::str(division.number, " ", division.what, " do not divide by ", division.parts, ", into ", division.into),
         c10::str("pass a multiple of ", division.parts, " as ", division.option)});
  }
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

}  // namespace

Plan make_plan(const PlanWords& words, const OnStage& on_stage) {
  check(words);
  on_stage(0, "groups of the mesh");
  const Group world = new_group("fake", {.rank = 0, .world_size = int(words.ranks)});
  const DeviceMesh mesh = init_device_mesh("cpu", {words.ranks / words.tensor_parallel, words.tensor_parallel},
                                           {"dp", "tp"}, {.group = world});
  on_stage(1, "the model");
  torch::manual_seed(1);
  Gpt net(words);
  Plan plan{.graph = {}, .report = {}, .mesh = mesh.to_string(), .num_parameters = count_elements(*net)};
  const bool is_cut = words.tensor_parallel > 1;
  if (is_cut) distribute_module(*net, mesh["tp"], cut_block);
  DistributedDataParallel ddp(net, {.mesh = mesh["dp"]});
  AdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(1e-3));
  const auto placed = [&](const at::Tensor& t) -> at::Tensor {
    return is_cut ? at::Tensor(DTensor::from_local(t, mesh["tp"], {Replicate()})) : t;
  };
  auto step = capture([&](const at::Tensor& ids, const at::Tensor& next) {
    optimizer.zero_grad();
    const at::Tensor logits = ddp(placed(ids));
    at::Tensor loss = torch::cross_entropy_loss(logits.flatten(0, 1), placed(next).flatten());
    loss.backward();
    optimizer.step();
    return loss;
  });
  on_stage(2, "calls of the step, until it is captured");
  for (int i = 0; i < kMaxCalls && step.captures() == 0; ++i) {
    const auto letters = [&] { return at::randint(words.vocabulary, {words.batch, words.context}, at::kLong); };
    step(letters(), letters());
  }
  on_stage(3, "the report");
  plan.graph = step.graph();
  name_axes(plan.graph, mesh);
  plan.report = report(plan.graph);
  return plan;
}

}  // namespace serried::tools
