// Attention of DTensors whose sequence is cut: values and gradients of one process, by all three ways.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/async.h"
#include "serried/parallel/context_parallel/context_parallel.h"
#include "serried/tensor/attention/attention_parts.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"
#include "tests/tensor/attention/whole_attention.h"

namespace serried::testing {
namespace {

double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 2e-6 : 2e-2;
}

const std::vector<AttentionWay> kWays = {AttentionWay::automatic, AttentionWay::heads, AttentionWay::gather,
                                         AttentionWay::ring};

void expect_like(const WholeAttention& whole, const DeviceMesh& mesh, const Placements& placements,
                 const WholeOptions& options, AttentionWay way, const Placements& mask_placements = {}) {
  const auto cut = [&](const at::Tensor& t) {
    return at::Tensor(distribute_tensor(t, mesh, placements)).requires_grad_();
  };
  const at::Tensor query = cut(whole.query), key = cut(whole.key), value = cut(whole.value);
  std::optional<at::Tensor> mask;
  if (options.mask.defined()) mask = distribute_tensor(options.mask, mesh, mask_placements);
  const ContextParallel scope(mesh.ndim() == 1 ? mesh : mesh["cp"], {.rotate = way});
  const at::Tensor out = at::scaled_dot_product_attention(query, key, value, mask, 0.0, options.causal, options.scale,
                                                          options.heads != options.key_heads);
  EXPECT_EQ(DTensor(out).placements(), placements);
  out.backward(distribute_tensor(whole.grad_out, mesh, placements));
  const std::string what = c10::str(to_string(placements), " on ", mesh.to_string(), ", length ", options.length, ", ",
                                    to_string(way), options.causal ? ", causal" : "");
  const double tolerance = tolerance_of(options.dtype);
  expect_within(full(out.detach()), whole.out, tolerance, what);
  expect_within(full(query.grad()), whole.grad_query, tolerance, what + ", queries");
  expect_within(full(key.grad()), whole.grad_key, tolerance, what + ", keys");
  expect_within(full(value.grad()), whole.grad_value, tolerance, what + ", values");
  EXPECT_EQ(DTensor(key.grad()).placements(), placements) << what;
}

void expect_like_one_process(const DeviceMesh& mesh, const Placements& placements, const WholeOptions& options,
                             AttentionWay way, const Placements& mask_placements = {}) {
  expect_like(whole_attention(options), mesh, placements, options, way, mask_placements);
}

void expect_all_ways(const WholeOptions& options, const std::vector<int64_t>& worlds = {2, 3, 4}) {
  for (int64_t ranks : worlds) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (const AttentionWay way : kWays) {
        if (way == AttentionWay::heads && (options.heads % ranks != 0 || options.key_heads % ranks != 0)) continue;
        for (const Placement& placement : {BalancedShard(2), Shard(2)}) {
          expect_like_one_process(mesh, {placement}, options, way);
        }
      }
    });
  }
}

TEST(CutAttention, EqualsOneProcessForAnyLength) {
  for (int64_t length : {1, 3, 37, 64}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      for (const bool causal : {true, false}) {
        expect_all_ways({.length = length, .heads = 12, .key_heads = 12, .size = 4, .dtype = dtype, .causal = causal});
      }
    }
  }
}

// LibTorch's kernel gives NaN there, its general formula the values.
TEST(CutAttention, CausalScalesNeedNotBePositive) {
  for (const double scale : {-0.7, 0.0, -0.0}) {
    WholeOptions options{.length = 13, .heads = 6, .key_heads = 6, .dtype = at::kDouble, .scale = scale};
    options.causal = false;
    options.mask = at::ones({13, 13}, at::kBool).tril();
    const WholeAttention whole = whole_attention(options);
    options.causal = true;
    options.mask.reset();
    for (const int64_t ranks : {2, 3}) {
      on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        for (const AttentionWay way : kWays) {
          for (const Placement& placement : {BalancedShard(2), Shard(2)}) {
            expect_like(whole, mesh, {placement}, options, way);
          }
        }
      });
    }
  }
}

// What one process has in float is off by sums of 4096 elements itself, and heads do what it does. Parts are added up
// otherwise: they are as near to the exact values.
TEST(CutAttention, EqualsOneProcessForALongSequence) {
  WholeOptions options{.length = 4096, .heads = 2, .key_heads = 2, .batch = 1, .size = 8, .dtype = at::kDouble};
  const WholeAttention exact = whole_attention(options);
  WholeAttention rounded;
  for (const auto member :
       {&WholeAttention::query, &WholeAttention::key, &WholeAttention::value, &WholeAttention::grad_out,
        &WholeAttention::out, &WholeAttention::grad_query, &WholeAttention::grad_key, &WholeAttention::grad_value}) {
    rounded.*member = (exact.*member).to(at::kFloat);
  }
  WholeOptions in_float = options;
  in_float.dtype = at::kFloat;
  const WholeAttention as_it_is = whole_attention(in_float);
  for (int64_t ranks : {2, 3, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
        if (way == AttentionWay::heads && ranks != 2) continue;
        expect_like(exact, mesh, {BalancedShard(2)}, options, way);
        expect_like(way == AttentionWay::heads ? as_it_is : rounded, mesh, {BalancedShard(2)}, in_float, way);
      }
    });
  }
}

