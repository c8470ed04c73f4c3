// Random modules in DistributedDataParallel: gradients are the averages over ranks of what plain LibTorch computes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/weighted_loss.h"
#include "tests/support/random_programs.h"

namespace serried::testing {
namespace {

/// Which parts of the module a forward leaves out.
enum class Unused { none, by_call, by_rank, everywhere };

/// One random program. All ranks draw the same one from its seed.
struct DdpProgram {
  uint64_t seed = 0;
  std::string backend;
  int num_ranks = 1;
  int64_t width = 3;
  Unused unused = Unused::none;
  bool weighted = false;     // the loss is the mean over the rows of all ranks
  std::string table;         // "sparse", "dense" or none
  std::vector<bool> frozen;  // per weight
  std::vector<int> layers;   // the weight of each; one may stand several times
  std::vector<int> outputs;  // the layers that forward returns, the last one among them
  int num_backwards = 1;     // per iteration; all but the last inside no_sync
  int num_forwards = 1;      // per backward
  int bypassing_rank = -1;   // makes one more backward, through the module itself
  int decayed_weight = -1;   // adds its norm to the loss
  int zeroing = 0;           // gradients before an iteration: 0 none, 1 zero, 2 as they are
  std::string hook;
  DistributedDataParallelOptions options = {};
};

/// One call of forward: all that its input and the layers it uses follow from.
struct DdpCall {
  int rank;
  int iteration;
  int number;  // among those of the iteration
};

DdpProgram draw_program(uint64_t seed) {
  std::mt19937_64 dice(seed);
  const auto one_in = [&](int n) { return dice() % uint64_t(n) == 0; };
  DdpProgram p;
  p.seed = seed;
  p.backend = std::array{"threads", "threads", "shm", "gloo"}[dice() % 4];
  p.num_ranks = 1 + int(dice() % 4);
  p.width = 2 + int64_t(dice() % 4);
  p.unused = std::array{Unused::none, Unused::none, Unused::by_call, Unused::by_rank, Unused::everywhere}[dice() % 5];
  p.table = std::array{"", "sparse", "dense"}[dice() % 3];
  const int num_weights = 1 + int(dice() % 4);
  for (int i = 0; i < num_weights; ++i) p.frozen.push_back(i > 0 && one_in(5));
  for (int i = 0; i < num_weights + int(dice() % 3); ++i)
    p.layers.push_back(i < num_weights ? i : int(dice() % uint64_t(num_weights)));
  for (int i = 0; i < int(p.layers.size()); ++i) {
    if (i + 1 == int(p.layers.size()) || one_in(3)) p.outputs.push_back(i);
  }
  p.num_backwards = one_in(3) ? 2 + int(dice() % 2) : 1;
  p.num_forwards = one_in(3) ? 2 : 1;
  if (one_in(4)) p.bypassing_rank = int(dice() % uint64_t(p.num_ranks));
  if (one_in(3)) p.decayed_weight = int(dice() % uint64_t(num_weights));
  p.zeroing = int(dice() % 3);
  p.hook = std::array{"", "", "allreduce", "then"}[dice() % 4];
  // The rows of all ranks are one batch only if all of them go through the same layers, once.
  const bool one_batch = p.unused == Unused::none && p.num_backwards == 1 && p.num_forwards == 1;
  p.weighted = one_batch && p.bypassing_rank < 0 && p.decayed_weight < 0 && one_in(2);
  p.options.bucket_cap_mb = std::array{0.00001, 0.0001, 0.001, 25.0}[dice() % 4];
  p.options.gradient_as_bucket_view = !one_in(3);
  p.options.batched_grad_copy = one_in(4);
  p.options.static_graph = p.unused == Unused::by_rank || (p.unused == Unused::none && one_in(4));
  p.options.find_unused_parameters = p.unused == Unused::by_call || (p.unused == Unused::none && one_in(5));
  return p;
}

std::string text_of(const DdpProgram& p) {
  return c10::str(p.num_ranks, " ranks on ", p.backend, ", unused ", int(p.unused), ", weighted ", p.weighted,
                  ", table ", p.table, ", layers ", c10::Join(",", p.layers), ", outputs ", c10::Join(",", p.outputs),
                  ", frozen ", c10::Join(",", std::vector<int>(p.frozen.begin(), p.frozen.end())), ", backwards ",
                  p.num_backwards, ", forwards ", p.num_forwards, ", bypassing ", p.bypassing_rank, ", decayed ",
                  p.decayed_weight, ", zeroing ", p.zeroing, ", hook ", p.hook, ", MiB ", *p.options.bucket_cap_mb,
                  ", view ", p.options.gradient_as_bucket_view, ", batched ", p.options.batched_grad_copy, ", static ",
                  p.options.static_graph, ", find ", p.options.find_unused_parameters);
}

/// The same number for the same arguments, on every rank.
uint64_t drawn(const DdpProgram& p, int what, int a, int b, int c) {
  std::seed_seq sequence{int(p.seed), what, a, b, c};
  return std::mt19937(sequence)();
}

bool leaves_out(const DdpProgram& p, int layer, const DdpCall& call) {
  if (layer == 0) return false;  // so that every loss has a gradient
  switch (p.unused) {
    case Unused::none: return false;
    case Unused::by_call: return drawn(p, 1, layer, call.rank, call.iteration * 100 + call.number) % 2 == 0;
    case Unused::by_rank: return drawn(p, 2, layer, call.rank, 0) % 2 == 0;
    case Unused::everywhere: return p.layers[size_t(layer)] + 1 == int(p.frozen.size());
  }
  return false;
}

struct RandomModuleImpl : torch::nn::Module {
  explicit RandomModuleImpl(const DdpProgram& p) : program(p) {
    const auto options = torch::dtype(torch::kDouble);
    if (!p.table.empty()) {
      table = register_module(
          "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, p.width).sparse(p.table == "sparse")));
      table->to(torch::kDouble);
    }
    for (size_t i = 0; i < p.frozen.size(); ++i) {
      weights.push_back(register_parameter("weight" + std::to_string(i), torch::randn({p.width, p.width}, options),
                                           /*requires_grad=*/!p.frozen[i]));
    }
    bias = register_parameter("bias", torch::randn({p.width}, options));
  }

  std::vector<at::Tensor> forward(at::Tensor x, const at::Tensor& tokens, const DdpCall& call) {
    if (table) x = x + table(tokens);
    std::vector<at::Tensor> outputs;
    for (int layer = 0; layer < int(program.layers.size()); ++layer) {
      if (!leaves_out(program, layer, call))
        x = torch::tanh(x.mm(weights[size_t(program.layers[size_t(layer)])]) + bias);
      if (std::count(program.outputs.begin(), program.outputs.end(), layer) != 0) outputs.push_back(x * (layer + 1));
    }
    return outputs;
  }

  const DdpProgram program;
  torch::nn::Embedding table{nullptr};
  std::vector<at::Tensor> weights;
  at::Tensor bias;
};
TORCH_MODULE(RandomModule);

RandomModule module_of(const DdpProgram& p) {
  return seeded(p.seed, [&] { return RandomModule(p); });
}

int64_t num_rows(const DdpProgram& p, const DdpCall& call) {
  const int64_t rows = int64_t(drawn(p, 3, call.rank, call.iteration, call.number) % 4);
  return p.weighted && call.rank > 0 ? rows : rows + 1;
}
at::Tensor input_of(const DdpProgram& p, const DdpCall& call) {
  const at::Tensor numbers = torch::arange(num_rows(p, call) * p.width, torch::kDouble);
  return torch::sin(numbers * 0.7 + call.rank * 11 + call.iteration * 3 + call.number).reshape({-1, p.width});
}
at::Tensor tokens_of(const DdpProgram& p, const DdpCall& call) {
  return (torch::arange(num_rows(p, call), torch::kLong) * 3 + call.rank + call.iteration).remainder(7);
}

/// The mean over rows; the outputs count differently on each rank.
at::Tensor loss_of(const DdpProgram& p, const std::vector<at::Tensor>& outputs, const DdpCall& call) {
  at::Tensor loss;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor part = outputs[i].square().sum(1).mean() * (1 + double(i) + (p.weighted ? 0 : call.rank));
    loss = loss.defined() ? loss + part : part;
  }
  return loss;
}

/// The loss of one backward: all its forwards, in `net`, which is the wrapper or the module.
at::Tensor loss_of_backward(const DdpProgram& p, auto& net, const RandomModule& module, DdpCall first) {
  at::Tensor loss;
  for (int f = 0; f < p.num_forwards; ++f, ++first.number) {
    const auto outputs = net.forward(input_of(p, first), tokens_of(p, first), first);
    const at::Tensor part = loss_of(p, outputs, first);
    loss = loss.defined() ? loss + part : part;
  }
  if (p.decayed_weight < 0 || p.frozen[size_t(p.decayed_weight)]) return loss;
  return loss + module->weights[size_t(p.decayed_weight)].square().sum() * (first.rank + 1);
}

/// Dense, and undefined where there is no gradient.
std::vector<at::Tensor> gradients_of(const RandomModule& module) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : module->parameters()) {
    const at::Tensor& grad = parameter.grad();
    gradients.push_back(!grad.defined() ? at::Tensor() : grad.is_sparse() ? grad.to_dense() : grad.clone());
  }
  return gradients;
}

