// Plain code inside ContextParallel: the gradients of one process, buffers that come back, masks, documents, recompute.
#include "serried/parallel/context_parallel/context_parallel.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/recompute.h"
#include "serried/tensor/attention/sequence_scope.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/saved_tensors.h"
#include "tests/parallel/context_parallel/long_gpt.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"
#include "tests/tensor/attention/whole_attention.h"

namespace serried::testing {
namespace {

using gpt::GptOptions;
using long_gpt::LongGpt;
using long_gpt::Sequence;

struct Step {
  AttentionWay way = AttentionWay::automatic;
  bool recomputes = false;
  bool backward_outside = false;
};

std::vector<at::Tensor> cut_gradients(const DeviceMesh& mesh, const GptOptions& options, int64_t length,
                                      const Step& step) {
  LongGpt net = long_gpt::make_net(options, length);
  if (step.recomputes) {
    net->run_block = [](const std::shared_ptr<gpt::BlockImpl>& block, const at::Tensor& x) {
      return recompute([block](const at::Tensor& y) { return block->forward(y); }, x);
    };
  }
  const Sequence s = long_gpt::sequence_of(length, 0);
  const int64_t all = s.ids.numel();
  at::Tensor loss;
  {
    const std::vector<at::Tensor> buffers = {s.ids, s.targets, s.positions};
    const ContextParallel scope(mesh, {.buffers = buffers,
                                       .seq_dims = {1, -1, 0},
                                       .rotate = step.way,
                                       .no_restore = step.backward_outside ? buffers : std::vector<at::Tensor>()});
    loss = long_gpt::share_of_loss(net(s.ids, s.positions), s.targets, all);
    if (!step.backward_outside) loss.backward();
  }
  if (step.backward_outside) loss.backward();
  std::vector<at::Tensor> gradients = long_gpt::gradients_of(*net);
  for (at::Tensor& g : gradients) all_reduce_(g, mesh.get_group(int64_t(0)));
  return gradients;
}

TEST(ContextParallel, GivesTheGradientsOfOneProcess) {
  const GptOptions options{.layers = 2};
  for (int64_t length : {1, 3, 37, 64}) {
    const std::vector<at::Tensor> expected = long_gpt::whole_gradients(options, length);
    for (int64_t ranks : {1, 2, 3, 4}) {
      on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        for (const AttentionWay way :
             {AttentionWay::automatic, AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
          if (way == AttentionWay::heads && options.heads % ranks != 0) continue;
          const std::string what = c10::str(length, " positions on ", ranks, " ranks by ", to_string(way));
          long_gpt::expect_near(cut_gradients(mesh, options, length, {.way = way}), expected, what);
        }
        long_gpt::expect_near(cut_gradients(mesh, options, length, {.backward_outside = true}), expected, "outside");
      });
    }
  }
}

TEST(ContextParallel, KeysMayHaveFewerHeads) {
  const GptOptions options{.layers = 1, .heads = 6, .kv_heads = 2};
  const std::vector<at::Tensor> expected = long_gpt::whole_gradients(options, 13);
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
      long_gpt::expect_near(cut_gradients(mesh, options, 13, {.way = way}), expected, std::string(to_string(way)));
    }
  });
}

TEST(ContextParallel, IsRestoredForTheSecondRunOfRecompute) {
  const GptOptions options{.layers = 2};
  const std::vector<at::Tensor> expected = long_gpt::whole_gradients(options, 13);
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    for (const AttentionWay way : {AttentionWay::gather, AttentionWay::ring}) {
      for (const bool outside : {false, true}) {
        const auto plain = cut_gradients(mesh, options, 13, {.way = way});
        const auto again =
            cut_gradients(mesh, options, 13, {.way = way, .recomputes = true, .backward_outside = outside});
        for (size_t i = 0; i < plain.size(); ++i) expect_equal(again[i], plain[i]);
        long_gpt::expect_near(again, expected, "recompute");
        EXPECT_EQ(detail::sequence_scope(), nullptr);
      }
    }
  });
}

