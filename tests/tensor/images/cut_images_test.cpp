// Convolutions, pools and resizes of images that are cut along their space, against the unsharded op.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dispatch/explain.h"
#include "serried/tensor/guards.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Op = std::function<Tensors(const Tensors&)>;

struct ImageCase {
  std::string name;
  Tensors inputs;  // the image first
  Op op;
};

// Different everywhere, without the generator that ranks share.
at::Tensor wavy(at::IntArrayRef sizes, double salt = 0, at::ScalarType dtype = at::kDouble) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return (at::arange(count, at::kDouble) * 1.7 + salt).sin().mul(2).view(sizes).to(dtype);
}

// Results, then the gradients of all floating inputs.
Tensors with_gradients(Tensors inputs, const Op& op) {
  for (at::Tensor& t : inputs) t = t.detach().requires_grad_(t.is_floating_point());
  Tensors results = op(inputs);
  at::Tensor loss;
  for (const at::Tensor& result : results) {
    if (!result.requires_grad()) continue;
    const at::Tensor term = (result * result * 0.5 + result).sum();
    loss = loss.defined() ? loss + term : term;
  }
  loss.backward();
  for (at::Tensor& result : results) result = result.detach();
  for (const at::Tensor& t : inputs) results.push_back(t.grad());
  return results;
}

struct Cut {
  Sizes mesh;
  Placements image;
};

// In space; channels go by the rule.
bool is_cut_alike(const Placements& result, const Placements& image, int64_t ndim) {
  for (size_t axis = 0; axis < image.size(); ++axis) {
    if (image[axis].dim() >= std::min<int64_t>(2, ndim - 2) && result[axis] != image[axis]) return false;
  }
  return true;
}

// Every case on one start of the ranks; all other inputs are replicated. Results stay cut as their image is: only
// small ones, which many of the cases are, are cheaper to gather.
void expect_as_whole(const std::vector<ImageCase>& cases, const std::vector<Cut>& cuts) {
  std::vector<Tensors> wanted;
  for (const ImageCase& each : cases) wanted.push_back(with_gradients(each.inputs, each.op));
  for (const Cut& cut : cuts) {
    on_mesh(cut.mesh, [&](const DeviceMesh& mesh) {
      size_t num_cut = 0;
      for (size_t i = 0; i < cases.size(); ++i) {
        Tensors placed;
        for (const at::Tensor& t : cases[i].inputs) {
          placed.push_back(place(t, mesh, placed.empty() ? cut.image : Placements(cut.image.size())));
        }
        const Tensors got = with_gradients(placed, cases[i].op);
        ASSERT_EQ(got.size(), wanted[i].size());
        num_cut += is_cut_alike(DTensor(got[0]).placements(), cut.image, cases[i].inputs[0].dim());
        for (size_t r = 0; r < got.size(); ++r) {
          const std::string what =
              c10::str(cases[i].name, " ", to_string(cut.image), " on ", mesh.size(), " result ", r);
          expect_close(full(got[r]), wanted[i][r], what);
        }
      }
      if (mesh.size() > 1) EXPECT_GT(3 * num_cut, cases.size()) << to_string(cut.image);
    });
  }
}

std::vector<Cut> along(int64_t dim) {
  return {{{1}, {Shard(dim)}}, {{2}, {Shard(dim)}}, {{3}, {Shard(dim)}}, {{4}, {Shard(dim)}}};
}

std::vector<ImageCase> convolutions(bool transposed) {
  std::vector<ImageCase> cases;
  for (const int64_t stride : {1, 2, 3}) {
    for (const int64_t dilation : {1, 2}) {
      for (const int64_t padding : {0, 1, 2}) {
        for (const int64_t kernel : {1, 2, 3, 5}) {
          for (const int64_t size : {1, 3, 7, 10}) {
            const int64_t extent = (kernel - 1) * dilation + 1;
            if (!transposed && size + 2 * padding < extent) continue;
            const int64_t extra = transposed && std::max(stride, dilation) > 1 ? 1 : 0;
            if (transposed && (size - 1) * stride - 2 * padding + extent + extra < 1) continue;
            const Op op = [=](const Tensors& x) {
              return Tensors{
                  at::convolution(x[0], x[1], x[2], {stride}, {padding}, {dilation}, transposed, {extra}, 1)};
            };
            const Sizes weight = transposed ? Sizes{2, 3, kernel} : Sizes{3, 2, kernel};
            cases.push_back({c10::str("size ", size, " kernel ", kernel, " stride ", stride, " padding ", padding,
                                      " dilation ", dilation),
                             {wavy({2, 2, size}), wavy(weight, 1), wavy({3}, 2)},
                             op});
          }
        }
      }
    }
  }
  return cases;
}

