// Ranks that are processes save and load together, now and in the background: `serried run -n 2 ... FOLDER`.
#include <torch/torch.h>

#include <iostream>
#include <string>

#include "serried/checkpoint/checkpoint.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/meta.h"
#include "tests/checkpoint/dropping.h"

namespace {

using namespace serried;
using serried::testing::Dropping;

bool loads(const std::string& path, const DeviceMesh& mesh, const at::Tensor& expected, int64_t expected_step) {
  const DTensor loaded = distribute_tensor(torch::zeros_like(expected), mesh, {Shard(0)});
  int64_t step = 0;
  checkpoint::load(path, {{"x", loaded}, {"step", &step}});
  const bool is_good = loaded.full_tensor().equal(expected) && step == expected_step;
  if (!is_good) std::cerr << path << " came back otherwise\n";
  return is_good;
}

// One rank's part of a sharded training whose ranks drop and draw differently.
struct Training {
  Dropping net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;

  explicit Training(uint64_t seed) : net(seeded(seed, [] { return Dropping(); })) {
    fully_shard(*net);
    optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(0.05));
  }
  void train(int count) {
    for (int i = 0; i < count; ++i) {
      optimizer->zero_grad();
      net(torch::randn({5, 6})).square().mean().backward();
      optimizer->step();
    }
  }
  checkpoint::Contents contents() {
    return {{"model", checkpoint::state_of(*net)},
            {"optim", checkpoint::state_of(*optimizer)},
            {"random", checkpoint::random_state()}};
  }
};

at::Tensor whole(const at::Tensor& parameter) {
  const at::Tensor value = parameter.detach();
  return is_dtensor(value) ? DTensor(value).full_tensor() : value;
}

// Torch's default generator is the process's: where ranks are threads they would share it.
bool dropout_goes_on(const std::string& path, const Group& world) {
  torch::manual_seed(uint64_t(10 + world->getRank()));
  Training training(1), resumed(2);
  training.train(3);
  checkpoint::save(path, training.contents());
  training.train(10);
  torch::manual_seed(9);
  checkpoint::load(path, resumed.contents());
  resumed.train(10);
  const auto expected = training.net->parameters(), found = resumed.net->parameters();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (whole(found[i]).equal(whole(expected[i]))) continue;
    std::cerr << "parameter " << i << " went on otherwise\n";
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: FOLDER\n";
    return 2;
  }
  const std::string folder = argv[1];
  const Group world = new_group();
  const ProcessGroupGuard current(world);
  const DeviceMesh mesh = init_device_mesh("cpu", {world->getSize()});
  const at::Tensor value = torch::arange(7 * 300).reshape({7, 300});
  const DTensor x = distribute_tensor(value, mesh, {Shard(1)});
  checkpoint::save(folder + "/step1", {{"x", x}, {"step", 1}});
  checkpoint::Saving saving;
  for (int64_t step = 2; step < 6; ++step) {
    saving = checkpoint::async_save(folder + "/step" + std::to_string(step), {{"x", x + step}, {"step", step}},
                                    {.keep_last = 2});
  }
  saving.wait();
  const bool is_good = loads(folder + "/step4", mesh, value + 4, 4) && loads(folder + "/step5", mesh, value + 5, 5) &&
                       dropout_goes_on(folder + "/dropout", world);
  if (world->getRank() == 0) std::cout << (is_good ? "loaded\n" : "failed\n");
  return is_good ? 0 : 1;
}
