// DTensors cut from both ends: made, moved, computed with, printed, drawn at random.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/factories.h"
#include "serried/tensor/random/random.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

const Placements kBalanced = {BalancedShard(1)};

// By tensor_split, not by our own arithmetic.
at::Tensor own_part(const at::Tensor& whole, int64_t dim, int64_t ranks, int64_t rank) {
  const auto chunks = whole.tensor_split(2 * ranks, dim);
  return at::cat({chunks[size_t(rank)], chunks[size_t(2 * ranks - 1 - rank)]}, dim);
}

void for_lengths_and_ranks(const std::function<void(const DeviceMesh&, int64_t length)>& fn) {
  for (int64_t ranks : {1, 2, 3, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (int64_t length : {1, 3, 37, 64, 4096}) fn(mesh, length);
    });
  }
}

TEST(BalancedShard, IsDistributedAndComesBackForAnyLength) {
  for_lengths_and_ranks([](const DeviceMesh& mesh, int64_t length) {
    const at::Tensor whole = iota({2, length, 3});
    const DTensor x = distribute_tensor(whole, mesh, kBalanced);
    expect_equal(x.to_local(), own_part(whole, 1, mesh.size(), mesh.get_rank()));
    expect_equal(x.full_tensor(), whole);
    const DTensor own =
        DTensor::from_local(x.to_local(), mesh, kBalanced, {.shape = whole.sizes(), .stride = whole.strides()});
    expect_equal(own.full_tensor(), whole);
    EXPECT_EQ(own.placements(), kBalanced);
  });
}

TEST(BalancedShard, MovesToAndFromEveryOtherPlacement) {
  for_lengths_and_ranks([](const DeviceMesh& mesh, int64_t length) {
    if (length > 64) return;
    const at::Tensor whole = iota({2, length, 3});
    for (const Placement& other : {Replicate(), Shard(0), Shard(1), Shard(2), StridedShard(1, 2), BalancedShard(2)}) {
      const DTensor there = distribute_tensor(whole, mesh, {other});
      const DTensor moved = there.redistribute(kBalanced);
      expect_equal(moved.to_local(), own_part(whole, 1, mesh.size(), mesh.get_rank()), to_string(other));
      const DTensor back = moved.redistribute({other});
      expect_equal(back.to_local(), there.to_local(), to_string(other));
    }
    const DTensor reduced = place(whole, mesh, {Partial()}).redistribute(kBalanced);
    expect_close(reduced.to_local(), own_part(whole, 1, mesh.size(), mesh.get_rank()));
  });
}

TEST(BalancedShard, NestsWithOtherAxes) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (int64_t length : {1, 3, 37, 64}) {
      const at::Tensor whole = iota({2, length, 3});
      for (const char* text : {"S1 S1~", "S1~ S1", "S0 S1~", "S1~ S1~", "S1~ S2", "R S1~"}) {
        const DTensor x = distribute_tensor(whole, mesh, parse_placements(text));
        expect_equal(x.full_tensor(), whole, text);
        expect_equal(x.redistribute({Shard(1), Shard(2)}).full_tensor(), whole, text);
      }
    }
  });
}

TEST(BalancedShard, GradientsOfMovesComeBackBalanced) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor weight = iota({2, 7, 3}).sin();
    const at::Tensor x = at::Tensor(distribute_tensor(iota({2, 7, 3}), mesh, kBalanced)).requires_grad_();
    (DTensor(x).full_tensor() * weight).sum().backward();
    EXPECT_EQ(DTensor(x.grad()).placements(), kBalanced);
    expect_close(DTensor(x.grad()).full_tensor(), weight);
  });
}

TEST(BalancedShard, StaysInOpsThatWorkElementByElement) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor a = iota({1, 7, 3}).sin(), b = iota({1, 7, 3}).cos(), w = iota({3, 4}).sin();
    const DTensor x = distribute_tensor(a, mesh, kBalanced), y = distribute_tensor(b, mesh, kBalanced);
    const DTensor matrix = distribute_tensor(w, mesh, {Replicate()});
    const CommDebugMode comm;
    const DTensor sum(at::gelu(x * 2 + y));
    const DTensor product(at::matmul(x, matrix));
    const DTensor turned(x.transpose(1, 2));
    const DTensor split(at::Tensor(product).view({1, 7, 2, 2}));
    const DTensor normed(at::layer_norm(x, {3}));
    EXPECT_EQ(comm.count(), 0) << comm.report();
    EXPECT_EQ(sum.placements(), kBalanced);
    EXPECT_EQ(product.placements(), kBalanced);
    EXPECT_EQ(turned.placements(), Placements{BalancedShard(2)});
    EXPECT_EQ(split.placements(), kBalanced);
    EXPECT_EQ(normed.placements(), kBalanced);
    expect_close(sum.full_tensor(), at::gelu(a * 2 + b));
    expect_close(product.full_tensor(), a.matmul(w));
    expect_close(turned.full_tensor(), a.transpose(1, 2));
    expect_close(normed.full_tensor(), at::layer_norm(a, {3}));
  });
}

