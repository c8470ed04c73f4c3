// Saving and loading a ZeroRedundancyOptimizer, its flat parameters, and what it says when it is used wrongly.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>

#include "serried/comm/groups/ranks.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_equal;
using torch::optim::OptimizerParamGroup;
using ZeroAdam = ZeroRedundancyOptimizer<torch::optim::AdamW>;

std::vector<at::Tensor> ramp_parameters() {
  std::vector<at::Tensor> parameters;
  for (int64_t size : {6, 4, 3, 1, 2}) parameters.push_back(at::linspace(-1, double(size), size).requires_grad_());
  return parameters;
}

void ramp_steps(torch::optim::Optimizer& optimizer, int count) {
  for (int index = 0; index < count; ++index) {
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& p : group.params()) p.mutable_grad() = p.detach().sin() + 0.25 * index;
    }
    optimizer.step();
  }
}

template <class Optimizer>
std::string saved_text(const Optimizer& optimizer) {
  std::ostringstream bytes;
  torch::save(optimizer, bytes);
  return bytes.str();
}

template <class Optimizer>
void load_text(const std::string& text, Optimizer& optimizer) {
  std::istringstream bytes(text);
  torch::load(optimizer, bytes);
}

void expect_same_state(const torch::optim::Optimizer& actual, const torch::optim::Optimizer& expected) {
  using State = torch::optim::AdamWParamState;
  using Options = torch::optim::AdamWOptions;
  ASSERT_EQ(actual.param_groups().size(), expected.param_groups().size());
  for (size_t g = 0; g < expected.param_groups().size(); ++g) {
    const auto& ours = actual.param_groups()[g];
    const auto& theirs = expected.param_groups()[g];
    EXPECT_TRUE(static_cast<const Options&>(ours.options()) == static_cast<const Options&>(theirs.options()));
    for (size_t i = 0; i < theirs.params().size(); ++i) {
      const auto& a = static_cast<const State&>(*actual.state().at(ours.params()[i].unsafeGetTensorImpl()));
      const auto& b = static_cast<const State&>(*expected.state().at(theirs.params()[i].unsafeGetTensorImpl()));
      EXPECT_EQ(a.step(), b.step());
      expect_equal(a.exp_avg(), b.exp_avg());
      expect_equal(a.exp_avg_sq(), b.exp_avg_sq());
    }
  }
}

TEST(ZeroState, SavesWhatAnOrdinaryOptimizerWouldSave) {
  torch::optim::AdamW plain(ramp_parameters(), 0.1);
  ramp_steps(plain, 3);
  std::string text;
  run_ranks(3, [&](const Group& g) {
    ZeroAdam zero(ramp_parameters(), 0.1, {.process_group = g});
    ramp_steps(zero, 3);
    zero.consolidate_state_dict(1);
    if (g->getRank() == 1) {
      expect_same_state(zero, plain);
      text = saved_text(zero);
    }
  });
  torch::optim::AdamW loaded(ramp_parameters(), 0.5);
  load_text(text, loaded);
  expect_same_state(loaded, plain);
}

TEST(ZeroState, GoesOnFromAnOrdinaryOptimizersFileOnAnyNumberOfRanks) {
  torch::optim::AdamW plain(ramp_parameters(), 0.1);
  ramp_steps(plain, 3);
  const std::string text = saved_text(plain);
  std::vector<at::Tensor> middle;
  for (const at::Tensor& p : plain.param_groups()[0].params()) middle.push_back(p.detach().clone());
  ramp_steps(plain, 3);
  for (int world_size : {1, 2, 4}) {
    run_ranks(world_size, [&](const Group& g) {
      std::vector<at::Tensor> parameters;
      for (const at::Tensor& p : middle) parameters.push_back(p.clone().requires_grad_());
      ZeroAdam zero(parameters, 0.9, {.process_group = g});
      load_text(text, zero);
      for (const auto& [parameter, state] : zero.local_optimizer().state()) {
        const auto is_it = [&, key = parameter](const at::Tensor& p) { return p.unsafeGetTensorImpl() == key; };
        const auto found = std::find_if(parameters.begin(), parameters.end(), is_it);
        ASSERT_NE(found, parameters.end());
        EXPECT_EQ(zero.owner_of(*found), g->getRank());
      }
      ramp_steps(zero, 3);
      for (size_t i = 0; i < parameters.size(); ++i) expect_equal(parameters[i], plain.param_groups()[0].params()[i]);
    });
  }
}