TEST(CutAttention, KeysMayHaveFewerHeads) {
  expect_all_ways({.length = 37, .heads = 12, .key_heads = 4});
  expect_all_ways({.length = 13, .heads = 6, .key_heads = 3, .causal = false});
  expect_all_ways({.length = 13, .heads = 6, .key_heads = 1, .dtype = at::kDouble});
}

TEST(CutAttention, TakesAScale) {
  expect_all_ways({.length = 13, .dtype = at::kDouble, .scale = 0.7}, {2});
}

TEST(CutAttention, OfLowPrecisionAddsUpInFloat) {
  expect_all_ways({.length = 37, .dtype = at::kBFloat16}, {2, 4});
}

TEST(CutAttention, MasksGoByGather) {
  const int64_t length = 13;
  const at::Tensor wave = (at::arange(length * length, at::kDouble) * 0.61).sin().view({length, length});
  const at::Tensor allowed = at::ones({length, length}, at::kBool).tril();
  const std::vector<std::pair<at::Tensor, Placements>> masks = {
      {wave, {Replicate()}},
      {wave, {BalancedShard(0)}},
      {allowed, {BalancedShard(0)}},
      {wave.view({1, 1, length, length}), {BalancedShard(2)}},
      {wave[0].view({1, length}), {Replicate()}},
      {wave[0].view({1, 1, 1, length}), {Replicate()}},
      {at::stack({wave, wave * 2, wave * 3, wave - 1}).unsqueeze(0), {Shard(2)}}};
  for (int64_t ranks : {2, 3}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (const auto& [mask, placements] : masks) {
        const WholeOptions options{.length = length, .dtype = at::kDouble, .causal = false, .mask = mask};
        expect_like_one_process(mesh, {BalancedShard(2)}, options, AttentionWay::automatic, placements);
        expect_like_one_process(mesh, {Shard(2)}, options, AttentionWay::gather, placements);
      }
    });
  }
}

TEST(CutAttention, OtherAxesCutBatchAndHeads) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"cp", "tp"}, {.group = group});
    for (const AttentionWay way :
         {AttentionWay::automatic, AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
      const WholeOptions options{.length = 13, .dtype = at::kDouble};
      expect_like_one_process(mesh, {BalancedShard(2), Shard(1)}, options, way);
      expect_like_one_process(mesh, {BalancedShard(2), Shard(0)}, options, way);
      expect_like_one_process(mesh, {Shard(2), Replicate()}, options, way);
    }
    // Three rows of batch over two ranks, and a rank without any.
    expect_like_one_process(mesh, {BalancedShard(2), Shard(0)}, {.length = 13, .batch = 3}, AttentionWay::ring);
    expect_like_one_process(mesh, {BalancedShard(2), Shard(0)}, {.length = 13, .batch = 1}, AttentionWay::ring);
  });
}

TEST(CutAttention, MoreRanksThanKeyHeadsAreFine) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"cp", "tp"}, {.group = group});
    WholeOptions options{.length = 8, .dtype = at::kDouble};
    options.heads = 2;
    options.key_heads = 1;
    const WholeAttention whole = whole_attention(options);
    const auto cut = [&](const at::Tensor& t) { return distribute_tensor(t, mesh, {BalancedShard(2), Shard(1)}); };
    const at::Tensor out = at::scaled_dot_product_attention(cut(whole.query), cut(whole.key), cut(whole.value), {}, 0.0,
                                                            options.causal, options.scale, /*enable_gqa=*/true);
    expect_within(full(out), whole.out, 1e-12, "grouped heads");
  });
}

TEST(CutAttention, GradientsMayComeCutByAnotherAxis) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"cp", "other"}, {.group = group});
    for (const int64_t length : {25, 3}) {
      for (const bool causal : {false, true}) {
        WholeOptions options{.length = length, .dtype = at::kDouble};
        options.causal = causal;
        const WholeAttention whole = whole_attention(options);
        for (const Placement& later : {Shard(2), BalancedShard(2)}) {
          const auto cut = [&](const at::Tensor& t) {
            return at::Tensor(distribute_tensor(t, mesh, {BalancedShard(2), Replicate()})).requires_grad_();
          };
          const at::Tensor query = cut(whole.query), key = cut(whole.key), value = cut(whole.value);
          const at::Tensor out = at::scaled_dot_product_attention(query, key, value, {}, 0.0, causal);
          (out * distribute_tensor(whole.grad_out, mesh, {Replicate(), later})).sum().backward();
          expect_within(full(query.grad()), whole.grad_query, 1e-12, "queries");
          expect_within(full(key.grad()), whole.grad_key, 1e-12, "keys");
          expect_within(full(value.grad()), whole.grad_value, 1e-12, "values");
        }
      }
    }
  });
}