/// What one rank alone computes in an iteration.
std::vector<at::Tensor> plain_gradients(const DdpProgram& p, RandomModule& plain, int rank, int iteration) {
  plain->zero_grad();
  for (int b = 0; b < p.num_backwards; ++b) {
    loss_of_backward(p, *plain, plain, {rank, iteration, b * p.num_forwards}).backward();
  }
  if (rank == p.bypassing_rank) loss_of_backward(p, *plain, plain, {rank, iteration, 50}).backward();
  return gradients_of(plain);
}

std::vector<at::Tensor> plain_gradients_of_one_batch(const DdpProgram& p, RandomModule& plain, int iteration) {
  std::vector<at::Tensor> inputs, tokens;
  for (int rank = 0; rank < p.num_ranks; ++rank) {
    inputs.push_back(input_of(p, {rank, iteration, 0}));
    tokens.push_back(tokens_of(p, {rank, iteration, 0}));
  }
  plain->zero_grad();
  const DdpCall call{0, iteration, 0};
  loss_of(p, plain->forward(torch::cat(inputs), torch::cat(tokens), call), call).backward();
  return gradients_of(plain);
}

/// The mean over ranks; undefined where no rank has a gradient.
std::vector<at::Tensor> expected_gradients(const DdpProgram& p, RandomModule& plain, int iteration) {
  if (p.weighted) return plain_gradients_of_one_batch(p, plain, iteration);
  std::vector<at::Tensor> means(plain->parameters().size());
  for (int rank = 0; rank < p.num_ranks; ++rank) {
    const auto own = plain_gradients(p, plain, rank, iteration);
    for (size_t i = 0; i < means.size(); ++i) {
      if (!own[i].defined()) continue;
      means[i] = means[i].defined() ? means[i] + own[i] / p.num_ranks : own[i] / p.num_ranks;
    }
  }
  return means;
}