TEST(ZeroState, SaveAndLoadRoundTripWithOtherOptimizersAndSeveralGroups) {
  run_ranks(2, [](const Group& g) {
    const auto check = [&]<class Local>(Local*, auto options) {
      const std::vector<at::Tensor> first = ramp_parameters();
      std::vector<OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<at::Tensor>(first.begin(), first.begin() + 2));
      groups.emplace_back(std::vector<at::Tensor>(first.begin() + 2, first.end()));
      ZeroRedundancyOptimizer<Local> zero(groups, options, {.process_group = g});
      ramp_steps(zero, 2);
      std::vector<std::string> texts(2);
      for (int to : {0, 1}) {
        zero.consolidate_state_dict(to);
        if (g->getRank() == to) texts[size_t(to)] = saved_text(zero);
      }
      const std::string& text = texts[size_t(g->getRank())];
      const size_t num_states = zero.local_optimizer().state().size();
      load_text(text, zero);
      EXPECT_EQ(zero.local_optimizer().state().size(), num_states);
      ramp_steps(zero, 1);
      Local plain(ramp_parameters(), options);
      ramp_steps(plain, 2);
      for (const at::Tensor& p : plain.param_groups()[0].params()) p.mutable_grad() = p.detach().sin();
      plain.step();
      for (size_t i = 0; i < first.size(); ++i) expect_equal(first[i], plain.param_groups()[0].params()[i]);
    };
    check(static_cast<torch::optim::Adam*>(nullptr), torch::optim::AdamOptions(0.1).amsgrad(true));
    check(static_cast<torch::optim::SGD*>(nullptr), torch::optim::SGDOptions(0.1).momentum(0.9));
    check(static_cast<torch::optim::SGD*>(nullptr), torch::optim::SGDOptions(0.1));
    check(static_cast<torch::optim::Adagrad*>(nullptr), torch::optim::AdagradOptions(0.1));
    check(static_cast<torch::optim::RMSprop*>(nullptr), torch::optim::RMSpropOptions(0.1).momentum(0.5).centered(true));
  });
}

TEST(ZeroState, AskedForBeforeConsolidationItNamesTheCall) {
  run_ranks(2, [](const Group& g) {
    ZeroAdam zero(ramp_parameters(), 0.1, {.process_group = g});
    ramp_steps(zero, 1);
    const std::string rank = std::to_string(g->getRank());
    const std::string text = "[ZeroRedundancyOptimizer] rank " + rank +
                             " holds only its own part of the state\n  fix: call consolidate_state_dict(" + rank +
                             ") on every rank after the last step(), then save on rank " + rank + "\n  at:  rank " +
                             rank + "/2";
    EXPECT_EQ(error_text<c10::ValueError>([&] { saved_text(zero); }), text);
    zero.consolidate_state_dict(0);
    if (g->getRank() == 1) EXPECT_EQ(error_text<c10::ValueError>([&] { saved_text(zero); }), text);
    ramp_steps(zero, 1);  // what was consolidated is of the past now
    EXPECT_EQ(error_text<c10::ValueError>([&] { saved_text(zero); }), text);
    EXPECT_TRUE(zero.state().empty());
  });
}

TEST(ZeroState, ConsolidatingToARankThatDoesNotExistIsAnError) {
  run_ranks(2, [](const Group& g) {
    ZeroAdam zero(ramp_parameters(), 0.1, {.process_group = g});
    EXPECT_EQ(error_text<c10::ValueError>([&] { zero.consolidate_state_dict(2); }),
              "[ZeroRedundancyOptimizer] consolidate_state_dict(2) in a group of 2\n  fix: pass a rank of the group: 0 "
              "to 1\n  at:  rank " +
                  std::to_string(g->getRank()) + "/2");
  });
}

TEST(ZeroViews, ParametersOfOneOwnerShareOneTensor) {
  run_ranks(2, [](const Group& g) {
    const std::vector<at::Tensor> p = ramp_parameters();
    ZeroAdam zero(p, 0.1, {.process_group = g, .parameters_as_bucket_view = true});
    for (const at::Tensor& a : p) {
      for (const at::Tensor& b : p) EXPECT_EQ(a.is_alias_of(b), zero.owner_of(a) == zero.owner_of(b));
    }
    for (size_t i = 0; i < p.size(); ++i) expect_equal(p[i], ramp_parameters()[i]);
  });
}

