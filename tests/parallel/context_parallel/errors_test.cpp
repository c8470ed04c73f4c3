// What ContextParallel refuses, and how it says so.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "serried/parallel/context_parallel/context_parallel.h"
#include "serried/tensor/attention/sequence_scope.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

template <class Exception = c10::ValueError>
std::string error_of_scope(const DeviceMesh& mesh, const ContextParallelOptions& options) {
  const std::string text = error_text_of_any_rank<Exception>([&] { const ContextParallel scope(mesh, options); });
  EXPECT_EQ(detail::sequence_scope(), nullptr);
  return text;
}

TEST(ContextParallelErrors, LengthsOfBuffersMustAgree) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = iota({2, 10}), positions = iota({9});
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {x, positions}, .seq_dims = {1, 0}}),
              "[ContextParallel] lengths differ: dim 1 of buffer 0 is 10, dim 0 of buffer 1 is 9\n"
              "  fix: pass buffers of one sequence, with its dim as seq_dims");
    EXPECT_EQ(x.size(1), 10);
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {x}, .seq_dims = {1}, .documents = {3, 4}}),
              "[ContextParallel] lengths differ: documents add up to 7, dim 1 of buffer 0 is 10\n"
              "  fix: let the lengths of documents add up to that of the sequence");
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {x}, .seq_dims = {1}, .length = 12}),
              "[ContextParallel] lengths differ: length is 12, dim 1 of buffer 0 is 10\n"
              "  fix: pass buffers of one sequence, with its dim as seq_dims");
  });
}

TEST(ContextParallelErrors, RanksMustAgree) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor x = iota({mesh.get_rank() == 2 ? 11 : 10});
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {x}, .seq_dims = {0}}),
              "[ContextParallel] ranks differ: rank 0 of mesh 3 has length 10, rotate automatic, rank 2 has length 11, "
              "rotate automatic\n"
              "  fix: make the scope with the same sequence on every rank of the axis");
    EXPECT_EQ(x.size(0), mesh.get_rank() == 2 ? 11 : 10);
  });
}

TEST(ContextParallelErrors, MeshesHaveOneAxisAndThisRank) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "cp"}, {.group = group});
    EXPECT_EQ(error_of_scope(mesh, {}),
              "[ContextParallel] mesh dp=2 cp=2 has 2 axes, and a sequence is cut over one of them\n"
              "  fix: pass one axis: mesh[\"cp\"]");
    EXPECT_EQ(error_text_of_any_rank<c10::ValueError>([&] { context_parallel_unshard(mesh, iota({2})); }),
              "[context_parallel_unshard] mesh dp=2 cp=2 has 2 axes, and a sequence is cut over one of them\n"
              "  fix: pass one axis: mesh[\"cp\"]");
    const DeviceMesh some = init_device_mesh("cpu", {2}, {"cp"}, {.group = group});
    if (group->getRank() < 2) return;
    EXPECT_EQ(error_of_scope(some, {}),
              "[ContextParallel] this rank is not in mesh cp=2\n  fix: call it on ranks of the mesh only");
  });
}

TEST(ContextParallelErrors, OfLists) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor x = iota({2, 10});
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {x}, .seq_dims = {}}),
              "[ContextParallel] there are 1 buffers and 0 seq_dims\n  fix: pass one dim per buffer");
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {x}, .seq_dims = {1}, .no_restore = {iota({2})}}),
              "[ContextParallel] tensor 0 of no_restore is none of the buffers\n"
              "  fix: name buffers there, or leave it out");
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {x, x}, .seq_dims = {1, 1}}),
              "[ContextParallel] buffers 0 and 1 are one tensor\n  fix: pass each of them once");
    EXPECT_EQ(error_of_scope<c10::IndexError>(mesh, {.buffers = {x}, .seq_dims = {2}}),
              "[ContextParallel] dim 2 is to be the sequence of f64[2,10]\n  fix: pass a dim from -2 to 1");
    EXPECT_EQ(error_of_scope<c10::IndexError>(mesh, {.buffers = {at::ones({})}, .seq_dims = {0}}),
              "[ContextParallel] dim 0 is to be the sequence of f32[]\n  fix: pass a tensor with a dim for the "
              "sequence");
    EXPECT_EQ(error_of_scope(mesh, {.documents = {3, 0}}),
              "[ContextParallel] document 1 has 0 positions\n  fix: pass lengths of 1 or more");
    EXPECT_EQ(error_of_scope(mesh, {.length = -1}),
              "[ContextParallel] length is -1\n  fix: pass the number of positions");
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {at::Tensor()}, .seq_dims = {0}}),
              "[ContextParallel] buffer 0 is undefined\n  fix: pass tensors");
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {iota({2}).requires_grad_() * 2}, .seq_dims = {0}}),
              "[ContextParallel] buffer 0, f64[2], is the result of an op that autograd recorded\n"
              "  fix: pass what it was made of, or cut it by context_parallel_shard, which is differentiable");
    EXPECT_EQ(error_of_scope(mesh, {.buffers = {distribute_tensor(x, mesh, {Shard(0)})}, .seq_dims = {0}}),
              "[ContextParallel] buffer 0 is distributed already\n"
              "  fix: leave it out: DTensors are cut by distribute_tensor(x, mesh, {BalancedShard(dim)}), and need no "
              "scope");
    EXPECT_EQ(error_text_of_any_rank<c10::ValueError>(
                  [&] { context_parallel_shard(mesh, x, {.seq_dim = 1, .documents = {3}}); }),
              "[context_parallel_shard] lengths differ: documents add up to 3, dim 1 is 10\n"
              "  fix: pass the lengths of all documents");
  });
}