using WrappedModule = DistributedDataParallel<RandomModule>;

void run_iteration(const DdpProgram& p, WrappedModule& ddp, const Group& group, int iteration) {
  const int rank = group->getRank();
  if (rank == p.bypassing_rank) {
    loss_of_backward(p, *ddp.module(), ddp.module(), {rank, iteration, 50}).backward();
  }
  const auto backward = [&](int number) {
    const DdpCall call{rank, iteration, number * p.num_forwards};
    at::Tensor loss = loss_of_backward(p, ddp, ddp.module(), call);
    if (p.weighted) loss = scale_loss(loss, num_rows(p, call), group);
    loss.backward();
  };
  for (int number = 0; number + 1 < p.num_backwards; ++number) {
    const auto guard = ddp.no_sync();
    backward(number);
  }
  backward(p.num_backwards - 1);
}

void zero_gradients(const DdpProgram& p, RandomModule& module) {
  if (p.zeroing < 2) module->zero_grad(/*set_to_none=*/p.zeroing == 0);
}

void expect_gradients(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected, int iteration) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << "parameter " << i << ", iteration " << iteration;
    if (!expected[i].defined()) continue;
    ASSERT_TRUE(torch::allclose(actual[i], expected[i], 1e-9, 1e-11))
        << "parameter " << i << ", iteration " << iteration << "\n"
        << actual[i] << "\nexpected\n"
        << expected[i];
  }
}