TEST(ZeroViews, LiveOnWhenParametersGetOtherMemory) {
  run_ranks(2, [](const Group& g) {
    const std::vector<at::Tensor> p = ramp_parameters();
    const std::vector<at::Tensor> whole = ramp_parameters();
    ZeroAdam zero(p, 0.1, {.process_group = g, .parameters_as_bucket_view = true});
    torch::optim::AdamW plain(whole, 0.1);
    for (size_t i = 0; i < p.size(); ++i) {
      p[i].set_data(at::full_like(p[i], double(i)));  // as torch::load(module) does
      whole[i].set_data(at::full_like(whole[i], double(i)));
    }
    ramp_steps(zero, 3);
    ramp_steps(plain, 3);
    for (size_t i = 0; i < p.size(); ++i) expect_equal(p[i], whole[i]);
  });
}

TEST(ZeroViews, AStepInvalidatesGraphsOnEveryRank) {
  run_ranks(2, [](const Group& g) {
    for (bool as_views : {false, true}) {
      const std::vector<at::Tensor> p = ramp_parameters();
      ZeroAdam zero(p, 0.1, {.process_group = g, .parameters_as_bucket_view = as_views});
      for (const at::Tensor& parameter : p) {
        const at::Tensor stale = parameter.square().sum();
        ramp_steps(zero, 1);
        EXPECT_THROW(stale.backward(), c10::Error) << "owner " << zero.owner_of(parameter);
      }
    }
  });
}

TEST(ZeroErrors, PartsConvertedToAnotherDtypeAreNamed) {
  run_ranks(2, [](const Group& g) {
    const std::vector<at::Tensor> p = ramp_parameters();
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(p, 0.1, {.process_group = g});
    for (const at::Tensor& parameter : p) {
      if (parameter.numel() < 3) parameter.set_data(parameter.detach().to(at::kDouble));
    }
    const std::string text = error_text<c10::ValueError>([&] { zero.step(); });
    EXPECT_EQ(text,
              "[ZeroRedundancyOptimizer] parameters that had one dtype now are f32[6] and f64[2]\n  fix: convert the "
              "module before the optimizer is made\n  at:  rank " +
                  std::to_string(g->getRank()) + "/2");
  });
}

// What every rank says when rank `odd` of three passes something else than the others.
void expect_construction_error(int odd, const std::vector<at::Tensor>& theirs, const std::string& what) {
  run_ranks(3, [&](const Group& g) {
    std::vector<at::Tensor> mine = g->getRank() == odd ? theirs : ramp_parameters();
    EXPECT_EQ(error_text<c10::ValueError>([&] { ZeroAdam(mine, 0.1, {.process_group = g}); }),
              "[ZeroRedundancyOptimizer] " + what +
                  "\n  fix: pass the parameters of the same module, in the same order, on every rank\n  at:  rank " +
                  std::to_string(g->getRank()) + "/3");
  });
}

TEST(ZeroErrors, RanksWithDifferentParametersAreNamedOnEveryRank) {
  std::vector<at::Tensor> fewer = ramp_parameters();
  fewer.pop_back();
  expect_construction_error(2, fewer, "parameter 4 is f32[2] in group 0 on rank 0 and missing on rank 2");
  std::vector<at::Tensor> other_shape = ramp_parameters();
  other_shape[1] = at::zeros({5}, at::requires_grad());
  expect_construction_error(1, other_shape,
                            "parameter 1 is f32[4] in group 0 on rank 0 and f32[5] in group 0 on rank 1");
  std::vector<at::Tensor> other_dtype = ramp_parameters();
  other_dtype[3] = at::zeros({1}, at::dtype(at::kDouble).requires_grad(true));
  expect_construction_error(0, other_dtype,
                            "parameter 3 is f64[1] in group 0 on rank 0 and f32[1] in group 0 on rank 1");
  expect_construction_error(1, {}, "parameter 0 is f32[6] in group 0 on rank 0 and missing on rank 1");
}

TEST(ZeroErrors, NoParametersAtAllIsAnError) {
  run_ranks(2, [](const Group& g) {
    EXPECT_EQ(error_text<c10::ValueError>([&] { ZeroAdam(std::vector<at::Tensor>{}, 0.1, {.process_group = g}); }),
              "[ZeroRedundancyOptimizer] there are no parameters\n  fix: pass module->parameters()\n  at:  rank " +
                  std::to_string(g->getRank()) + "/2");
  });
}