TEST(ContextParallel, PutsBuffersBack) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = iota({2, 10}), kept = iota({10}), stays = iota({10, 2});
    at::Tensor table = iota({10, 3}).requires_grad_();
    const at::Tensor alias = x;
    const void* memory = x.data_ptr();
    const bool is_first = mesh.get_rank() == 0;
    {
      const ContextParallel scope(
          mesh, {.buffers = {x, kept, stays, table}, .seq_dims = {1, 0, 0, 0}, .no_restore = {stays}});
      EXPECT_EQ(alias.sizes(), (c10::IntArrayRef{2, 5}));
      const at::Tensor expected = is_first ? torch::tensor({0, 1, 2, 8, 9}) : torch::tensor({3, 4, 5, 6, 7});
      expect_equal(kept, expected.to(at::kDouble));
      EXPECT_EQ(table.sizes(), (c10::IntArrayRef{5, 3}));
      EXPECT_TRUE(table.requires_grad());
    }
    EXPECT_EQ(x.data_ptr(), memory);
    expect_equal(alias, iota({2, 10}));
    expect_equal(kept, iota({10}));
    expect_equal(table.detach(), iota({10, 3}));
    EXPECT_EQ(stays.size(0), 5);
    EXPECT_THROW(
        {
          const ContextParallel scope(mesh, {.buffers = {x}, .seq_dims = {1}});
          EXPECT_EQ(x.size(1), 5);
          throw std::runtime_error("inside");
        },
        std::runtime_error);
    expect_equal(x, iota({2, 10}));
    EXPECT_EQ(detail::sequence_scope(), nullptr);
    // Attention is its own again.
    const at::Tensor q = iota({1, 1, 3, 4});
    expect_equal(at::scaled_dot_product_attention(q, q, q), at::scaled_dot_product_attention(q.clone(), q, q));
  });
}

TEST(ContextParallel, WhatAutogradSavedOfABufferRaisesWhenItIsBack) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor weight = iota({10}).requires_grad_(), x = iota({10});
    at::Tensor loss;
    {
      const ContextParallel scope(mesh, {.buffers = {x}, .seq_dims = {0}});
      loss = (context_parallel_shard(mesh, weight) * x).sum();
    }
    const std::string text = error_text<c10::Error>([&] { loss.backward(); });
    EXPECT_NE(text.find("modified by an inplace operation"), std::string::npos) << text;
  });
}

TEST(ContextParallel, TheInnermostScopeCounts) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor q = iota({1, 2, 6, 4}).sin(), expected = at::scaled_dot_product_attention(q, q, q, {}, 0, true);
    const ContextParallel outer(mesh, {.length = 100});
    {
      const ContextParallel inner(mesh, {.length = 6});
      const at::Tensor part = context_parallel_shard(mesh, q, {.seq_dim = 2});
      const at::Tensor out = at::scaled_dot_product_attention(part, part, part, {}, 0, true);
      expect_close(context_parallel_unshard(mesh, out, {.seq_dim = 2}), expected);
    }
    EXPECT_EQ(detail::sequence_scope()->cut->length(), 100);
  });
}

TEST(ContextParallel, UnshardUndoesShard) {
  for (int64_t ranks : {1, 2, 3, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (const std::vector<int64_t>& documents : std::vector<std::vector<int64_t>>{{}, {4, 1, 9}}) {
        for (int64_t length : {14, 1, 3}) {
          if (!documents.empty() && length != 14) continue;
          const at::Tensor whole = iota({2, length, 3});
          at::Tensor part =
              context_parallel_shard(mesh, whole, {.seq_dim = 1, .documents = documents}).requires_grad_();
          const at::Tensor back = context_parallel_unshard(mesh, part, {.seq_dim = -2, .documents = documents});
          expect_equal(back.detach(), whole);
          // Every rank's loss reads the whole: gradients add up over ranks.
          (back * whole.sin()).sum().backward();
          expect_close(part.grad(), context_parallel_shard(mesh, whole.sin() * double(ranks),
                                                           {.seq_dim = 1, .documents = documents}));
        }
      }
      const at::Tensor leaf = iota({4, 3}).requires_grad_();
      context_parallel_shard(mesh, leaf, {.seq_dim = 0}).sum().backward();
      EXPECT_EQ(leaf.grad().sum().item<double>(), double(context_parallel_shard(mesh, iota({4, 3})).numel()));
    });
  }
}