TEST(CutImages, ConvolutionsOfAnyStrideDilationAndPaddingAreExact) {
  const std::vector<ImageCase> cases = convolutions(/*transposed=*/false);
  EXPECT_GT(cases.size(), 150u);
  expect_as_whole(cases, along(2));
}

TEST(CutImages, TransposedConvolutionsAreExact) {
  const std::vector<ImageCase> cases = convolutions(/*transposed=*/true);
  EXPECT_GT(cases.size(), 150u);
  expect_as_whole(cases, along(2));
}

// Height and width, both at once, beside a cut batch or cut channels, depth; groups.
std::vector<Cut> planes(int64_t first) {
  return {{{3}, {Shard(first)}},
          {{3}, {Shard(first + 1)}},
          {{2, 2}, {Shard(first), Shard(first + 1)}},
          {{2, 2}, {Shard(first + 1), Shard(first)}},
          {{2, 2}, {Shard(first), Shard(first)}},
          {{2, 2}, {Shard(0), Shard(first)}},
          {{2, 2}, {Shard(first), Shard(1)}},
          {{1, 3}, {Shard(first), Shard(first + 1)}}};
}

TEST(CutImages, ConvolutionsInTwoAndThreeDimsAreExact) {
  std::vector<ImageCase> cases;
  const auto add = [&](const std::string& name, const Tensors& inputs, const Op& op) {
    cases.push_back({name, inputs, op});
  };
  add("same", {wavy({3, 4, 7, 5}), wavy({6, 4, 3, 3}, 1), wavy({6}, 2)},
      [](const Tensors& x) { return Tensors{at::conv2d(x[0], x[1], x[2], 1, 1)}; });
  add("unlike dims", {wavy({3, 4, 9, 6}), wavy({6, 4, 4, 2}, 1), wavy({6}, 2)}, [](const Tensors& x) {
    return Tensors{at::conv2d(x[0], x[1], x[2], {2, 1}, Sizes{2, 1}, {1, 2})};
  });
  add("groups", {wavy({2, 4, 6, 7}), wavy({4, 2, 3, 2}, 1)}, [](const Tensors& x) {
    return Tensors{at::conv2d(x[0], x[1], {}, 1, Sizes{1, 0}, 1, 2)};
  });
  add("by channel", {wavy({2, 4, 6, 7}), wavy({4, 1, 5, 5}, 1), wavy({4}, 2)},
      [](const Tensors& x) { return Tensors{at::conv2d(x[0], x[1], x[2], 1, 2, 1, 4)}; });
  add("transposed", {wavy({2, 4, 4, 5}), wavy({4, 3, 3, 2}, 1), wavy({3}, 2)}, [](const Tensors& x) {
    return Tensors{at::conv_transpose2d(x[0], x[1], x[2], {2, 3}, {1, 0}, {1, 2}, 1, {1, 1})};
  });
  add("transposed groups", {wavy({2, 4, 4, 5}), wavy({4, 3, 2, 2}, 1)},
      [](const Tensors& x) { return Tensors{at::conv_transpose2d(x[0], x[1], {}, 2, 0, 0, 2)}; });
  add("depth", {wavy({2, 4, 5, 4, 3}), wavy({2, 4, 3, 3, 2}, 1), wavy({2}, 2)}, [](const Tensors& x) {
    return Tensors{at::conv3d(x[0], x[1], x[2], {1, 2, 1}, 1)};
  });
  expect_as_whole(cases, planes(2));
  const ImageCase volume = cases.back();
  expect_as_whole({volume}, {{{3}, {Shard(4)}}, {{2, 2}, {Shard(4), Shard(3)}}});
}

// Four ranks have some images of three rows, and one of them nothing.
std::vector<ImageCase> pools_of(int64_t kernel, int64_t stride, int64_t padding, bool round_up) {
  std::vector<ImageCase> cases;
  for (const int64_t size : {7, 3}) {
    const std::string name =
        c10::str(size, " rows, kernel ", kernel, " stride ", stride, " padding ", padding, round_up ? " up" : "");
    const Tensors image = {wavy({2, 2, size, 6})};
    for (const int64_t dilation : {1, 2}) {
      if (size + 2 * padding < (kernel - 1) * dilation + 1) continue;
      cases.push_back({c10::str("max ", name, " dilation ", dilation), image, [=](const Tensors& x) {
                         const auto [y, at] = at::max_pool2d_with_indices(x[0], {kernel, 2}, {stride, 2}, {padding, 1},
                                                                          {dilation, 1}, round_up);
                         return Tensors{y, at};
                       }});
    }
    if (size + 2 * padding < kernel) continue;
    for (const bool counts_padding : {false, true}) {
      cases.push_back(
          {"average " + name, image, [=](const Tensors& x) {
             return Tensors{at::avg_pool2d(x[0], {kernel, 2}, {stride, 2}, {padding, 1}, round_up, counts_padding)};
           }});
    }
  }
  return cases;
}

