// What moves where images are cut along their space: borders, and nothing where a gather would move less.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dispatch/explain.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/parts.h"
#include "serried/tensor/redistribute/borders.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

at::Tensor ramp(at::IntArrayRef sizes) {
  return iota(sizes).mul(0.37).sin();
}

constexpr int64_t kRow = 2 * 3 * 5 * 8;  // bytes of one row of the image below

TEST(BorderTraffic, OfAConvolutionIsOneRowToEachNeighbour) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor x = at::Tensor(place(ramp({2, 3, 16, 5}), mesh, {Shard(2)})).requires_grad_();
    const at::Tensor w = at::Tensor(place(ramp({4, 3, 3, 3}), mesh, {Replicate()})).requires_grad_();
    const int64_t neighbours = mesh.get_rank() == 0 || mesh.get_rank() == 3 ? 1 : 2;
    at::Tensor y;
    {
      const CommDebugMode comm;
      y = at::conv2d(x, w, {}, 1, 1);
      EXPECT_EQ(comm.counts(), (std::map<std::string, int64_t>{{"all_to_all", 1}})) << comm.report();
      EXPECT_EQ(comm.bytes(), neighbours * kRow);
    }
    EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(2)}));
    EXPECT_EQ(part_of(y).sizes(), (c10::IntArrayRef{2, 4, 4, 5}));
    const at::Tensor ones = place(at::ones({2, 4, 16, 5}, at::kDouble), mesh, {Shard(2)});
    const CommDebugMode comm;
    y.backward(ones);
    // The image again for the gradient of the weight, and what rows of neighbours get.
    EXPECT_EQ(comm.count("all_to_all"), 2) << comm.report();
    EXPECT_EQ(comm.bytes("all_to_all"), 2 * neighbours * kRow);
    EXPECT_EQ(DTensor(x.grad()).placements(), (Placements{Shard(2)}));
    EXPECT_EQ(DTensor(w.grad()).placements(), (Placements{Partial()}));
  });
}

TEST(BorderTraffic, IsNothingWhereWindowsEndWithTheParts) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(ramp({2, 3, 16, 5}), mesh, {Shard(2)});
    const at::Tensor w = place(ramp({4, 3, 1, 3}), mesh, {Replicate()});
    const CommDebugMode comm;
    const at::Tensor y = at::conv2d(at::max_pool2d(x, {2, 1}), w, {}, 1, Sizes{0, 1});
    at::upsample_nearest2d(y, {16, 10});
    EXPECT_EQ(comm.count(), 0) << comm.report();
  });
}

TEST(BorderTraffic, OfOpsThatReadTheWholeImageIsTheGather) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(ramp({2, 3, 8, 5}), mesh, {Shard(2)});
    const at::Tensor w = place(ramp({4, 3, 15, 3}), mesh, {Replicate()});
    const CommDebugMode comm;
    const at::Tensor y = at::conv2d(x, w, {}, 1, Sizes{7, 1});
    EXPECT_EQ(comm.count("all_to_all"), 0);
    EXPECT_EQ(comm.count("all_gather"), 1);
    EXPECT_EQ(DTensor(y).placements(), (Placements{Replicate()}));
    expect_close(full(y), at::conv2d(full(x), full(w), {}, 1, Sizes{7, 1}));
  });
}

// Strided cuts have several spans: no rows to exchange.
TEST(BorderTraffic, OfStridedCutsIsTheGather) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(ramp({1, 1, 8, 5}), mesh, {StridedShard(2, 2), Shard(2)});
    const at::Tensor w = place(ramp({1, 1, 3, 3}), mesh, {Replicate(), Replicate()});
    const at::Tensor y = at::conv2d(x, w, {}, 1, 1);
    EXPECT_EQ(DTensor(y).placements(), (Placements{Replicate(), Replicate()}));
    expect_close(full(y), at::conv2d(full(x), full(w), {}, 1, 1));
  });
}

