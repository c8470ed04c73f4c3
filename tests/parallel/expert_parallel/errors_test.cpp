// Every text that experts raise.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/expert_parallel/moe.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/expert_parallel/routed.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing::moe_errors {
namespace {

using ::testing::HasSubstr;
using namespace routed;

const Case kCase{.tokens = {4, 4}, .num_experts = 4, .top_k = 2};

/// On two ranks, with what a good call takes.
struct Given {
  explicit Given(const Group& group)
      : mesh(expert_mesh(group)),
        rank(group->getRank()),
        x(tokens_of(kCase, rank)),
        logits(logits_of(kCase, rank)),
        experts(experts_of(kCase, rank)) {}
  DeviceMesh mesh;
  int64_t rank;
  at::Tensor x, logits;
  std::vector<torch::nn::AnyModule> experts;
};

void on_two(const std::function<void(Given&)>& fn) {
  run_ranks(2, [&](const Group& group) {
    Given given(group);
    fn(given);
  });
}

template <class Error = c10::ValueError, class Fn>
void expect_text(Fn&& fn, const std::string& text) {
  EXPECT_THAT(error_text<Error>(fn), HasSubstr(text));
}

TEST(MoeErrors, TokensAndLogitsAreChecked) {
  on_two([](Given& g) {
    expect_text([&] { moe(at::Tensor(), g.logits, g.experts); },
                "[moe] x is undefined and logits are f64[4,4]\n"
                "  fix: pass tokens [..., features] and logits [tokens, all experts] of a floating dtype");
    expect_text([&] { moe(g.x, g.logits.to(at::kLong), g.experts); }, "[moe] x is f64[4,5] and logits are i64[4,4]");
    expect_text([&] { moe(g.x, g.logits.narrow(0, 0, 3), g.experts); },
                "[moe] x f64[4,5] has 4 tokens, which logits f64[3,4] do not fit\n"
                "  fix: pass logits [tokens, all experts]: one row for each token of this rank");
    for (const int64_t top_k : {0, 5}) {
      expect_text([&] { moe(g.x, g.logits, g.experts, {.top_k = top_k}); },
                  c10::str("[moe] top_k is ", top_k,
                           ", and logits have 4 experts\n  fix: pass a top_k from 1 to the number of experts"));
    }
    for (const double capacity : {0.0, -1.0, std::numeric_limits<double>::infinity()}) {
      expect_text([&] { moe(g.x, g.logits, g.experts, {.capacity = capacity}); },
                  c10::str("[moe] capacity is ", capacity,
                           "\n  fix: pass a positive number: 1 is room for an even share; or none, to drop nothing"));
    }
  });
}

TEST(MoeErrors, ExpertsAreChecked) {
  on_two([](Given& g) {
    expect_text([&] { moe(g.x, g.logits, std::vector<torch::nn::AnyModule>(2)); },
                "[moe] an AnyModule among the experts is empty\n  fix: pass AnyModule(module)");
    expect_text([&] { moe(g.x, g.logits, ExpertFunction()); },
                "[moe] the function of the experts is empty\n  fix: pass a lambda");
    expect_text([&] { moe(g.x, g.logits, {g.experts[0]}); },
                "[moe] tokens are routed to 4 experts, and mesh 2 holds 2 x 1\n"
                "  fix: let logits have a column for each expert of each rank: ranks x experts of one rank");
    expect_text(
        [&] {
          moe(g.x, at::zeros({4, 3}, at::kDouble), [](const DispatchedTokens& s) { return s.tokens; });
        },
        "[moe] tokens are routed to 3 experts, and mesh 2 holds 2 x 1");
    std::vector<torch::nn::AnyModule> wide = {torch::nn::AnyModule(torch::nn::Linear(kWidth, 6)), g.experts[1]};
    wide[0].ptr()->to(at::kDouble);
    const auto text = error_text<c10::ValueError>([&] { moe(g.x, g.logits, wide); });
    EXPECT_THAT(text, HasSubstr(c10::str("[moe] expert ", 2 * g.rank, " gave f64[")));
    EXPECT_THAT(text, HasSubstr("tokens of 5 features\n  fix: give one row for each token, as wide as a token"));
    expect_text([&] { moe(g.x, g.logits, [](const DispatchedTokens&) { return at::Tensor(); }); },
                "[moe] the function of the experts gave nothing for ");
    expect_text<c10::TypeError>(
        [&] { moe(g.x, g.logits, [&](const DispatchedTokens& s) { return DTensor::from_local(s.tokens, g.mesh); }); },
        "[moe] the function of the experts gave a DTensor ");
  });
}

TEST(MoeErrors, RanksThatDifferAreNamed) {
  on_two([](Given& g) {
    const auto pass = [](const DispatchedTokens& s) { return s.tokens; };
    const at::Tensor logits = at::zeros({4, g.rank == 0 ? 4 : 6}, at::kDouble);
    expect_text([&] { moe(g.x, logits, pass); },
                "[moe] rank 0 routes to 4 experts and rank 1 to 6\n  fix: pass logits of all experts on every rank");
    expect_text([&] { moe(g.x, g.logits, g.rank == 0 ? g.experts : std::vector{g.experts[0]}); },
                "[moe] rank 0 has 2 experts and rank 1 has 1\n  fix: give every rank of the mesh as many experts");
    expect_text([&] { moe(g.rank == 0 ? g.x : g.x.to(at::kFloat), g.logits, pass); },
                "[moe] tokens are f64[5] on rank 0 and f32[5] on rank 1\n"
                "  fix: pass tokens of one dtype and width on every rank");
    expect_text([&] { moe(g.rank == 0 ? g.x : g.x.narrow(1, 0, 3), g.logits, pass); },
                "[moe] tokens are f64[5] on rank 0 and f64[3] on rank 1");
    const std::optional<double> capacity = g.rank == 0 ? std::optional<double>() : 1.0;
    expect_text([&] { moe(g.x, g.logits, pass, {.capacity = capacity}); },
                "[moe] rank 1 passes a capacity and rank 0 none\n"
                "  fix: pass the same capacity on every rank, or none on any");
  });
}

TEST(MoeErrors, MeshesAndPlacementsAreChecked) {
  on_two([](Given& g) {
    const DeviceMesh grid = init_device_mesh("cpu", {2, 1}, {"dp", "ep"}, {.group = g.mesh.root_group()});
    expect_text([&] { moe(g.x, g.logits, g.experts, {.mesh = grid}); },
                "has 2 axes\n  fix: pass the one that experts are cut over, mesh[\"ep\"], or all of them as one, "
                "mesh.flatten()");
    const auto placed = [&](const at::Tensor& t, const Placement& p) { return distribute_tensor(t, g.mesh, {p}); };
    const MoeOptions options{.mesh = g.mesh};
    expect_text<c10::TypeError>([&] { moe(placed(g.x, Shard(0)), g.logits, g.experts, options); },
                                "[moe] x is a DTensor and logits are plain\n"
                                "  fix: pass both as DTensors, or both as this rank's own: to_local()");
    expect_text<c10::TypeError>([&] { moe(g.x, placed(g.logits, Shard(0)), g.experts, options); },
                                "[moe] logits is a DTensor and x is plain");
    expect_text([&] { moe(placed(g.x, Shard(1)), placed(g.logits, Shard(0)), g.experts, options); },
                ", and a token is sent whole\n  fix: redistribute x so that it is cut along its tokens: {Shard(0)}");
    expect_text([&] { moe(placed(g.x, Replicate()), placed(g.logits, Shard(0)), g.experts, options); },
                "have the same tokens, and experts would get them from each\n"
                "  fix: redistribute x so that it is cut along its tokens: {Shard(0)}");
    expect_text([&] { moe(placed(g.x.unsqueeze(0), Shard(1)), placed(g.logits, Shard(0)), g.experts, options); },
                "\n  fix: let logits lie as x does, with the same dims but for the last");
  });
}

TEST(MoeErrors, ExpertsAreNobodysCopies) {
  on_two([](Given& g) {
    {
      torch::nn::ModuleList list(g.experts[0].ptr());
      const DistributedDataParallel<torch::nn::ModuleList> ddp(list);
      expect_text([&] { moe(g.x, g.logits, g.experts, {.mesh = g.mesh}); },
                  "[moe] DistributedDataParallel over 2 ranks takes a parameter of this rank's expert 0 for a copy of "
                  "what other ranks of ");
    }
    EXPECT_EQ(moe(g.x, g.logits, g.experts, {.mesh = g.mesh}).sizes(), g.x.sizes());
    fully_shard(*g.experts[1].ptr(), {.mesh = g.mesh});
    const auto text = error_text<c10::ValueError>([&] { moe(g.x, g.logits, g.experts, {.mesh = g.mesh}); });
    EXPECT_THAT(text, HasSubstr("[moe] a parameter of this rank's expert 1 is "));
    EXPECT_THAT(text,
                HasSubstr("share it, and each has experts of its own\n  fix: leave it plain, or cut it over ranks "
                          "with the same experts: {.mesh = mesh[\"dp\"]}"));
  });
}

TEST(MoeErrors, DispatchAndCombineAreChecked) {
  on_two([](Given& g) {
    const at::Tensor experts = at::zeros({4, 1}, at::kLong);
    expect_text([&] { dispatch_tokens(at::Tensor(), experts, 4); },
                "[dispatch_tokens] a tensor is undefined\n  fix: pass tokens and their experts");
    expect_text([&] { dispatch_tokens(g.x, experts.flatten(), 4); },
                "[dispatch_tokens] tokens are f64[4,5] and their experts i64[4]\n"
                "  fix: pass tokens [..., features] and experts [..., choices] with the same dims before");
    expect_text<c10::TypeError>([&] { dispatch_tokens(g.x, experts.to(at::kInt), 4); },
                                "[dispatch_tokens] experts are i32[4,1], not numbers of experts\n"
                                "  fix: pass int64, as topk and argmax give them");
    for (const int num_experts : {0, 3}) {
      expect_text([&] { dispatch_tokens(g.x, experts, num_experts); },
                  c10::str("[dispatch_tokens] ", num_experts, " experts cannot be dealt out to the 2 ranks of "));
    }
    expect_text([&] { dispatch_tokens(g.x, experts - 1, 4); },
                "[dispatch_tokens] choices go from -1 to -1, and experts from 0 to 3\n"
                "  fix: pass numbers of experts, less than num_experts");
    expect_text<c10::Error>([&] { dispatch_tokens(g.x, experts + 4, 4, {.capacity = 1.0}); },
                            "[dispatch_tokens] a choice is none of the experts\n  fix: pass numbers from 0 on");
    expect_text([&] { combine_tokens(g.x, {}, g.x); },
                "[combine_tokens] nothing was dispatched\n  fix: pass what dispatch_tokens gave");
    const DispatchedTokens sent = dispatch_tokens(g.x, experts, 4);
    expect_text([&] { combine_tokens(sent.tokens.narrow(1, 0, 3), sent, g.x); }, "[combine_tokens] results are f64[");
    expect_text(
        [&] {
          combine_tokens(sent.tokens, sent, at::ones({4, 2}));
        },
        "[combine_tokens] weights are f32[4,2], and there are 1 choices for each of the tokens [4, 5]\n"
        "  fix: pass plain weights of the sizes that the experts had in dispatch_tokens");
  });
}

TEST(MoeErrors, WeightsOfExpertsAreChecked) {
  on_two([](Given& g) {
    const DispatchedTokens sent = dispatch_tokens(g.x, at::arange(4).unsqueeze(1), 4, {.mesh = g.mesh});
    const auto placed = [&](const at::Tensor& t, const Placement& p) { return distribute_tensor(t, g.mesh, {p}); };
    const at::Tensor whole = at::ones({4, kWidth, 3}, at::kDouble);
    expect_text([&] { expert_linear(sent.tokens, {}, whole); },
                "[expert_linear] nothing was dispatched, or a tensor is undefined\n"
                "  fix: pass rows, what dispatch_tokens gave, and a weight");
    for (const Placement& p : {Placement(Shard(1)), Placement(Replicate())}) {
      const auto text = error_text<c10::ValueError>([&] { expert_linear(sent.tokens, sent, placed(whole, p)); });
      EXPECT_THAT(text, HasSubstr("[expert_linear] weight is "));
      EXPECT_THAT(text,
                  HasSubstr("\n  fix: distribute_parameter(weight, mesh[\"ep\"], {Shard(0)}) over the mesh of the "
                            "experts, and leave other axes to fully_shard or DDP"));
    }
    const std::string misfit = "\n  fix: pass rows [rows, in], weight [experts, in, out] and bias [experts, out]";
    expect_text([&] { expert_linear(sent.tokens, sent, whole); }, misfit);
    expect_text(
        [&] {
          expert_linear(sent.tokens, sent, placed(at::ones({5, kWidth, 3}, at::kDouble), Shard(0)));
        },
        misfit);
    expect_text([&] { expert_linear(sent.tokens.t(), sent, placed(whole, Shard(0))); }, misfit);
    expect_text(
        [&] {
          expert_linear(sent.tokens, sent, placed(whole, Shard(0)), placed(at::ones({4, 2}, at::kDouble), Shard(0)));
        },
        misfit);
    torch::nn::Module holder;
    const at::Tensor own = holder.register_parameter("w", at::ones({2, kWidth, 3}, at::kDouble));
    fully_shard(holder, {.mesh = g.mesh});
    expect_text([&] { expert_linear(sent.tokens, sent, holder.parameters()[0]); },
                "share it, and each has experts of its own");
    expect_text<c10::TypeError>(
        [&] { expert_linear(sent.tokens, sent, holder.parameters()[0].narrow(0, 0, 1)); },
        "[expert_linear] weight is a view of a sharded parameter\n  fix: pass the parameter itself");
  });
}

TEST(MoeErrors, BalancingLossIsChecked) {
  on_two([](Given& g) {
    MoeLoad load;
    expect_text([&] { load_balancing_loss(g.logits, load); },
                "[load_balancing_loss] logits are f64[4,4] and the load is of 0 experts\n"
                "  fix: pass the logits of a call of moe and the load that it filled");
    moe(g.x, g.logits, g.experts, {.mesh = g.mesh, .load = &load});
    for (const Placement& p : {Placement(Shard(1)), Placement(Partial())}) {
      expect_text([&] { load_balancing_loss(DTensor::from_local(g.logits, g.mesh, {p}), load); },
                  p.is_partial() ? "\n  fix: redistribute them so that each rank has whole rows: {Shard(0)}"
                                 : "[load_balancing_loss] logits are ");
    }
  });
}

}  // namespace
}  // namespace serried::testing::moe_errors