// The kernel reads rows as if they were dense: turned by a transposition, or one head for many by expand().
TEST(ContextParallel, PartsMayLieInAnyOrder) {
  const at::Tensor queries = iota({2, 4, 13, 6}).sin(), keys = iota({2, 1, 13, 6}).cos(), values = keys.square();
  at::Tensor q = queries.clone().requires_grad_(), k = keys.clone().requires_grad_(),
             v = values.clone().requires_grad_();
  const auto many = [](const at::Tensor& t) { return t.expand({2, 4, t.size(2), 6}); };
  const at::Tensor mask = at::ones({13, 13}, at::kBool).tril();
  const at::Tensor expected = at::scaled_dot_product_attention(q, many(k), many(v), mask);
  (expected * expected.detach().cos()).sum().backward();
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    for (const AttentionWay way :
         {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring, AttentionWay::automatic}) {
      const ContextParallel scope(mesh, {.rotate = way, .length = 13});
      const auto turned = [&](const at::Tensor& t) {
        return context_parallel_shard(mesh, t, {.seq_dim = 2}).transpose(2, 3).contiguous().transpose(2, 3);
      };
      const auto whole = [&](const at::Tensor& t) {
        return context_parallel_unshard(mesh, t.detach().contiguous(), {.seq_dim = 2});
      };
      at::Tensor a = turned(queries).requires_grad_(), b = turned(keys).requires_grad_(),
                 c = turned(values).requires_grad_();
      const bool masked = way == AttentionWay::automatic;
      const at::Tensor out = at::scaled_dot_product_attention(
          a, many(b), many(c), masked ? std::optional(mask) : std::nullopt, 0, /*is_causal=*/!masked);
      (out * out.detach().cos()).sum().backward();
      long_gpt::expect_near({whole(out), whole(a.grad()), whole(b.grad()), whole(c.grad())},
                            {expected.detach(), q.grad(), k.grad(), v.grad()}, std::string(to_string(way)), 1e-12);
    }
  });
}

// One process takes its general formula for queries whose last dim is not dense, and gets numbers.
TEST(ContextParallel, CausalScalesNeedNotBePositive) {
  for (const double scale : {-0.7, 0.0}) {
    const at::Tensor q = iota({1, 2, 4, 12}).sin().transpose(2, 3);
    const at::Tensor expected = at::scaled_dot_product_attention(q, q, q, {}, 0, true, scale);
    EXPECT_FALSE(expected.isnan().any().item<bool>());
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
        const ContextParallel scope(mesh, {.rotate = way, .length = 12});
        const at::Tensor part = context_parallel_shard(mesh, q, {.seq_dim = 2});
        const at::Tensor out = at::scaled_dot_product_attention(part, part, part, {}, 0, true, scale);
        expect_close(context_parallel_unshard(mesh, out, {.seq_dim = 2}), expected, std::string(to_string(way)));
      }
    });
  }
}

// Gradients of queries, keys and values of a call inside a scope, put together.
std::vector<at::Tensor> attended(const DeviceMesh& mesh, const std::vector<at::Tensor>& qkv, const at::Tensor& grad_out,
                                 const ContextParallelOptions& options, const at::Tensor& mask, bool causal) {
  const ContextShardOptions shard{.seq_dim = 2, .documents = options.documents};
  const ContextParallel scope(mesh, options);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& t : qkv) parts.push_back(context_parallel_shard(mesh, t, shard).requires_grad_());
  const std::optional<at::Tensor> given = mask.defined() ? std::optional(mask) : std::nullopt;
  const at::Tensor out = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], given, 0.0, causal);
  EXPECT_EQ(out.sizes(), parts[0].sizes());
  out.backward(context_parallel_shard(mesh, grad_out, shard));
  std::vector<at::Tensor> wholes = {context_parallel_unshard(mesh, out.detach(), {.seq_dim = 2})};
  for (const at::Tensor& part : parts) wholes.push_back(context_parallel_unshard(mesh, part.grad(), {.seq_dim = 2}));
  return wholes;
}