TEST(CutImages, PoolsAreExact) {
  std::vector<ImageCase> cases;
  for (const int64_t kernel : {2, 3, 5}) {
    for (const int64_t stride : {1, 2, 3}) {
      for (const int64_t padding : {0, 1}) {
        for (const bool round_up : {false, true}) {
          for (ImageCase& each : pools_of(kernel, stride, padding, round_up)) cases.push_back(std::move(each));
        }
      }
    }
  }
  cases.push_back({"divisor", {wavy({2, 2, 7, 6})}, [](const Tensors& x) {
                     return Tensors{at::avg_pool2d(x[0], {3, 3}, {1, 1}, {1, 1}, false, true, 5)};
                   }});
  cases.push_back({"dilated", {wavy({2, 2, 9, 8})}, [](const Tensors& x) {
                     const auto [y, at] = at::max_pool2d_with_indices(x[0], {2, 3}, {1, 2}, {1, 1}, {2, 2});
                     return Tensors{y, at};
                   }});
  expect_as_whole(cases, {{{2}, {Shard(2)}}, {{4}, {Shard(2)}}, {{3}, {Shard(3)}}, {{2, 2}, {Shard(2), Shard(3)}}});
  const Tensors volume = {wavy({2, 2, 5, 6, 4})};
  expect_as_whole({{"max 3d", volume,
                    [](const Tensors& x) {
                      const auto [y, at] = at::max_pool3d_with_indices(x[0], {3, 2, 2}, {2, 2, 1}, {1, 0, 1});
                      return Tensors{y, at};
                    }},
                   {"average 3d", volume,
                    [](const Tensors& x) {
                      return Tensors{at::avg_pool3d(x[0], {3, 2, 2}, {2, 2, 1}, {1, 0, 1}, true, false)};
                    }},
                   {"adaptive 3d", volume,
                    [](const Tensors& x) {
                      const auto [y, at] = at::adaptive_max_pool3d(x[0], {3, 4, 2});
                      return Tensors{y, at, at::adaptive_avg_pool3d(x[0], {2, 3, 3})};
                    }}},
                  planes(2));
  expect_as_whole({{"one image",
                    {wavy({3, 7, 6})},
                    [](const Tensors& x) {
                      return Tensors{at::max_pool2d(x[0], 2), at::avg_pool2d(x[0], 3, 2, 1)};
                    }}},
                  along(1));
  expect_as_whole({{"1d",
                    {wavy({2, 3, 7})},
                    [](const Tensors& x) {
                      return Tensors{at::max_pool1d(x[0], 3, 2, 1), at::avg_pool1d(x[0], 3, 2, 1)};
                    }}},
                  along(2));
}

TEST(CutImages, AdaptivePoolsAreExact) {
  std::vector<ImageCase> cases;
  for (const int64_t size : {2, 5, 8, 12}) {
    for (const int64_t outputs : {1, 2, 3, 5, 8}) {
      cases.push_back({c10::str("adaptive ", size, " to ", outputs), {wavy({2, 2, size, 5})}, [=](const Tensors& x) {
                         const auto [y, at] = at::adaptive_max_pool2d(x[0], {outputs, 2});
                         return Tensors{at::adaptive_avg_pool2d(x[0], {outputs, 3}), y, at};
                       }});
    }
  }
  expect_as_whole(cases, {{{2}, {Shard(2)}}, {{4}, {Shard(2)}}, {{3}, {Shard(3)}}, {{2, 2}, {Shard(2), Shard(3)}}});
}

// Where a window has nothing but the smallest value, and what NaN does.
TEST(CutImages, MaxPoolsTakeTheSamePixelsWherePixelsAreEqual) {
  at::Tensor image = at::full({1, 2, 8, 6}, -std::numeric_limits<double>::infinity(), at::kDouble);
  image[0][1].fill_(1);
  image[0][1][3][2] = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t dilation : {1, 2}) {
    const auto [values, indices] = at::max_pool2d_with_indices(image, {3, 3}, {1, 1}, {1, 1}, {dilation, dilation});
    const at::Tensor want_values = values, want_indices = indices;
    for (const Cut& cut : planes(2)) {
      if (cut.image[1 % cut.image.size()] == Shard(1)) continue;
      on_mesh(cut.mesh, [&](const DeviceMesh& mesh) {
        const at::Tensor x = place(image, mesh, cut.image);
        const auto [y, at] = at::max_pool2d_with_indices(x, {3, 3}, {1, 1}, {1, 1}, {dilation, dilation});
        expect_equal(full(at), want_indices, to_string(cut.image));
        EXPECT_TRUE(at::allclose(full(y), want_values, 0, 0, /*equal_nan=*/true));
      });
    }
  }
}