// No rank ever has more than its rows and those of its borders.
TEST(BorderTraffic, LeavesEveryRankWithItsPart) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    at::Tensor x = place(ramp({1, 2, 32, 6}), mesh, {Shard(2)});
    const at::Tensor w = place(ramp({2, 2, 3, 3}), mesh, {Replicate()});
    for (int layer = 0; layer < 5; ++layer) {
      x = at::conv2d(x, w, {}, 1, 1).tanh();
      EXPECT_EQ(part_of(x).size(2), 8) << layer;
    }
    x = at::upsample_bilinear2d(at::max_pool2d(x, 2), {32, 6}, false);
    EXPECT_EQ(part_of(x).size(2), 8);
  });
}

TEST(BorderTraffic, IsNoHiddenRedistribution) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(ramp({1, 2, 8, 6}), mesh, {Shard(2)});
    const at::Tensor w = place(ramp({2, 2, 3, 3}), mesh, {Replicate()});
    const at::Tensor cut = place(ramp({2, 2, 3, 3}), mesh, {Shard(0)});
    const ExplicitRedistribution explicit_only;
    EXPECT_NO_THROW(at::conv2d(x, w, {}, 1, 1));
    EXPECT_THROW(at::conv2d(x, cut, {}, 1, 1), c10::ValueError);
  });
}

TEST(BorderTraffic, OpsRefuseWhatTheyRefuseOfWholeImages) {
  const auto message_of = [](auto&& fn) -> std::string {
    try {
      fn();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "nothing";
  };
  const at::Tensor image = ramp({1, 2, 8, 6}), large = ramp({2, 2, 11, 3});
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const auto same = [&](auto&& op) {
      const std::string whole = message_of([&] { op(image, large); });
      const std::string cut =
          message_of([&] { op(place(image, mesh, {Shard(2)}), place(large, mesh, {Replicate()})); });
      EXPECT_NE(whole, "nothing");
      EXPECT_EQ(cut, whole);
    };
    same([](const at::Tensor& x, const at::Tensor& w) { at::conv2d(x, w); });
    same([](const at::Tensor& x, const at::Tensor& w) { at::conv2d(x, w, {}, 0, 2); });
    same([](const at::Tensor& x, const at::Tensor&) { at::max_pool2d(x, 3, 1, 2); });
    same([](const at::Tensor& x, const at::Tensor&) { at::avg_pool2d(x, 9); });
    same([](const at::Tensor& x, const at::Tensor&) { at::upsample_nearest2d(x, {4}); });
  });
}

TEST(BorderExchange, FetchesAnyRowsAndGivesGradientsBack) {
  // Far neighbours, nothing held, nothing wanted, rows outside, overlaps.
  const std::vector<Span> holds{{0, 3}, {3, 3}, {6, 1}, {7, 0}};
  const std::vector<Span> wants{{-2, 9}, {0, 0}, {0, 7}, {5, 4}};
  const at::Tensor whole = ramp({2, 7, 3});
  on_mesh({4}, [&](const DeviceMesh& mesh) {
    const size_t rank = size_t(mesh.get_rank());
    const detail::BorderExchange exchange(mesh, {{.dim = 1, .axes = {0}, .holds = holds, .wants = wants}});
    const at::Tensor got = exchange.fetch(whole.narrow(1, holds[rank].begin, holds[rank].size), 9.0);
    const at::Tensor padded = at::constant_pad_nd(whole, {0, 0, 2, 2}, 9.0);
    expect_equal(got, padded.narrow(1, wants[rank].begin + 2, wants[rank].size));
    const at::Tensor back = exchange.give_back(at::ones_like(got) * double(rank + 1));
    at::Tensor want = at::zeros_like(padded);
    for (size_t r = 0; r < wants.size(); ++r) want.narrow(1, wants[r].begin + 2, wants[r].size).add_(double(r + 1));
    expect_equal(back, want.narrow(1, holds[rank].begin + 2, holds[rank].size));
  });
}

TEST(BorderTraffic, IsExplained) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(ramp({1, 2, 8, 6}), mesh, {Shard(2)});
    const at::Tensor w = place(ramp({2, 2, 3, 3}), mesh, {Replicate()});
    const Sizes one{1, 1};
    const std::string text =
        explain("aten::convolution", {x, w, c10::IValue(), one, one, one, false, Sizes{0, 0}, int64_t(1)});
    EXPECT_NE(text.find("handler of its own"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace serried::testing