/// What the gradients that were there before an iteration add to it.
void add_kept(const DdpProgram& p, std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& before) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (p.zeroing == 0 || before.empty() || !before[i].defined()) continue;
    const at::Tensor kept = p.zeroing == 1 ? torch::zeros_like(before[i]) : before[i];
    expected[i] = expected[i].defined() ? expected[i] + kept : kept;
  }
}

void step(RandomModule& module, const std::vector<at::Tensor>& gradients) {
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) module->parameters()[i].sub_(gradients[i] * 0.01);
  }
}

void register_hook(const DdpProgram& p, WrappedModule& ddp) {
  if (p.hook == "allreduce") ddp.register_comm_hook(hooks::allreduce());
  if (p.hook == "then") ddp.register_comm_hook(hooks::then(hooks::allreduce(), [](const c10d::GradBucket&) {}));
}

void expect_missing_gradient(const DdpProgram& p, WrappedModule& ddp, const Group& group) {
  try {
    run_iteration(p, ddp, group, 0);
    ADD_FAILURE() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.msg(), ::testing::HasSubstr("did not receive a gradient"));
  }
}

/// Whether a trainable weight is used by no layer and no term of the loss, so that plain DDP has to refuse.
bool is_error_due(const DdpProgram& p) {
  if (p.unused != Unused::everywhere || p.frozen.back() || p.frozen.size() == 1) return false;
  return p.decayed_weight + 1 != int(p.frozen.size());
}

void run_program(const DdpProgram& p, const Group& group) {
  RandomModule module = module_of(p), plain = module_of(p);
  DistributedDataParallelOptions options = p.options;
  options.process_group = group;
  WrappedModule ddp(module, options);
  register_hook(p, ddp);
  if (is_error_due(p)) return expect_missing_gradient(p, ddp, group);
  std::vector<at::Tensor> before;
  for (int iteration = 0; iteration < 4 && !::testing::Test::HasFailure(); ++iteration) {
    zero_gradients(p, module);
    run_iteration(p, ddp, group, iteration);
    SCOPED_TRACE(text_of(p));
    std::vector<at::Tensor> expected = expected_gradients(p, plain, iteration);
    add_kept(p, expected, before);
    expect_gradients(gradients_of(module), expected, iteration);
    step(module, expected);
    step(plain, expected);
    before = expected;
  }
}

TEST(RandomDdp, GradientsAreTheMeansOfPlainOnes) {
  for_random_programs(250, [](uint64_t seed) {
    const DdpProgram program = draw_program(seed);
    SCOPED_TRACE(text_of(program));
    run_ranks(program.num_ranks, [&](const Group& group) { run_program(program, group); },
              {.backend = program.backend, .timeout = std::chrono::seconds(20)});
  });
}

}  // namespace
}  // namespace serried::testing
