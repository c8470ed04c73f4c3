// A small U-Net trained on images that are cut along their height, eager and captured, beside one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/parts.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

constexpr int kStepsOnImages = 6;

struct SmallUNetImpl : torch::nn::Module {
  explicit SmallUNetImpl(at::ScalarType dtype = at::kDouble) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("down", down);
    register_module("up", up);
    register_module("last", last);
    // Without the generator that ranks share.
    const torch::NoGradGuard no_grad;
    double salt = 0;
    for (at::Tensor& p : parameters()) {
      p.copy_(at::arange(p.numel(), at::kDouble).add(salt += 3).sin().mul(0.3).view(p.sizes()));
    }
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor fine = torch::relu(norm(first(x)));
    at::Tensor coarse = torch::relu(down(torch::max_pool2d(fine, 3, 2, 1)));
    coarse = at::upsample_bilinear2d(up(coarse), fine.sizes().slice(2), false);
    return last(torch::cat({fine, coarse}, 1));
  }
  torch::nn::Conv2d first{torch::nn::Conv2dOptions(2, 4, 3).padding(1)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Conv2d down{torch::nn::Conv2dOptions(4, 4, 3).padding(2).dilation(2)};
  torch::nn::ConvTranspose2d up{torch::nn::ConvTranspose2dOptions(4, 3, 2).stride(2)};
  torch::nn::Conv2d last{torch::nn::Conv2dOptions(7, 1, 5).padding(2)};
};
TORCH_MODULE(SmallUNet);

at::Tensor image_of(int step) {
  return iota({2, 2, 18, 10}).add(double(step)).mul(0.61).sin();
}

template <class Place>
std::vector<at::Tensor> trained(SmallUNet net, bool is_captured, const Place& place_image) {
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto step = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    const at::Tensor loss = net(x).square().mean();
    loss.backward();
    optimizer.step();
    return loss;
  };
  auto captured = capture(step);
  std::vector<at::Tensor> values;
  for (int i = 0; i < kStepsOnImages; ++i) {
    const at::Tensor x = place_image(image_of(i));
    values.push_back(full((is_captured ? captured(x) : step(x)).detach()));
  }
  if (is_captured) EXPECT_GT(captured.replays(), 0);
  for (const at::Tensor& p : net->parameters()) values.push_back(full(p.detach()).clone());
  return values;
}

TEST(CutImages, TrainAUNetAsOneProcessDoes) {
  const std::vector<at::Tensor> want = trained(SmallUNet(), false, [](const at::Tensor& x) { return x; });
  for (const int64_t ranks : {2, 3}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (const bool is_captured : {false, true}) {
        SmallUNet net;
        distribute_module(*net, mesh);
        const std::vector<at::Tensor> got =
            trained(net, is_captured, [&](const at::Tensor& x) -> at::Tensor { return place(x, mesh, {Shard(2)}); });
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_TRUE(at::allclose(got[i], want[i], 1e-9, 1e-11)) << ranks << " captured " << is_captured << " " << i;
        }
        const at::Tensor y = net(at::Tensor(place(image_of(0), mesh, {Shard(2)})));
        EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(2)}));
        EXPECT_LE(part_of(y).size(2), 18 / ranks);
      }
    });
  }
}

// As images are trained on one host: float, and over shared memory.
TEST(CutImages, CapturedStepsInFloatOverSharedMemoryAreEagerOnesBitForBit) {
  const auto in_float = [](const at::Tensor& x) { return x.to(at::kFloat); };
  const std::vector<at::Tensor> want = trained(SmallUNet(at::kFloat), false, in_float);
  run_ranks(2,
            [&](const Group& group) {
              const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
              const auto run = [&](bool is_captured) {
                SmallUNet net(at::kFloat);
                distribute_module(*net, mesh);
                return trained(net, is_captured,
                               [&](const at::Tensor& x) -> at::Tensor { return place(in_float(x), mesh, {Shard(2)}); });
              };
              const std::vector<at::Tensor> eager = run(false), captured = run(true);
              ASSERT_EQ(captured.size(), want.size());
              for (size_t i = 0; i < want.size(); ++i) {
                expect_equal(captured[i], eager[i], std::to_string(i));
                EXPECT_TRUE(at::allclose(eager[i], want[i], 1e-4, 1e-5)) << i;
              }
            },
            {.backend = "shm"});
}

}  // namespace
}  // namespace serried::testing