TEST(ContextParallelErrors, UnshardTakesWhatWasCut) {
  const auto expect_text = [](const std::vector<int64_t>& sizes, const std::string& what) {
    on_mesh({int64_t(sizes.size())}, [&](const DeviceMesh& mesh) {
      const at::Tensor part = iota({sizes[size_t(mesh.get_rank())]});
      EXPECT_EQ(error_text_of_any_rank<c10::ValueError>([&] { context_parallel_unshard(mesh, part); }),
                "[context_parallel_unshard] " + what +
                    "\n  fix: pass what was cut by ContextParallel or context_parallel_shard, with the same documents");
    });
  };
  expect_text({1, 5}, "rank 0 of mesh 2 has 1 of 6 positions, and its part of 6 is 3");
  // The part of rank 0 is as it should be.
  expect_text({2, 3, 1}, "rank 1 of mesh 3 has 3 of 6 positions, and its part of 6 is 2");
}

template <class Exception, class... Args>
std::string error_of_attention(const Args&... arguments) {
  return error_text_of_any_rank<Exception>([&] { at::scaled_dot_product_attention(arguments...); });
}

TEST(ContextParallelErrors, OfAttention) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor q = iota({1, 2, 5, 4}), other = iota({1, 2, 6, 4}), none;
    const std::string rank = std::to_string(mesh.get_rank());
    {
      const ContextParallel scope(mesh, {});
      EXPECT_EQ(error_of_attention<c10::ValueError>(q, q, q),
                "[scaled_dot_product_attention] inside ContextParallel nobody said how long the sequence is\n"
                "  fix: pass .buffers, or .length where the parts are there already");
    }
    const ContextParallel scope(mesh, {.length = 10});
    EXPECT_EQ(
        error_of_attention<c10::ValueError>(q, other, other),
        "[scaled_dot_product_attention] keys are f64[1,2,6,4], with 6 positions, but inside ContextParallel rank " +
            rank +
            " of mesh 2 holds 5 of 10\n"
            "  fix: pass all tensors that have the sequence as .buffers, or call attention to other sequences "
            "outside of the scope");
    EXPECT_EQ(error_of_attention<c10::ValueError>(q[0], q[0], q[0]),
              "[scaled_dot_product_attention] inside ContextParallel queries, keys and values have 4 dims, and these "
              "have 3, 3 and 3\n  fix: pass [batch, heads, length, size]");
    EXPECT_EQ(error_of_attention<c10::NotImplementedError>(q, q, iota({1, 2, 5, 3})),
              "[scaled_dot_product_attention] inside ContextParallel queries, keys and values have one size, and these "
              "have 4, 4 and 3\n  fix: pad the shorter ones with zeros");
    EXPECT_EQ(error_of_attention<c10::ValueError>(q, iota({1, 1, 5, 4}), iota({1, 1, 5, 4})),
              "[scaled_dot_product_attention] there are 2 heads of queries, 1 of keys and 1 of values\n"
              "  fix: pass as many of each, or enable_gqa = true where those of keys divide those of queries");
    EXPECT_EQ(error_of_attention<c10::ValueError>(iota({2, 2, 5, 4}), q, q),
              "[scaled_dot_product_attention] inside ContextParallel queries, keys and values have one batch size, and "
              "these have 2, 1 and 1\n  fix: expand() those of one to the size of the others");
    EXPECT_EQ(error_of_attention<c10::ValueError>(q, q, q.to(at::kFloat)),
              "[scaled_dot_product_attention] inside ContextParallel queries, keys and values have one floating dtype, "
              "and these are f64, f64 and f32\n  fix: convert them by to(dtype)");
    EXPECT_EQ(error_of_attention<c10::NotImplementedError>(q, q, q, std::optional<at::Tensor>(), 0.25),
              "[scaled_dot_product_attention] inside ContextParallel there is no dropout of weights, and dropout_p is "
              "0.25\n  fix: pass 0 and drop out elements of the result instead");
  });
}

