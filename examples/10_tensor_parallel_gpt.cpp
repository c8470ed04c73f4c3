// A small GPT on 2 x 2 ranks: data parallel times tensor, sequence and loss parallel, beside data parallel alone.
// Start it with: serried run -n 4 build/bin/10_tensor_parallel_gpt
// Both end with the same loss; cut, a rank keeps half of the parameters, gradients and optimizer state.
#include "small_gpt.h"

#include <cstdio>

namespace {

using namespace small_gpt;

struct Result {
  double loss;  // of the last batch, of all ranks
  double megabytes;
};

/// Trains on a batch that is cut over `dp`; the net is cut over `tp`, if there is one.
Result train(const at::Tensor& ids, int steps, const Group& dp, const std::optional<DeviceMesh>& tp) {
  Gpt net = seeded(1, [] { return Gpt(); });
  if (tp.has_value()) parallelize_module(*net, *tp, kPlan);
  DistributedDataParallel ddp(net, {.process_group = dp});
  serried::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  auto step = capture([&](const at::Tensor& batch) {
    optimizer.zero_grad();
    at::Tensor targets = batch.slice(1, 1).flatten();
    if (tp.has_value()) targets = DTensor::from_local(targets, *tp, {Replicate()});
    const LossParallel no_gather_of_logits;
    at::Tensor loss = torch::cross_entropy_loss(ddp(batch.slice(1, 0, kContext)).flatten(0, 1), targets);
    loss.backward();
    clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    return tp.has_value() ? DTensor(loss).full_tensor() : loss;
  });
  at::Tensor loss;
  for (int i = 0; i < steps; ++i) loss = step(batch_of(ids, i, dp->getRank(), dp->getSize()));
  return {all_reduce(loss.detach(), dp, c10d::ReduceOp::AVG).item<double>(), megabytes(*net)};
}

int run(int steps) {
  at::set_num_threads(1);  // the ranks share the cores
  const Group world = new_group();
  TORCH_CHECK_VALUE(world->getSize() == 4, "start it on 4 ranks: serried run -n 4 build/bin/10_tensor_parallel_gpt");
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = world});
  const at::Tensor ids = read_ids(GPT_TEXT);

  const Result whole = train(ids, steps, world, std::nullopt);
  const Result cut = train(ids, steps, mesh.get_group("dp"), mesh["tp"]);
  if (world->getRank() == 0) {
    std::printf("after %d steps            loss      MB per rank (parameters, gradients, AdamW)\n", steps);
    std::printf("data parallel, 4         %.6f  %.2f\n", whole.loss, whole.megabytes);
    std::printf("data 2 x tensor 2        %.6f  %.2f\n", cut.loss, cut.megabytes);
  }
  return std::abs(whole.loss - cut.loss) < 1e-3 * whole.loss ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::max(1, std::atoi(argv[1])) : 100);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