std::vector<at::Tensor> attended_whole(const std::vector<at::Tensor>& qkv, const at::Tensor& grad_out,
                                       const at::Tensor& mask, bool causal = false) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& t : qkv) leaves.push_back(t.clone().requires_grad_());
  const std::optional<at::Tensor> given = mask.defined() ? std::optional(mask) : std::nullopt;
  const at::Tensor out = at::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], given, 0.0, causal);
  out.backward(grad_out);
  return {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

std::vector<at::Tensor> in_float(std::vector<at::Tensor> tensors) {
  for (at::Tensor& t : tensors) t = t.to(at::kFloat);
  return tensors;
}

/// A call on waves of `length` positions, and what one process makes of it.
struct PlainCall {
  std::vector<at::Tensor> qkv;
  at::Tensor grad_out;
  std::vector<at::Tensor> results;  // in double

  PlainCall(int64_t length, int64_t heads, bool causal) {
    const Sizes sizes = {1, heads, length, 4};
    qkv = {iota(sizes).mul(0.377).sin(), iota(sizes).mul(0.713).sin(), iota(sizes).mul(1.117).sin()};
    grad_out = iota(sizes).mul(0.291).sin();
    results = attended_whole(qkv, grad_out, {}, causal);
  }
};

// Of the elements' largest: 1e-12 in double, 2e-6 in float. Heads compute what one process does in float, whose own
// error grows with the length; parts that are merged are as near to the exact values.
void expect_like_one_process(const DeviceMesh& mesh, const PlainCall& call, int64_t length, bool causal) {
  const std::vector<at::Tensor> exact = in_float(call.results), own = in_float(call.qkv);
  const at::Tensor own_grad = call.grad_out.to(at::kFloat);
  const std::vector<at::Tensor> as_it_is = attended_whole(own, own_grad, {}, causal);
  for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
    const ContextParallelOptions options{.rotate = way, .length = length};
    const std::string what = c10::str(length, " positions on ", mesh.size(), " ranks by ", to_string(way),
                                      causal ? ", causal" : "", ", tensor ");
    const auto in_double = attended(mesh, call.qkv, call.grad_out, options, {}, causal);
    for (size_t i = 0; i < in_double.size(); ++i) {
      expect_within(in_double[i], call.results[i], 1e-12, c10::str(what, i, " in double"));
    }
    const auto& expected = way == AttentionWay::heads || length < 100 ? as_it_is : exact;
    const auto rounded = attended(mesh, own, own_grad, options, {}, causal);
    for (size_t i = 0; i < rounded.size(); ++i) {
      expect_within(rounded[i], expected[i], 2e-6, c10::str(what, i, " in float"));
    }
  }
}

void expect_like_one_process(int64_t ranks, int64_t length, bool causal) {
  const PlainCall call(length, ranks, causal);
  on_mesh({ranks}, [&](const DeviceMesh& mesh) { expect_like_one_process(mesh, call, length, causal); });
}

TEST(ContextParallel, PlainAttentionIsThatOfOneProcessForAnyLength) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const int64_t length : {1, 3, 37, 64}) {
      for (const bool causal : {true, false}) expect_like_one_process(ranks, length, causal);
    }
  }
}

TEST(ContextParallel, PlainAttentionOfALongSequenceIsThatOfOneProcess) {
  for (const int64_t ranks : {2, 3, 4}) expect_like_one_process(ranks, 4096, /*causal=*/true);
}

TEST(ContextParallel, KeepsDocumentsApart) {
  const std::vector<at::Tensor> qkv = {iota({2, 6, 15, 4}).sin(), iota({2, 6, 15, 4}).cos(),
                                       iota({2, 6, 15, 4}).mul(0.3).sin()};
  const at::Tensor grad_out = iota({2, 6, 15, 4}).mul(0.7).sin();
  const std::vector<int64_t> documents = {4, 1, 7, 3};
  for (const bool causal : {true, false}) {
    std::vector<at::Tensor> blocks;
    for (int64_t size : documents) {
      const at::Tensor ones = at::ones({size, size}, at::kLong);
      blocks.push_back(causal ? ones.tril() : ones);
    }
    const auto expected = attended_whole(qkv, grad_out, at::block_diag(blocks).to(at::kBool));
    for (int64_t ranks : {1, 2, 3}) {
      on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
          const auto actual = attended(mesh, qkv, grad_out, {.rotate = way, .documents = documents}, {}, causal);
          long_gpt::expect_near(actual, expected, std::string(to_string(way)), 1e-12);
        }
      });
    }
  }
}

