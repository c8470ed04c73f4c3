// Ranks that are processes save and load together, now and in the background: `serried run -n 2 ... FOLDER`.
#include <torch/torch.h>

#include <iostream>
#include <string>

#include "serried/checkpoint/checkpoint.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/mesh/mesh.h"
#include "serried/tensor/dtensor.h"

namespace {

using namespace serried;

bool loads(const std::string& path, const DeviceMesh& mesh, const at::Tensor& expected, int64_t expected_step) {
  const DTensor loaded = distribute_tensor(torch::zeros_like(expected), mesh, {Shard(0)});
  int64_t step = 0;
  checkpoint::load(path, {{"x", loaded}, {"step", &step}});
  const bool is_good = loaded.full_tensor().equal(expected) && step == expected_step;
  if (!is_good) std::cerr << path << " came back otherwise\n";
  return is_good;
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
  const bool is_good = loads(folder + "/step4", mesh, value + 4, 4) && loads(folder + "/step5", mesh, value + 5, 5);
  if (world->getRank() == 0) std::cout << (is_good ? "loaded\n" : "failed\n");
  return is_good ? 0 : 1;
}
