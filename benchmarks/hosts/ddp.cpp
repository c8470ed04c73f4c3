// Gradients go over the link while backward computes the others; only those of the last bucket have nothing to hide
// behind.
#include <algorithm>

#include "benchmarks/hosts/bench.h"

namespace serried::bench {
namespace {

constexpr int kLayers = 10, kWidth = 1000, kRows = 256;

torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int layer = 0; layer < kLayers; ++layer) model->push_back(torch::nn::Linear(kWidth, kWidth));
  return model;
}

double median_of(Contender& contender) {
  return median(contender.times);
}

}  // namespace

void data_parallel_step(HostsBench& bench) {
  constexpr long kBytes = long(kLayers) * (kWidth + 1) * kWidth * 4;
  constexpr int64_t kBucketMb = 4;
  auto alone = make_model();
  DistributedDataParallel<torch::nn::Sequential> spread(
      make_model(), {.process_group = bench.ours, .bucket_cap_mb = double(kBucketMb)});
  const at::Tensor x = torch::randn({kRows, kWidth});
  std::vector<Contender> contenders{{"ddp", [&] { spread(x).square().mean().backward(); }},
                                    {"compute", [&] { alone->forward(x).square().mean().backward(); }}};
  take_turns(contenders, bench.gloo, {.warm_up = 2, .rounds = 8, .block_us = 1});
  const double compute = median_of(contenders[1]);
  const double last_bucket = bench.least_us(double(kBucketMb << 20));
  const double reference = 1.05 * std::max(compute, bench.least_us(kBytes)) + last_bucket;
  bench.rows.push_back({"hosts", bench.where("DDP backward", kBytes), median_of(contenders[0]), reference,
                        "1.05 max(compute, link) + last bucket", 1.0});
  bench.rows.push_back(
      {"hosts", bench.where("DDP backward", kBytes), median_of(contenders[0]), compute, "compute alone", 0});
}

}  // namespace serried::bench