TEST(ContextParallel, TakesMasks) {
  const std::vector<at::Tensor> qkv = {iota({2, 3, 13, 4}).sin(), iota({2, 3, 13, 4}).cos(),
                                       iota({2, 3, 13, 4}).mul(0.3).sin()};
  const at::Tensor grad_out = iota({2, 3, 13, 4}).mul(0.7).sin();
  const at::Tensor wave = iota({13, 13}).mul(0.61).sin();
  const at::Tensor window = at::ones({13, 13}, at::kBool).tril().logical_and(at::ones({13, 13}, at::kBool).triu(-3));
  for (int64_t ranks : {2, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (const at::Tensor& mask : {wave, window, wave.view({1, 1, 13, 13}), wave.narrow(0, 2, 1)}) {
        const auto expected = attended_whole(qkv, grad_out, mask);
        long_gpt::expect_near(attended(mesh, qkv, grad_out, {.length = 13}, mask, false), expected, "all rows", 1e-12);
        if (mask.size(-2) == 1) continue;
        const at::Tensor rows = context_parallel_shard(mesh, mask, {.seq_dim = mask.dim() - 2});
        long_gpt::expect_near(attended(mesh, qkv, grad_out, {.length = 13}, rows, false), expected, "own rows", 1e-12);
      }
    });
  }
}

TEST(ContextParallel, ObeysAutocast) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor q = iota({1, 2, 6, 4}, at::kFloat).sin();
    const ContextParallel scope(mesh, {.length = 12});
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::ScalarType dtype = at::scaled_dot_product_attention(q, q, q).scalar_type();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(dtype, at::autocast::get_autocast_dtype(at::kCPU));
  });
}

// Counts bytes that autograd saves, parameters and what is saved twice only once.
struct SavedBytes final : detail::TensorKeeper {
  struct Hooks final : torch::autograd::SavedVariableHooks {
    explicit Hooks(SavedBytes& counts_) : counts(counts_) {}
    void call_pack_hook(const at::Tensor& t) override {
      kept = t.tensor_data();
      if (counts.seen.insert(t.storage().unsafeGetStorageImpl()).second) {
        counts.bytes += int64_t(t.storage().nbytes());
        counts.alive.push_back(t.tensor_data());
      }
    }
    at::Tensor call_unpack_hook() override { return kept; }
    SavedBytes& counts;
    at::Tensor kept;
  };
  detail::SavedHooks make_hooks() override { return std::make_unique<Hooks>(*this); }
  std::set<const void*> seen;
  std::vector<at::Tensor> alive;  // so that no memory is seen twice
  int64_t bytes = 0;
};

int64_t bytes_saved(LongGpt& net, const Sequence& s) {
  SavedBytes saved;
  for (const at::Tensor& p : net->parameters()) saved.seen.insert(p.storage().unsafeGetStorageImpl());
  const detail::KeeperScope scope("test", &saved);
  long_gpt::share_of_loss(net(s.ids, s.positions), s.targets, 128);
  return saved.bytes;
}

TEST(ContextParallel, KeepsTheActivationsOfItsPart) {
  LongGpt whole = long_gpt::make_net({.layers = 2}, 64);
  const int64_t all = bytes_saved(whole, long_gpt::sequence_of(64, 0));
  EXPECT_GT(all, 100'000);
  for (const int64_t ranks : {2, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      LongGpt net = long_gpt::make_net({.layers = 2}, 64);
      for (const AttentionWay way : {AttentionWay::ring, AttentionWay::gather}) {
        const Sequence s = long_gpt::sequence_of(64, 0);
        const ContextParallel scope(mesh,
                                    {.buffers = {s.ids, s.targets, s.positions}, .seq_dims = {1, 1, 0}, .rotate = way});
        EXPECT_LE(bytes_saved(net, s), all / ranks + 64) << to_string(way);  // and a number or two for the loss
      }
    });
  }
}

TEST(ContextParallel, CommunicatesNothingButAttention) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    LongGpt net = long_gpt::make_net({.layers = 3}, 16);
    const Sequence s = long_gpt::sequence_of(16, 0);
    const ContextParallel scope(
        mesh, {.buffers = {s.ids, s.targets, s.positions}, .seq_dims = {1, 1, 0}, .rotate = AttentionWay::ring});
    const CommDebugMode comm;
    const at::Tensor loss = long_gpt::share_of_loss(net(s.ids, s.positions), s.targets, 32);
    EXPECT_EQ(comm.counts(), (std::map<std::string, int64_t>{{"send", 3}, {"recv", 3}})) << comm.report();
    loss.backward();
    EXPECT_EQ(comm.counts(), (std::map<std::string, int64_t>{{"send", 12}, {"recv", 12}})) << comm.report();
  });
}

}  // namespace
}  // namespace serried::testing
