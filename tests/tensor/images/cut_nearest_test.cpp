// Nearest resizes of images that are cut along their space, by scales that say something else than the sizes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

struct NearestCase {
  at::Tensor image;  // pixels are numbers of their own
  bool channels_last = false;
  bool is_exact = false;
  Sizes outputs;
  std::vector<std::optional<double>> scales;

  std::string text() const {
    std::string of_scales;
    for (const auto& scale : scales) of_scales += " " + (scale ? std::to_string(*scale) : std::string("none"));
    return c10::str(image.scalar_type(), " ", image.sizes(), " to ", outputs, " by", of_scales,
                    channels_last ? " channels last" : "", is_exact ? " exact" : "");
  }
};

at::Tensor resized(const NearestCase& by, const at::Tensor& x) {
  const auto& s = by.scales;
  if (by.outputs.size() == 1) {
    return by.is_exact ? at::_upsample_nearest_exact1d(x, by.outputs, s[0])
                       : at::upsample_nearest1d(x, by.outputs, s[0]);
  }
  if (by.outputs.size() == 2) {
    return by.is_exact ? at::_upsample_nearest_exact2d(x, by.outputs, s[0], s[1])
                       : at::upsample_nearest2d(x, by.outputs, s[0], s[1]);
  }
  return by.is_exact ? at::_upsample_nearest_exact3d(x, by.outputs, s[0], s[1], s[2])
                     : at::upsample_nearest3d(x, by.outputs, s[0], s[1], s[2]);
}

// The dim that comes after batch and channels, and so on, where channels come last.
at::Tensor channels_to_end(const at::Tensor& x) {
  return x.movedim(1, -1).contiguous();
}

std::pair<at::Tensor, at::Tensor> with_gradient(const NearestCase& by, at::Tensor x, const at::Tensor& gradient) {
  x = x.detach().requires_grad_();
  const at::Tensor y = resized(by, by.channels_last ? x.movedim(-1, 1) : x);
  y.backward(gradient);
  return {full(y.detach()), full(x.grad())};
}

class RandomCases {
 public:
  explicit RandomCases(unsigned seed) : random_(seed) {}

  NearestCase draw() {
    NearestCase drawn;
    const size_t ndim = size_t(between(1, 3));
    drawn.channels_last = ndim > 1 && between(0, 2) == 0;
    drawn.is_exact = between(0, 2) == 0;
    Sizes sizes{between(1, 2), between(1, 6)};
    const int64_t most = ndim == 1 ? 300 : ndim == 2 ? 90 : 12;
    for (size_t d = 0; d < ndim; ++d) {
      sizes.push_back(between(1, between(0, 1) == 0 ? 9 : most));
      draw_scale(sizes.back(), drawn);
    }
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    static constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kDouble};
    drawn.image = at::arange(count, kTypes[between(0, 2)]).view(sizes);
    return drawn;
  }

 private:
  // Near 1, near 2, or any; of the call or of a caller who says something else.
  void draw_scale(int64_t size, NearestCase& drawn) {
    static constexpr double kCentres[] = {1, 2, 0.5, 1.3, 2.7};
    const double scale = kCentres[between(0, 4)] + double(between(-30, 60)) / 600;
    int64_t outputs = std::max<int64_t>(int64_t(double(size) * scale), 1);
    if (between(0, 7) == 0) outputs = size * between(1, 2);
    drawn.outputs.push_back(outputs);
    drawn.scales.push_back(between(0, 4) == 0 ? std::nullopt : std::optional(scale));
  }

  int64_t between(int64_t low, int64_t high) { return low + int64_t(random_() % uint64_t(high - low + 1)); }

  std::mt19937_64 random_;
};

void expect_as_whole(const std::vector<NearestCase>& cases) {
  struct Wanted {
    at::Tensor gradient, y, x_gradient;
  };
  std::vector<Wanted> wanted;
  std::vector<at::Tensor> images;
  for (const NearestCase& each : cases) {
    images.push_back(each.channels_last ? channels_to_end(each.image) : each.image);
    Sizes sizes{each.image.size(0), each.image.size(1)};
    sizes.insert(sizes.end(), each.outputs.begin(), each.outputs.end());
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    const at::Tensor gradient = at::arange(count, at::kDouble).remainder(7).view(sizes).to(each.image.scalar_type());
    const auto [y, x_gradient] = with_gradient(each, images.back(), gradient);
    wanted.push_back({gradient, y, x_gradient});
  }
  for (const int ranks : {2, 3}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (size_t i = 0; i < cases.size(); ++i) {
        const NearestCase& each = cases[i];
        for (size_t d = 0; d < each.outputs.size(); ++d) {
          const Placement of_image = Shard(int64_t(d) + (each.channels_last ? 1 : 2)),
                          of_result = Shard(int64_t(d) + 2);
          const auto [y, x_gradient] =
              with_gradient(each, place(images[i], mesh, {of_image}), place(wanted[i].gradient, mesh, {of_result}));
          const std::string what = c10::str(each.text(), " ", to_string({of_image}), " on ", ranks);
          expect_equal(y, wanted[i].y, what);
          expect_equal(x_gradient, wanted[i].x_gradient, "gradient " + what);
        }
      }
    });
  }
}

at::Tensor numbered(at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble) {
  return iota(sizes, dtype);
}

// By the kernels of LibTorch that go by the scale where sizes are equal or doubled, and those that do not.
TEST(CutNearest, ScalesNearOneAndTwoAreExact) {
  std::vector<NearestCase> cases;
  for (const bool is_exact : {false, true}) {
    for (const bool last : {false, true}) {
      for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
        cases.push_back({numbered({1, 4, 100, 120}, dtype), last, is_exact, {200, 240}, {2.005, 2.005}});
        cases.push_back({numbered({1, 4, 100, 120}, dtype), last, is_exact, {100, 120}, {1.005, 1.003}});
        cases.push_back({numbered({1, 3, 100, 120}, dtype), last, is_exact, {100, 240}, {1.005, 2.003}});
        cases.push_back({numbered({1, 4, 6, 7}, dtype), last, is_exact, {12, 14}, {2.1, 2.1}});
        cases.push_back({numbered({1, 4, 64, 8}, dtype), last, is_exact, {120, 8}, {1.9, 1.1}});
        cases.push_back({numbered({1, 4, 64, 8}, dtype), last, is_exact, {121, 8}, {1.9, 1.1}});
        cases.push_back({numbered({1, 2, 6, 6, 6}, dtype), last, is_exact, {12, 12, 12}, {2.1, 2.1, 2.1}});
        cases.push_back({numbered({1, 5, 6, 6, 6}, dtype), last, is_exact, {12, 6, 12}, {2.1, 1.1, 2.1}});
      }
    }
    cases.push_back({numbered({1, 6, 1, 10, 8}), true, is_exact, {2, 10, 21}, {2.03, 1.08, 2.68}});
    cases.push_back({numbered({2, 4, 8, 1, 1}), true, is_exact, {8, 1, 2}, {1.01, std::nullopt, 2.79}});
    cases.push_back({numbered({1, 3, 20}), false, is_exact, {40}, {2.04}});
    cases.push_back({numbered({1, 3, 9}), false, is_exact, {9}, {1.1}});
  }
  expect_as_whole(cases);
}

TEST(CutNearest, RandomScalesAreExact) {
  const unsigned seed = 20261;
  RandomCases random(seed);
  std::vector<NearestCase> cases;
  for (int i = 0; i < 150; ++i) cases.push_back(random.draw());
  SCOPED_TRACE(c10::str("seed ", seed));
  expect_as_whole(cases);
}

}  // namespace
}  // namespace serried::testing