TEST(CutAttention, QueriesMayBeOfAnotherLengthThanKeys) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor q = iota({1, 2, 7, 4}).sin(), k = iota({1, 2, 11, 4}).cos(), v = iota({1, 2, 11, 4}).sin();
    const auto cut = [&](const at::Tensor& t) { return at::Tensor(distribute_tensor(t, mesh, {BalancedShard(2)})); };
    const at::Tensor expected = at::scaled_dot_product_attention(q, k, v);
    for (const AttentionWay way : {AttentionWay::gather, AttentionWay::ring}) {
      const ContextParallel scope(mesh, {.rotate = way});
      expect_close(full(at::scaled_dot_product_attention(cut(q), cut(k), cut(v))), expected);
    }
    // Causal squares do not fit then: by the rule.
    const at::Tensor out = at::scaled_dot_product_attention(cut(q), cut(k), cut(v), {}, 0.0, true);
    expect_close(full(out), at::scaled_dot_product_attention(q, k, v, {}, 0.0, true));
  });
}

using Counts = std::map<std::string, int64_t>;

TEST(CutAttention, CommunicatesNoMoreThanItsWayNeeds) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const auto cut = [&] {
      return at::Tensor(distribute_tensor(iota({2, 4, 16, 8}).sin(), mesh, {BalancedShard(2)})).requires_grad_();
    };
    const at::Tensor ones = distribute_tensor(at::ones({2, 4, 16, 8}, at::kDouble), mesh, {BalancedShard(2)});
    const std::map<AttentionWay, std::pair<Counts, Counts>> expected = {
        {AttentionWay::heads, {{{"all_to_all", 2}}, {{"all_to_all", 2}}}},
        {AttentionWay::gather, {{{"all_gather", 1}}, {{"all_gather", 1}, {"reduce_scatter", 1}}}},
        {AttentionWay::ring, {{{"send", 3}, {"recv", 3}}, {{"send", 7}, {"recv", 7}}}}};
    for (const auto& [way, counts] : expected) {
      const ContextParallel scope(mesh, {.rotate = way});
      const at::Tensor q = cut(), k = cut(), v = cut();
      at::Tensor out;
      {
        const CommDebugMode comm;
        out = at::scaled_dot_product_attention(q, k, v, {}, 0.0, true);
        EXPECT_EQ(comm.counts(), counts.first) << to_string(way) << comm.report();
        // Keys and values of a rank: 2 x [2, 4, 4, 8] of 8 bytes.
        if (way == AttentionWay::ring) EXPECT_EQ(comm.bytes("send"), 3 * 2 * 256 * 8);
      }
      const CommDebugMode comm;
      out.backward(ones);
      EXPECT_EQ(comm.counts(), counts.second) << to_string(way) << comm.report();
    }
  });
}

// Keys and values in two buffers; in backward three of their gradients besides, which are added up in float or wider.
TEST(CutAttention, TheRingHoldsTwoPartsOfKeysAndValuesAndThreeOfGradients) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const auto cut = [&] {
        return at::Tensor(distribute_tensor(at::ones({2, 4, 37, 8}, dtype), mesh, {BalancedShard(2)})).requires_grad_();
      };
      const at::Tensor q = cut(), k = cut(), v = cut();
      // Of 37 positions the most that a rank has, of keys and values.
      const int64_t largest = 10 * 2 * 2 * 4 * 8, size = int64_t(at::elementSize(dtype));
      const ContextParallel scope(mesh, {.rotate = AttentionWay::ring});
      detail::attention_counters() = {};
      const at::Tensor out = at::scaled_dot_product_attention(q, k, v, {}, 0.0, true);
      EXPECT_EQ(detail::attention_counters().key_buffer_bytes, 2 * largest * size);
      detail::attention_counters() = {};
      out.backward(at::ones_like(out));
      EXPECT_EQ(detail::attention_counters().key_buffer_bytes,
                2 * largest * size + 3 * largest * std::max<int64_t>(size, 4))
          << dtype;
    }
  });
}