TEST(ZeroErrors, AParameterInTwoGroupsIsNamed) {
  run_ranks(2, [](const Group& g) {
    const std::vector<at::Tensor> p = ramp_parameters();
    const std::vector<OptimizerParamGroup> groups = {OptimizerParamGroup({p[0], p[1]}), OptimizerParamGroup({p[1]})};
    EXPECT_EQ(error_text<c10::ValueError>([&] { ZeroAdam(groups, 0.1, {.process_group = g}); }),
              "[ZeroRedundancyOptimizer] a parameter f32[4] stands in group 0 and in group 1\n  fix: put it into one "
              "group: it can have one learning rate only\n  at:  rank " +
                  std::to_string(g->getRank()) + "/2");
  });
}

TEST(ZeroErrors, ASparseGradientIsRefusedOnEveryRank) {
  run_ranks(2, [](const Group& g) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(embedding->parameters(), 0.1, {.process_group = g});
    embedding->forward(at::zeros({1}, at::kLong)).sum().backward();
    EXPECT_EQ(
        error_text<c10::ValueError>([&] { zero.step(); }),
        "[ZeroRedundancyOptimizer] the gradient of parameter 0, f32[5,2], is sparse\n  fix: build its module with "
        ".sparse(false), or give it to an ordinary optimizer\n  at:  rank " +
            std::to_string(g->getRank()) + "/2");
  });
}

TEST(ZeroErrors, ADTensorIsRefusedOnEveryRank) {
  run_ranks(2, [](const Group& g) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = g});
    const at::Tensor part = distribute_tensor(at::ones({5, 3}), mesh, {Shard(0)}).detach().requires_grad_();
    const auto told = [&](size_t index) {
      return c10::str("[ZeroRedundancyOptimizer] parameter ", index,
                      " is a DTensor, f32[5,3] S0 on mesh tp=2\n  fix: give DTensors to an ordinary optimizer, whose "
                      "state lies as they do: Shard(0) over the mesh spreads both\n  at:  rank ",
                      g->getRank(), "/2");
    };
    const std::vector<at::Tensor> plain = ramp_parameters();
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                ZeroAdam(std::vector<at::Tensor>{plain[0], part}, 0.1, {.process_group = g});
              }),
              told(1));
    ZeroAdam zero(plain, 0.1, {.process_group = g});
    EXPECT_EQ(error_text<c10::ValueError>([&] { zero.add_param_group(OptimizerParamGroup({part})); }), told(5));
  });
}

// What the message of the refusal says to do.
TEST(ZeroErrors, AnOrdinaryOptimizerSpreadsTheStateOfADTensor) {
  run_ranks(2, [](const Group& g) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = g});
    const at::Tensor whole = at::linspace(-1, 1, 15).view({5, 3}).requires_grad_();
    const at::Tensor part = distribute_tensor(whole.detach().clone(), mesh, {Shard(0)}).detach().requires_grad_();
    torch::optim::AdamW plain({whole}, 0.1), spread({part}, 0.1);
    for (int step = 0; step < 3; ++step) {
      plain.zero_grad();
      spread.zero_grad();
      whole.pow(2).sum().backward();
      part.pow(2).sum().backward();
      plain.step();
      spread.step();
    }
    testing::expect_close(DTensor(part).full_tensor().detach(), whole.detach());
    const auto& state =
        static_cast<const torch::optim::AdamWParamState&>(*spread.state().at(part.unsafeGetTensorImpl()));
    EXPECT_EQ(DTensor(state.exp_avg()).to_local().sizes(), at::IntArrayRef({g->getRank() == 0 ? 3 : 2, 3}));
  });
}

TEST(ZeroErrors, ATensorOfNobodyHasNoOwner) {
  run_ranks(1, [](const Group& g) {
    ZeroAdam zero(ramp_parameters(), 0.1, {.process_group = g});
    EXPECT_EQ(error_text<c10::ValueError>([&] { zero.owner_of(at::zeros({3})); }),
              "[ZeroRedundancyOptimizer] f32[3] is not a parameter of this optimizer\n  fix: pass a tensor of "
              "param_groups(), not a copy of it\n  at:  rank 0/1");
  });
}

}  // namespace
}  // namespace serried
