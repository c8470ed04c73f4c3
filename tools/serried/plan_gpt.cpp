// Captures a GPT under the fake backend, whose collectives need no peers.
#include "tools/serried/plan_gpt.h"

#include <torch/torch.h>

#include "serried/base/error.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/modules.h"

namespace serried::tools {
namespace {

namespace nn = torch::nn;

constexpr int kMaxCalls = 10;  // until a step is captured: buckets are rebuilt once before

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
void cut_block(const std::string&, nn::Module& module, const DeviceMesh& tp) {
  auto* block = module.as<BlockImpl>();
  if (block == nullptr) return;
  for (const at::Tensor& t : {block->qkv->weight, block->up->weight, block->up->bias}) {
    distribute_parameter(t, tp, {Shard(0)});
  }
  for (const at::Tensor& t : {block->out->weight, block->down->weight}) distribute_parameter(t, tp, {Shard(1)});
}

void check(const PlanWords& words) {
  for (int64_t number : {words.ranks, words.tensor_parallel, words.layers, words.width, words.heads, words.context,
                         words.vocabulary, words.batch}) {
    if (number < 1) {
      raise<c10::ValueError>(
          {"plan", c10::str("there is no model or mesh of size ", number), "give numbers from 1 on"});
    }
  }
  if (words.ranks % words.tensor_parallel != 0) {
    raise<c10::ValueError>(
        {"plan", c10::str(words.ranks, " ranks are not a multiple of ", words.tensor_parallel, " tensor-parallel ones"),
         c10::str("pass --ranks ",
                  words.ranks / words.tensor_parallel * words.tensor_parallel + words.tensor_parallel)});
  }
  if (words.heads % words.tensor_parallel != 0 || words.width % words.heads != 0) {
    raise<c10::ValueError>({"plan",
                            c10::str(words.heads, " heads divide neither a width of ", words.width,
                                     " nor themselves over ", words.tensor_parallel, " tensor-parallel ranks"),
                            "pass --heads that divide --width, and --tensor-parallel that divides --heads"});
  }
}

// "dp" says more than the name that a group is registered under.
void name_axes(graph::GraphReport& report, const DeviceMesh& mesh) {
  for (graph::CollectiveUse& use : report.collectives) {
    for (const std::string& axis : mesh.dim_names()) {
      if (use.group == mesh.get_group(axis)->getGroupName()) use.group = axis;
    }
  }
}

int64_t count_elements(const nn::Module& module) {
  int64_t count = 0;
  for (const at::Tensor& parameter : module.parameters()) count += parameter.numel();
  return count;
}

}  // namespace

Plan make_plan(const PlanWords& words) {
  check(words);
  const Group world = new_group("fake", {.rank = 0, .world_size = int(words.ranks)});
  const DeviceMesh mesh = init_device_mesh("cpu", {words.ranks / words.tensor_parallel, words.tensor_parallel},
                                           {"dp", "tp"}, {.group = world});
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
  for (int i = 0; i < kMaxCalls && step.captures() == 0; ++i) {
    const at::Tensor ids = at::randint(words.vocabulary, {words.batch, words.context}, at::kLong);
    step(ids, ids);
  }
  plan.graph = step.graph();
  plan.report = report(plan.graph);
  name_axes(plan.report, mesh);
  return plan;
}

}  // namespace serried::tools