TEST(BalancedShard, IsRightWhereAnOpAsksForTheOrder) {
  for (int64_t ranks : {2, 3}) {
    on_mesh({ranks}, [](const DeviceMesh& mesh) {
      const at::Tensor a = iota({2, 7, 3}).sin();
      const at::Tensor x = distribute_tensor(a, mesh, kBalanced);
      const at::Tensor square = iota({2, 7, 7}).sin();
      const at::Tensor s = distribute_tensor(square, mesh, kBalanced);
      expect_close(full(x.reshape({14, 3})), a.reshape({14, 3}), "merged dims");
      expect_close(full(x.reshape({2, 21})), a.reshape({2, 21}), "merged dims, the cut one first");
      const at::Tensor w = iota({3, 4}).sin();
      expect_close(full(x.matmul(distribute_tensor(w, mesh, {Replicate()}))), a.matmul(w), "matmul of merged rows");
      expect_close(full(x.narrow(1, 2, 3)), a.narrow(1, 2, 3), "narrow");
      expect_close(full(x.cumsum(1)), a.cumsum(1), "cumsum");
      expect_close(full(x.flip(1)), a.flip(1), "flip");
      expect_close(full(x.sum(1)), a.sum(1), "sum");
      expect_close(full(x.mean()), a.mean(), "mean");
      expect_close(full(at::softmax(x, 1)), at::softmax(a, 1), "softmax along the cut");
      expect_close(full(s.tril()), square.tril(), "tril");
      expect_close(full(at::cat({x, x}, 1)), at::cat({a, a}, 1), "cat");
      expect_close(full(std::get<0>(x.max(1))), std::get<0>(a.max(1)), "max");
      expect_equal(full(x.argmax(1)), a.argmax(1), "argmax");
      const at::Tensor table = distribute_tensor(iota({7, 3}).sin(), mesh, {BalancedShard(0)});
      const at::Tensor index = distribute_tensor(torch::tensor({6, 0, 3, 3}), mesh, {Replicate()});
      expect_close(full(at::embedding(table, index)), at::embedding(iota({7, 3}).sin(), torch::tensor({6, 0, 3, 3})),
                   "embedding");
    });
  }
}

TEST(BalancedShard, IsFilledWithTheNumbersOfOneDevice) {
  for (int64_t ranks : {1, 2, 4}) {
    on_mesh({ranks}, [](const DeviceMesh& mesh) {
      manual_seed(7, mesh);
      const DTensor drawn = randn({2, 37, 3}, mesh, kBalanced);
      const DTensor dropped(at::dropout(ones({2, 37, 3}, mesh, kBalanced), 0.5, true));
      manual_seed(7, mesh);
      const DTensor drawn_whole = randn({2, 37, 3}, mesh, {Replicate()});
      const DTensor dropped_whole(at::dropout(ones({2, 37, 3}, mesh, {Replicate()}), 0.5, true));
      expect_equal(drawn.full_tensor(), drawn_whole.to_local());
      expect_equal(dropped.full_tensor(), dropped_whole.to_local());
      EXPECT_EQ(dropped.placements(), kBalanced);
      expect_equal(zeros({5, 2}, mesh, {BalancedShard(0)}).full_tensor(), at::zeros({5, 2}));
    });
  }
}

TEST(BalancedShard, SaysWhereItsChunksLie) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(iota({10, 3}), mesh, {BalancedShard(0)});
    const std::vector<DTensor::Chunk> chunks = x.local_chunks();
    if (mesh.get_rank() == 0) {
      ASSERT_EQ(chunks.size(), 2u);
      EXPECT_EQ(chunks[0].offsets, (Sizes{0, 0}));
      EXPECT_EQ(chunks[0].sizes, (Sizes{3, 3}));
      EXPECT_EQ(chunks[1].offsets, (Sizes{8, 0}));
      EXPECT_EQ(chunks[1].sizes, (Sizes{2, 3}));
      std::ostringstream out;
      out << x;
      EXPECT_NE(out.str().find("DTensor f64[10,3] S0~ on mesh"), std::string::npos) << out.str();
    } else {
      ASSERT_EQ(chunks.size(), 1u);
      EXPECT_EQ(chunks[0].offsets, (Sizes{3, 0}));
      EXPECT_EQ(chunks[0].sizes, (Sizes{5, 3}));
    }
  });
}

}  // namespace
}  // namespace serried::testing