// Nothing is computed then, and the result has memory of its own all the same.
TEST(CutImages, ResizesToTheSameSizeAreCopies) {
  const at::Tensor image = wavy({1, 2, 6, 4});
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> resizes = {
      [](const at::Tensor& x) {
        return at::upsample_nearest2d(x, {6, 4});
      },
      [](const at::Tensor& x) {
        return at::_upsample_nearest_exact2d(x, {6, 4});
      },
      [](const at::Tensor& x) {
        return at::upsample_bilinear2d(x, {6, 4}, false);
      },
      [](const at::Tensor& x) {
        return at::upsample_bicubic2d(x, {6, 4}, true);
      },
  };
  for (size_t i = 0; i < resizes.size(); ++i) {
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      const at::Tensor x = place(image, mesh, {Shard(2)});
      at::Tensor y = resizes[i](x);
      EXPECT_EQ(DTensor(y).placements(), Placements{Shard(2)});
      y.mul_(3);
      expect_equal(full(x), image, c10::str("the image of resize ", i));
      expect_equal(full(y), image * 3, c10::str("resize ", i));
    });
  }
}

TEST(CutImages, ResizesAreExact) {
  std::vector<ImageCase> cases;
  const auto add = [&](const std::string& name, const Tensors& inputs, const Op& op) {
    cases.push_back({name, inputs, op});
  };
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    for (const int64_t size : {1, 2, 5, 9}) {
      for (const int64_t outputs : {1, 3, 5, 10, 18, 27}) {
        const Tensors image = {wavy({2, 2, size, 4}, 0, dtype)};
        const std::string name = c10::str(" ", size, " to ", outputs, " ", dtype);
        add("nearest" + name, image, [=](const Tensors& x) {
          return Tensors{at::upsample_nearest2d(x[0], {outputs, 7}), at::_upsample_nearest_exact2d(x[0], {outputs, 4})};
        });
        for (const bool align : {false, true}) {
          add("linear" + name, image, [=](const Tensors& x) {
            return Tensors{at::upsample_bilinear2d(x[0], {outputs, 7}, align),
                           at::upsample_bicubic2d(x[0], {outputs, 3}, align)};
          });
        }
      }
    }
  }
  add("scales", {wavy({2, 2, 7, 4})}, [](const Tensors& x) {
    return Tensors{at::upsample_bilinear2d(x[0], {11, 6}, false, 1.6, 1.5),
                   at::upsample_nearest2d(x[0], {11, 6}, 1.6, 1.5),
                   at::upsample_bicubic2d(x[0], {11, 6}, false, 1.6, 1.5)};
  });
  // A scale that says something else than the sizes: where these are equal, or twice as large, LibTorch copies.
  const Tensors square = {wavy({2, 2, 15, 15})};
  add("linear by a foreign scale", square, [](const Tensors& x) {
    return Tensors{at::upsample_bilinear2d(x[0], {15, 15}, false, 3.1, 0.2)};
  });
  add("nearest by a foreign scale", square, [](const Tensors& x) {
    return Tensors{at::upsample_nearest2d(x[0], {15, 15}, 3.1, 0.2)};
  });
  add("nearest twice by a foreign scale", square, [](const Tensors& x) {
    return Tensors{at::upsample_nearest2d(x[0], {30, 15}, 0.7, 1.3)};
  });
  expect_as_whole(cases, {{{2}, {Shard(2)}}, {{4}, {Shard(2)}}, {{3}, {Shard(3)}}, {{2, 2}, {Shard(2), Shard(3)}}});
  expect_as_whole({{"1d",
                    {wavy({2, 3, 7})},
                    [](const Tensors& x) {
                      return Tensors{at::upsample_nearest1d(x[0], {13}), at::upsample_linear1d(x[0], {5}, true)};
                    }}},
                  along(2));
  expect_as_whole(
      {{"3d",
        {wavy({2, 2, 3, 4, 5})},
        [](const Tensors& x) {
          return Tensors{at::upsample_nearest3d(x[0], {6, 5, 4}), at::upsample_trilinear3d(x[0], {5, 8, 3}, false)};
        }}},
      planes(2));
}

}  // namespace
}  // namespace serried::testing