TEST(ContextParallelErrors, OfMasks) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor q = iota({1, 2, 5, 4});
    const std::string rank = std::to_string(mesh.get_rank());
    const ContextParallel scope(mesh, {.length = 10});
    EXPECT_EQ(error_of_attention<c10::ValueError>(q, q, q, std::optional(iota({5, 5}))),
              "[scaled_dot_product_attention] the mask is f64[5,5], and inside ContextParallel rank " + rank +
                  " of mesh 2 has 5 rows of 10 keys, for queries f64[1,2,5,4]\n"
                  "  fix: pass [rows, keys] or [batch, heads, rows, keys] with this rank's rows, all rows or one row, "
                  "and all keys");
    for (const at::Tensor& mask : {iota({1, 3, 5, 10}), iota({2, 1, 5, 10})}) {
      EXPECT_NE(error_of_attention<c10::ValueError>(q, q, q, std::optional(mask)).find("the mask is f64["),
                std::string::npos);
    }
    EXPECT_EQ(error_of_attention<c10::ValueError>(q, q, q, std::optional(at::ones({5, 10}, at::kLong))),
              "[scaled_dot_product_attention] the mask is i64[5,10]\n"
              "  fix: pass bool, true where a query attends to a key, or floats that are added");
    EXPECT_EQ(
        error_of_attention<c10::ValueError>(q, q, q, std::optional(iota({5, 10})), 0.0, true),
        "[scaled_dot_product_attention] there is a mask, and is_causal is set, too\n  fix: put both into the mask");
    EXPECT_EQ(
        error_of_attention<c10::NotImplementedError>(q, q, q, std::optional(iota({5, 10}).requires_grad_())),
        "[scaled_dot_product_attention] inside ContextParallel a mask has no gradient\n  fix: pass mask.detach()");
    const ContextParallel documents(mesh, {.documents = {4, 6}});
    EXPECT_EQ(error_of_attention<c10::NotImplementedError>(q, q, q, std::optional(iota({5, 10}))),
              "[scaled_dot_product_attention] there is a mask, and ContextParallel was given documents, too\n"
              "  fix: put the documents into the mask and leave .documents out");
  });
}

TEST(ContextParallelErrors, DTensorsHaveNoDocuments) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const ContextParallel scope(mesh, {.documents = {4, 6}});
    for (const Placement& placement : {BalancedShard(2), Shard(2)}) {
      const at::Tensor q = distribute_tensor(iota({1, 2, 10, 4}), mesh, {placement});
      EXPECT_EQ(error_of_attention<c10::NotImplementedError>(q, q, q),
                "[scaled_dot_product_attention] queries are a DTensor cut along its sequence, and ContextParallel was "
                "given documents\n  fix: pass plain tensors, cut as .buffers or by context_parallel_shard with the "
                "documents, or leave .documents out and pass a mask");
    }
  });
}

// As tensor parallel layers give them: whole along the sequence, of which each rank has its own part.
TEST(ContextParallelErrors, DTensorsComeTogetherAndWithMasksForAllHeads) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const ContextParallel scope(mesh, {.length = 10});
    const at::Tensor plain = iota({1, 2, 5, 4}), q = distribute_tensor(plain, mesh, {Replicate()});
    EXPECT_EQ(error_of_attention<c10::TypeError>(q, plain, plain),
              "[scaled_dot_product_attention] queries are a DTensor, and keys and values are none of the same mesh\n"
              "  fix: pass all three as DTensors of one mesh, or all three as plain tensors");
    EXPECT_EQ(
        error_of_attention<c10::NotImplementedError>(q, q, q, std::optional(iota({1, 2, 5, 10}))),
        "[scaled_dot_product_attention] queries are a DTensor inside ContextParallel, and the mask is not a plain "
        "tensor of 2 dims\n  fix: pass this rank's rows of a mask that serves all heads: [rows, keys]");
  });
}

TEST(ContextParallelErrors, SecondGradients) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor q = iota({1, 2, 5, 4}).sin().requires_grad_();
    const ContextParallel scope(mesh, {.length = 10});
    const at::Tensor loss = at::scaled_dot_product_attention(q, q, q).sum();
    EXPECT_EQ(error_text_of_any_rank<c10::NotImplementedError>(
                  [&] { torch::autograd::grad({loss}, {q}, {}, std::nullopt, /*create_graph=*/true); }),
              "[scaled_dot_product_attention] inside ContextParallel attention has no second gradient\n"
              "  fix: call backward without create_graph");
  });
}

TEST(ContextParallelErrors, BuffersAreNotCutInsideOfACapturedFunction) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto step = capture([&](const at::Tensor& x) {
      const ContextParallel scope(mesh, {.buffers = {x}, .seq_dims = {0}});
      return x * 2;
    });
    const at::Tensor x = iota({10});
    const std::string text = error_text_of_any_rank<c10::NotImplementedError>([&] {
      for (int i = 0; i < 4; ++i) step(x);
    });
    EXPECT_NE(text.find("[ContextParallel] buffers would be cut inside of a captured function, which no op shows\n"
                        "  fix: make the scope around the captured call, or cut by context_parallel_shard and pass "
                        ".length"),
              std::string::npos)
        << text;
    EXPECT_EQ(x.size(0), 10);
  });
}

}  // namespace
}  // namespace serried::testing
