// Tensors, meshes and placements made at random: whatever is saved under one loads under another.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/inspect.h"
#include "serried/checkpoint/state_dict.h"
#include "serried/tensor/dtensor.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

class Dice {
 public:
  explicit Dice(unsigned seed) : random_(seed) {}
  int64_t below(int64_t count) { return int64_t(random_() % uint64_t(count)); }
  template <class T>
  const T& one_of(const std::vector<T>& all) {
    return all[size_t(below(int64_t(all.size())))];
  }

 private:
  std::mt19937 random_;
};

at::Tensor random_tensor(Dice& dice) {
  std::vector<int64_t> sizes;
  for (int64_t dims = dice.below(4); dims > 0; --dims) sizes.push_back(dice.one_of<int64_t>({0, 1, 2, 3, 5, 8, 13}));
  const int64_t first = dice.below(100), count = c10::multiply_integers(sizes);
  const auto dtype =
      dice.one_of<at::ScalarType>({at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kShort, at::kBool});
  return (torch::arange(first, first + count) % 251).to(dtype).reshape(sizes);
}

// Balanced ones only over one axis: they do not go with another cut of the same dim.
Placements random_placements(Dice& dice, int64_t mesh_dims, int64_t tensor_dims) {
  Placements placements;
  for (int64_t i = 0; i < mesh_dims; ++i) {
    const int64_t kind = tensor_dims == 0 ? 0 : dice.below(4);
    if (kind == 0) {
      placements.push_back(Replicate());
    } else if (kind == 1 && mesh_dims == 1) {
      placements.push_back(BalancedShard(dice.below(tensor_dims)));
    } else {
      placements.push_back(Shard(dice.below(tensor_dims)));
    }
  }
  return placements;
}

struct Arrangement {
  Sizes mesh;
  std::vector<Placements> placements;
};

Arrangement random_arrangement(Dice& dice, const std::vector<at::Tensor>& tensors) {
  Arrangement made{dice.one_of<Sizes>({{1}, {2}, {3}, {4}, {2, 2}, {1, 3}, {2, 1, 2}}), {}};
  for (const at::Tensor& t : tensors) {
    made.placements.push_back(random_placements(dice, int64_t(made.mesh.size()), t.dim()));
  }
  return made;
}

std::string text_of(const Arrangement& arrangement, const std::vector<at::Tensor>& tensors) {
  std::string text = c10::str("mesh ", c10::Join("x", arrangement.mesh));
  for (size_t i = 0; i < tensors.size(); ++i) {
    text += c10::str(", ", tensors[i].toString(), tensors[i].sizes(), " ", to_string(arrangement.placements[i]));
  }
  return text;
}

checkpoint::Contents contents_of(const std::vector<at::Tensor>& tensors, const Arrangement& arrangement,
                                 const DeviceMesh& mesh) {
  checkpoint::Contents contents;
  for (size_t i = 0; i < tensors.size(); ++i) {
    contents.push_back({c10::str("t", i), place(tensors[i], mesh, arrangement.placements[i])});
  }
  return contents;
}

void save_and_load(Dice& dice, const std::string& path) {
  std::vector<at::Tensor> tensors, zeros;
  for (int64_t i = 1 + dice.below(5); i > 0; --i) tensors.push_back(random_tensor(dice));
  for (const at::Tensor& t : tensors) zeros.push_back(torch::zeros_like(t));
  const Arrangement from = random_arrangement(dice, tensors), to = random_arrangement(dice, tensors);
  SCOPED_TRACE(text_of(from, tensors) + "\n  into " + text_of(to, tensors));
  const bool is_async = dice.below(2) == 0, verifies = dice.below(4) > 0;
  on_mesh(from.mesh, [&](const DeviceMesh& mesh) {
    const checkpoint::Contents contents = contents_of(tensors, from, mesh);
    is_async ? checkpoint::async_save(path, contents).wait() : checkpoint::save(path, contents);
  });
  EXPECT_EQ(checkpoint::detail::verify(path), std::vector<std::string>());
  on_mesh(to.mesh, [&](const DeviceMesh& mesh) {
    const checkpoint::Contents loaded = contents_of(zeros, to, mesh);
    checkpoint::load(path, loaded, {.verify = verifies});
    const checkpoint::StateDict state = checkpoint::get_state(loaded);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::string name = c10::str("t", i);
      expect_equal(state.at(name).tensors.at(name), tensors[i], name);
    }
  });
}

TEST(CheckpointRandom, AnyLayoutLoadsIntoAnyOther) {
  constexpr int kCases = 150;
  const Folder folder;
  Dice dice(11);
  for (int i = 0; i < kCases && !HasFailure(); ++i) {
    const SmallLimits limits({.file_bytes = 100 + dice.below(2000),
                              .block_bytes = int64_t(16) << dice.below(5),
                              .short_run = 1 + dice.below(64)});
    save_and_load(dice, folder / "c");
  }
}

}  // namespace
}  // namespace serried::testing
