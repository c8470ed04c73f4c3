// Writes files for Python's safetensors, and reads those that it wrote: `write FOLDER`, `read FILE`.
#include <torch/torch.h>

#include <iostream>
#include <string>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/limits.h"

namespace {

// Values that Python can compute, too: each element is its index, plus what the tensor's name says.
struct Module : torch::nn::Module {
  at::Tensor weight, half, table, flag, number, tied;

  explicit Module(bool filled) {
    weight = register_parameter("layer_weight", values({3, 5}, at::kFloat, filled));
    half = register_parameter("half \"quoted\" ü", values({2, 3}, at::kBFloat16, filled));
    tied = register_parameter("tied", weight);
    table = register_buffer("table", values({4}, at::kLong, filled));
    flag = register_buffer("flag", values({3}, at::kBool, filled));
    number = register_buffer("number", values({}, at::kDouble, filled));
  }

  static at::Tensor values(at::IntArrayRef sizes, at::ScalarType dtype, bool filled) {
    const at::Tensor index = torch::arange(c10::multiply_integers(sizes)).reshape(sizes) + (sizes.empty() ? 7 : 0);
    return filled ? index.to(dtype) : torch::zeros(sizes, dtype);
  }
};

int write(const std::string& folder) {
  const Module module(true);
  serried::save_safetensors(folder + "/plain.safetensors", module, {.metadata = {{"note", "from C++"}}});
  serried::checkpoint::save(folder + "/checkpoint", {{"model", serried::checkpoint::state_of(module)}});
  // Each tensor in a file of its own, or two.
  serried::checkpoint::detail::format_limits().file_bytes = 40;
  serried::checkpoint::save(folder + "/many", {{"model", serried::checkpoint::state_of(module)}});
  return 0;
}

int read(const std::string& file) {
  const Module expected(true), loaded(false);
  serried::load_safetensors(file, loaded);
  for (const auto& item : expected.named_parameters()) {
    if (!loaded.named_parameters()[item.key()].equal(item.value())) {
      std::cerr << item.key() << " differs\n";
      return 1;
    }
  }
  for (const auto& item : expected.named_buffers()) {
    if (!loaded.named_buffers()[item.key()].equal(item.value())) {
      std::cerr << item.key() << " differs\n";
      return 1;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc == 3 ? argv[1] : "";
  if (mode == "write") return write(argv[2]);
  if (mode == "read") return read(argv[2]);
  std::cerr << "usage: write FOLDER, or read FILE\n";
  return 2;
}
