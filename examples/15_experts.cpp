// A small mixture of experts on 4 ranks: 8 experts, two on each rank, and the rest data parallel; beside one process.
// Start it with: serried run -n 4 build/bin/15_experts
// Both print the same loss. A rank keeps a quarter of the experts.
#include <serried/serried.h>

#include <cstdio>

namespace {

using namespace serried;
namespace nn = torch::nn;

constexpr int64_t kExperts = 8, kWidth = 16, kTokens = 64;

/// Weights of all experts, [experts, in, out]; on a mesh each rank has its own.
struct ExpertsImpl : nn::Module {
  at::Tensor up = register_parameter("up", torch::randn({kExperts, kWidth, 4 * kWidth}) * 0.2);
  at::Tensor down = register_parameter("down", torch::randn({kExperts, 4 * kWidth, kWidth}) * 0.1);

  at::Tensor forward(const DispatchedTokens& sent) {
    return expert_linear(torch::gelu(expert_linear(sent.tokens, sent, up)), sent, down);
  }
};
TORCH_MODULE(Experts);

/// What all ranks share.
struct AroundImpl : nn::Module {
  nn::Linear in{register_module("in", nn::Linear(4, kWidth))};
  nn::Linear router{register_module("router", nn::Linear(nn::LinearOptions(kWidth, kExperts).bias(false)))};
  nn::Linear out{register_module("out", nn::Linear(kWidth, 1))};

  /// Predictions and logits.
  std::vector<at::Tensor> forward(const at::Tensor& x,
                                  const std::function<at::Tensor(at::Tensor, at::Tensor)>& experts) {
    const at::Tensor tokens = torch::tanh(in(x)), logits = router(tokens);
    return {out(tokens + experts(tokens, logits)), logits};
  }
};
TORCH_MODULE(Around);

/// What is asked of a point depends on its first number: something for experts.
struct Batch {
  at::Tensor x, y;
};
Batch batch_of(int step, int rank) {
  return seeded(uint64_t(1000 * step + rank), [] {
    const at::Tensor x = torch::randn({kTokens, 4});
    const at::Tensor y =
        torch::where(x.select(1, 0) > 0, torch::sin(3 * x.select(1, 1)), x.select(1, 2) * x.select(1, 3));
    return Batch{x, y.unsqueeze(1)};
  });
}

struct Result {
  double loss;       // of the last step, over all batches
  double megabytes;  // of this rank's experts
  double busiest;    // share of all choices that the most chosen expert has
};

/// Trains on `num_batches` batches per step, spread over the ranks of `mesh`.
Result train(const DeviceMesh& mesh, int num_batches, int steps) {
  const Group group = mesh.get_group();
  Around around = seeded(1, [] { return Around(); });
  Experts experts = seeded(2, [] { return Experts(); });
  distribute_parameter(experts->up, mesh, {Shard(0)});
  distribute_parameter(experts->down, mesh, {Shard(0)});
  DistributedDataParallel<Around> ddp(around, {.process_group = group});
  std::vector<at::Tensor> parameters = around->parameters();
  for (const at::Tensor& p : experts->parameters()) parameters.push_back(p);
  torch::optim::AdamW optimizer(parameters, 3e-3);
  const int mine = num_batches / group->getSize();
  MoeLoad load;
  const auto apply = [&](const at::Tensor& x, const at::Tensor& logits) {
    return moe(x, logits, [&](const DispatchedTokens& sent) { return experts(sent); },
               {.mesh = mesh, .top_k = 2, .load = &load, .average_gradients = true});
  };
  at::Tensor loss;
  for (int step = 0; step < steps; ++step) {
    std::vector<at::Tensor> xs, ys;
    for (int i = 0; i < mine; ++i) {
      const Batch batch = batch_of(step, group->getRank() * mine + i);
      xs.push_back(batch.x);
      ys.push_back(batch.y);
    }
    optimizer.zero_grad();
    const std::vector<at::Tensor> result = ddp(at::cat(xs), std::function<at::Tensor(at::Tensor, at::Tensor)>(apply));
    loss = torch::mse_loss(result[0], at::cat(ys));
    (loss + 0.01 * load_balancing_loss(result[1], load, {.mesh = mesh})).backward();
    clip_grad_norm_(parameters, 1.0);
    optimizer.step();
  }
  double bytes = 0;
  for (const at::Tensor& p : experts->parameters()) bytes += double(DTensor(p).to_local().nbytes());
  const at::Tensor chosen = all_reduce(load.tokens_per_expert, group);
  return {all_reduce(loss.detach(), group, c10d::ReduceOp::AVG).item<double>(), bytes * 1e-6,
          chosen.max().item<double>() / chosen.sum().item<double>()};
}

int run(int steps) {
  at::set_num_threads(1);  // the ranks share the cores
  const Group world = new_group();
  TORCH_CHECK_VALUE(world->getSize() == 4, "start it on 4 ranks: serried run -n 4 build/bin/15_experts");
  const DeviceMesh grid = init_device_mesh("cpu", {4, 1}, {"copies", "alone"}, {.group = world});
  const Result alone = train(grid["alone"], 4, steps);  // every rank the same, on all batches
  const Result cut = train(grid["copies"], 4, steps);
  const bool is_same = std::abs(alone.loss - cut.loss) < 1e-4 * alone.loss;
  if (world->getRank() == 0) {
    std::printf("after %d steps        loss      MB of experts per rank  share of the busiest expert\n", steps);
    std::printf("one process      %.6f  %22.3f  %27.2f\n", alone.loss, alone.megabytes, alone.busiest);
    std::printf("experts over 4   %.6f  %22.3f  %27.2f\n", cut.loss, cut.megabytes, cut.busiest);
    std::printf("The same loss: %s\n", is_same ? "yes" : "no");
  }
  return is_same ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::max(1, std::atoi(argv[1])) : 300);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