TEST(CutAttention, TheGatherHoldsAllKeysAndValuesAndTheirGradients) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const auto cut = [&] {
      return at::Tensor(distribute_tensor(at::ones({2, 4, 37, 8}), mesh, {BalancedShard(2)})).requires_grad_();
    };
    const at::Tensor q = cut(), k = cut(), v = cut();
    const int64_t all = 37 * 2 * 2 * 4 * 8 * 4;
    const ContextParallel scope(mesh, {.rotate = AttentionWay::gather});
    detail::attention_counters() = {};
    const at::Tensor out = at::scaled_dot_product_attention(q, k, v, {}, 0.0, true);
    EXPECT_EQ(detail::attention_counters().key_buffer_bytes, 2 * all) << "as they came, and in order";
    detail::attention_counters() = {};
    out.backward(at::ones_like(out));
    EXPECT_EQ(detail::attention_counters().key_buffer_bytes, 3 * all) << "keys and values, sums, and these as they go";
  });
}

// A tensor of the caller's, on its way over the same group with the default tag.
TEST(CutAttention, TheRingLeavesMessagesOfOthersAlone) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const Group group = mesh.get_group(int64_t(0));
    const int rank = group->getRank(), right = (rank + 1) % 3, left = (rank + 2) % 3;
    for (const int tag : {0, 1}) {
      const at::Tensor own = at::full({4}, double(rank)), came = at::zeros({4});
      const Pending coming = async::recv(came, group, {.peer = left, .tag = tag});
      expect_like_one_process(mesh, {BalancedShard(2)}, {.length = 13, .dtype = at::kDouble}, AttentionWay::ring);
      send(own, group, {.peer = right, .tag = tag});
      coming.wait();
      expect_equal(came, at::full({4}, double(left)));
    }
  });
}

TEST(CutAttention, PicksTheWayThatMovesLeast) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const auto counts = [&](int64_t heads, int64_t key_heads, int64_t length, const Placement& placement) {
      const at::Tensor q = distribute_tensor(at::zeros({1, heads, length, 64}), mesh, {placement});
      const at::Tensor k = distribute_tensor(at::zeros({1, key_heads, length, 64}), mesh, {placement});
      const CommDebugMode comm;
      at::scaled_dot_product_attention(q, k, k, {}, 0.0, true, std::nullopt, true);
      return comm.counts();
    };
    EXPECT_EQ(counts(8, 8, 256, BalancedShard(2)), (Counts{{"all_to_all", 2}}));
    EXPECT_EQ(counts(8, 1, 256, BalancedShard(2)), (Counts{{"all_gather", 1}}));
    EXPECT_EQ(counts(3, 3, 3072, BalancedShard(2)), (Counts{{"send", 3}, {"recv", 3}}));
    // Eight heads of queries share one of keys: to gather that is less than to send queries round.
    EXPECT_EQ(counts(32, 4, 64, BalancedShard(2)), (Counts{{"all_gather", 1}}));
    // Cut in order, the last rank would have most to do.
    EXPECT_EQ(counts(32, 4, 64, Shard(2)), (Counts{{"all_to_all", 2}}));
  });
}

TEST(CutAttention, CountsLessWorkWhereItIsBalanced) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const auto busiest = [&](const Placement& placement) {
      const at::Tensor x = distribute_tensor(at::zeros({1, 1, 64, 8}), mesh, {placement});
      detail::attention_counters() = {};
      at::scaled_dot_product_attention(x, x, x, {}, 0.0, true);
      const at::Tensor own = torch::tensor({detail::attention_counters().pairs});
      return all_reduce(own, mesh.get_group(int64_t(0)), c10d::ReduceOp::MAX).item<int64_t>();
    };
    const int64_t in_order = busiest(Shard(2)), balanced = busiest(BalancedShard(2));
    EXPECT_GE(double(in_order), 1.4 * double(balanced));
  });
}

TEST(CutAttention, RefusesAWayThatCannotBeGone) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::zeros({1, 6, 8, 4}), mesh, {BalancedShard(2)});
    const at::Tensor mask = distribute_tensor(at::zeros({8, 8}), mesh, {Replicate()});
    {
      const ContextParallel scope(mesh, {.rotate = AttentionWay::heads});
      EXPECT_EQ(error_text_of_any_rank<c10::NotImplementedError>([&] { at::scaled_dot_product_attention(x, x, x); }),
                "[scaled_dot_product_attention] rotate is heads, and 4 ranks do not divide 6 heads of queries and 6 of "
                "keys\n  fix: leave rotate out, or pass AttentionWay::gather or ring");
    }
    const ContextParallel scope(mesh, {.rotate = AttentionWay::ring});
    EXPECT_EQ(
        error_text_of_any_rank<c10::NotImplementedError>([&] { at::scaled_dot_product_attention(x, x, x, mask); }),
        "[scaled_dot_product_attention] rotate is ring, and with a mask ranks gather keys and values\n"
        "  fix: leave rotate out, or pass AttentionWay::gather");
  });
}

}  // namespace
}  // namespace serried::testing
