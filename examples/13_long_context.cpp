// A small GPT on a sequence of 2048 letters that 4 ranks hold together: context parallel by each way, beside one rank.
// Start it with: serried run -n 4 build/bin/13_long_context
// All end with the same loss; a rank keeps the activations of a quarter of the letters.
#include "small_gpt.h"

#include <cstdio>

namespace {

using namespace small_gpt;

constexpr int64_t kLength = 2048;

// The blocks of small_gpt with a table for more letters, which is asked for the places it is told.
struct LongGptImpl : nn::Module {
  nn::Embedding letters = register_module("letters", nn::Embedding(256, kWidth));
  nn::Embedding places = register_module("places", nn::Embedding(kLength, kWidth));
  nn::Sequential blocks = register_module("blocks", nn::Sequential(Block(), Block()));
  nn::LayerNorm norm = register_module("norm", layer_norm());
  nn::Linear head = register_module("head", nn::Linear(kWidth, 256));

  at::Tensor forward(const at::Tensor& ids, const at::Tensor& positions) {
    return head(norm(blocks->forward(letters(ids) + places(positions))));
  }
};
TORCH_MODULE(LongGpt);

/// The mean loss of the last step. Without a mesh every rank has the whole sequence.
double train(const at::Tensor& text, int steps, const std::optional<DeviceMesh>& cp, AttentionWay way) {
  LongGpt net = seeded(1, [] { return LongGpt(); });
  std::optional<DistributedDataParallel<LongGpt>> ddp;
  if (cp) ddp.emplace(net, DDPOptions{.process_group = cp->get_group()});
  torch::optim::AdamW optimizer(net->parameters(), 1e-3);
  at::Tensor loss;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor ids = text.narrow(0, step, kLength).unsqueeze(0).clone();
    const at::Tensor targets = text.narrow(0, step + 1, kLength).unsqueeze(0).clone();
    const at::Tensor positions = at::arange(kLength);
    // Inside, these three are this rank's letters, and attention sees those of all ranks.
    std::optional<ContextParallel> scope;
    if (cp) {
      scope.emplace(*cp,
                    ContextParallelOptions{.buffers = {ids, targets, positions}, .seq_dims = {1, 1, 0}, .rotate = way});
    }
    optimizer.zero_grad();
    const at::Tensor logits = ddp ? (*ddp)(ids, positions) : net(ids, positions);
    loss = torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
    loss.backward();
    optimizer.step();
  }
  if (!cp) return loss.item<double>();
  return all_reduce(loss.detach(), cp->get_group(), c10d::ReduceOp::AVG).item<double>();
}

at::Tensor long_text(const std::string& path, int steps) {
  const at::Tensor ids = read_ids(path);
  const int64_t needed = kLength + steps + 1;
  return ids.repeat({(needed + ids.size(0) - 1) / ids.size(0)}).narrow(0, 0, needed).contiguous();
}

int run(int steps) {
  at::set_num_threads(1);  // the ranks share the cores
  const Group world = new_group();
  TORCH_CHECK_VALUE(world->getSize() == 4, "start it on 4 ranks: serried run -n 4 build/bin/13_long_context");
  const DeviceMesh cp = init_device_mesh("cpu", {4}, {"cp"}, {.group = world});
  const at::Tensor text = long_text(GPT_TEXT, steps);
  const double alone = train(text, steps, std::nullopt, AttentionWay::automatic);
  bool is_same = true;
  if (world->getRank() == 0) std::printf("%-10s loss %.5f\n", "one rank", alone);
  for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
    const double loss = train(text, steps, cp, way);
    is_same = is_same && std::abs(loss - alone) < 1e-4;
    if (world->getRank() == 0) std::printf("%-10s loss %.5f\n", std::string(to_string(way)).c_str(), loss);
  }
  if (world->getRank() == 0) std::printf("The same loss: %s\n", is_same ? "yes" : "no");
  return is_same ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::atoi(argv[1]) : 4);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
