// Whatever DTensors do to memory and generators is an op that a recorder sees: what it saw, run again on other data,
// gives what the program itself gives.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "serried/tensor/making/factories.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/ignoring_recorder.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_equal;
using testing::on_mesh;
using testing::place;
using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

Tensors tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : Tensors();
}

bool shares_memory(const at::Tensor& t, const Stack& values) {
  for (const c10::IValue& value : values) {
    for (const at::Tensor& other : tensors_in(value)) {
      if (other.defined() && other.has_storage() && t.storage().is_alias_of(other.storage())) return true;
    }
  }
  return false;
}

// Keeps all tensors, so that each has memory of its own, and writes there again.
class Tape final : public testing::IgnoringRecorder {
 public:
  void run(const c10::OperatorHandle& op, Stack& stack) override {
    const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
    Step step{op, Stack(arguments.begin(), arguments.end()), {}};
    tape::run_unrecorded(op, stack);
    const auto results = torch::jit::last(stack, op.schema().returns().size());
    step.results.assign(results.begin(), results.end());
    steps_.push_back(std::move(step));
  }

  void replay() const {
    for (const Step& step : steps_) {
      Stack stack = step.arguments;
      tape::run_unrecorded(step.op, stack);
      for (size_t r = 0; r < step.results.size(); ++r) write(step, step.results[r], stack[r]);
    }
  }

  int64_t count(const std::string& name) const {
    return std::count_if(steps_.begin(), steps_.end(),
                         [&](const Step& step) { return step.op.operator_name().name == name; });
  }

 private:
  struct Step {
    c10::OperatorHandle op;
    Stack arguments;
    Stack results;
  };

  static void write(const Step& step, const c10::IValue& kept, const c10::IValue& made) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensors to = tensors_in(kept);
    const Tensors from = tensors_in(made);
    for (size_t i = 0; i < to.size(); ++i) {
      if (to[i].defined() && !shares_memory(to[i], step.arguments)) to[i].copy_(from[i]);
    }
  }

  std::vector<Step> steps_;
};

const at::Tensor& part(const at::Tensor& t) {
  return is_dtensor(t) ? dtensor_meta(t)->local : t;
}

struct Program {
  std::string name;
  std::function<Tensors(const DeviceMesh&)> inputs;  // of the random numbers that come next
  std::function<Tensors(const Tensors&)> run;
};

Tensors seeded_inputs(const Program& program, const DeviceMesh& mesh, uint64_t seed) {
  return seeded(seed, [&] { return program.inputs(mesh); });
}

// Records with some inputs, and compares a replay and a run with others: results, inputs written to, generator.
void compare(const Program& program, const DeviceMesh& mesh) {
  const Tensors inputs = seeded_inputs(program, mesh, 1);
  const Tensors fresh = seeded_inputs(program, mesh, 2);
  manual_seed(3, mesh);
  Tape tape;
  Tensors results;
  {
    const tape::Scope scope(tape);
    results = program.run(inputs);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < inputs.size(); ++i) part(inputs[i]).copy_(part(fresh[i]));
  }
  manual_seed(4, mesh);
  tape.replay();
  const at::Tensor generator = rank_generator().get_state();
  manual_seed(4, mesh);
  const Tensors expected = program.run(fresh);
  ASSERT_EQ(results.size(), expected.size()) << program.name;
  for (size_t i = 0; i < expected.size(); ++i) {
    expect_equal(part(results[i]).detach(), part(expected[i]).detach(), program.name);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_equal(part(inputs[i]).detach(), part(fresh[i]).detach(), program.name + ", written inputs");
  }
  expect_equal(generator, rank_generator().get_state(), program.name + ", generator");
}

void compare_on(const std::vector<Sizes>& meshes, const std::vector<Program>& programs) {
  for (const Sizes& shape : meshes) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Program& program : programs) compare(program, mesh);
    });
  }
}

// `placement` on the last axis; the batch of a two-dimensional mesh is not cut.
Placements on_last(const DeviceMesh& mesh, Placement placement) {
  Placements placements(size_t(mesh.ndim()), Replicate());
  placements.back() = placement;
  return placements;
}

at::Tensor leaf(const at::Tensor& whole, const DeviceMesh& mesh, Placement placement) {
  return place(whole, mesh, on_last(mesh, placement)).detach().requires_grad_(true);
}

Tensors with_gradients(const at::Tensor& loss, const Tensors& of) {
  Tensors results = torch::autograd::grad({loss}, of);
  results.push_back(loss);
  return results;
}

at::Tensor replicated(const at::Tensor& t) {
  return DTensor(t).redistribute(Placements(size_t(DTensor(t).device_mesh().ndim()), Replicate()));
}

const std::vector<Sizes> kMeshes = {{1}, {2}, {3}, {2, 2}};

TEST(Recordable, RedistributionsOfAllKinds) {
  for (const Sizes& shape : {Sizes{3}, Sizes{4}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const auto all = testing::all_placements(2, shape.size(), /*partial=*/true);
      for (const Sizes& sizes : {Sizes{12, 8}, Sizes{5, 7}}) {
        for (const Placements& from : all) {
          for (const Placements& to : all) {
            compare({to_string(from) + " -> " + to_string(to),
                     [&](const DeviceMesh& m) { return Tensors{place(at::randn(sizes), m, from)}; },
                     [&](const Tensors& x) { return Tensors{DTensor(x[0]).redistribute(to)}; }},
                    mesh);
          }
        }
      }
    });
  }
}

TEST(Recordable, StridedCuts) {
  const auto inputs = [](const DeviceMesh& m) {
    return Tensors{place(at::randn({9, 5}), m, parse_placements("S0/2 S0"))};
  };
  compare_on({{2, 2}}, {{"whole", inputs, [](const Tensors& x) { return Tensors{replicated(x[0])}; }},
                        {"cut otherwise", inputs, [](const Tensors& x) {
                           return Tensors{DTensor(x[0]).redistribute({Shard(0), Shard(0)}), at::rand_like(x[0])};
                         }}});
}

TEST(Recordable, PartsTooLargeForTheSmallCopy) {
  compare_on({{2}},
             {{"S1 -> R and S0",
               [](const DeviceMesh& m) {
                 return Tensors{place(at::randn({256, 512}), m, {Shard(1)})};
               },
               [](const Tensors& x) {
                 return Tensors{DTensor(x[0]).redistribute({Replicate()}), DTensor(x[0]).redistribute({Shard(0)})};
               }}});
}

TEST(Recordable, ColumnAndRowParallelProducts) {
  compare_on(kMeshes, {{"mlp",
                        [](const DeviceMesh& m) {
                          return Tensors{leaf(at::randn({5, 6}), m, Replicate()), leaf(at::randn({6, 7}), m, Shard(1)),
                                         leaf(at::randn({7, 3}), m, Shard(0))};
                        },
                        [](const Tensors& x) {
                          return with_gradients(replicated(at::mm(at::gelu(at::mm(x[0], x[1])), x[2])).pow(2).sum(), x);
                        }}});
}

TEST(Recordable, LookupsInCutTables) {
  const auto table_and_index = [](const DeviceMesh& m) {
    return Tensors{leaf(at::randn({7, 4}), m, Shard(0)), place(at::randint(7, {2, 3}), m, on_last(m, Replicate()))};
  };
  compare_on(
      kMeshes,
      {{"embedding", table_and_index,
        [](const Tensors& x) { return with_gradients(replicated(at::embedding(x[0], x[1])).pow(2).sum(), {x[0]}); }},
       {"cross_entropy",
        [](const DeviceMesh& m) {
          return Tensors{leaf(at::randn({5, 7}), m, Shard(1)), place(at::randint(7, {5}), m, on_last(m, Replicate()))};
        },
        [](const Tensors& x) { return with_gradients(replicated(at::cross_entropy_loss(x[0], x[1])), {x[0]}); }}});
}

TEST(Recordable, NormsAndReductions) {
  for (const int64_t dim : {0, 1}) {
    const auto inputs = [dim](const DeviceMesh& m) {
      return Tensors{leaf(at::randn({5, 6}), m, Shard(dim)), leaf(at::randn({6}), m, Replicate())};
    };
    compare_on(
        kMeshes,
        {{"layer_norm", inputs,
          [](const Tensors& x) { return with_gradients(replicated(at::layer_norm(x[0], {6}, x[1]).pow(2).sum()), x); }},
         {"softmax", inputs,
          [](const Tensors& x) { return with_gradients(replicated((at::softmax(x[0], 1) * x[1]).mean()), x); }},
         {"max and std", inputs, [](const Tensors& x) {
            return with_gradients(replicated(x[0].amax(0).sum() + x[0].std() + x[1].norm()), x);
          }}});
  }
}

TEST(Recordable, RandomNumbersOfAStep) {
  for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
    const auto inputs = [placement](const DeviceMesh& m) {
      return Tensors{place(at::rand({5, 7}), m, on_last(m, placement))};
    };
    compare_on(kMeshes, {{"dropout", inputs, [](const Tensors& x) { return Tensors{at::dropout(x[0], 0.4, true)}; }},
                         {"rand_like", inputs, [](const Tensors& x) { return Tensors{at::rand_like(x[0]) + x[0]}; }},
                         {"randn_like", inputs, [](const Tensors& x) { return Tensors{at::randn_like(x[0])}; }},
                         {"randint_like", inputs, [](const Tensors& x) { return Tensors{at::randint_like(x[0], 9)}; }},
                         {"bernoulli", inputs, [](const Tensors& x) { return Tensors{at::bernoulli(x[0])}; }},
                         {"bernoulli_", inputs, [](const Tensors& x) { return Tensors{x[0].bernoulli_(0.3)}; }},
                         {"rrelu", inputs, [](const Tensors& x) {
                            return Tensors{at::rrelu(x[0] - 0.5, 0.1, 0.4, /*training=*/true)};
                          }}});
  }
}

TEST(Recordable, BernoulliOfAPartialMovesEveryGenerator) {
  compare_on(kMeshes, {{"bernoulli_ of P",
                        [](const DeviceMesh& m) {
                          return Tensors{place(at::rand({5, 7}), m, on_last(m, Partial()))};
                        },
                        [](const Tensors& x) {
                          return Tensors{x[0].bernoulli_(0.3), at::rand_like(x[0])};
                        }}});
}

TEST(Recordable, InitialisationAndFactories) {
  const auto inputs = [](const DeviceMesh& m) { return Tensors{place(at::rand({9, 7}), m, on_last(m, Shard(1)))}; };
  const auto factories = [](const Tensors& x) {
    const DeviceMesh& mesh = DTensor(x[0]).device_mesh();
    const Placements cut = on_last(mesh, Shard(0));
    return Tensors{randn({9, 5}, mesh, cut), rand({9, 5}, mesh, cut), randint(-3, 8, {9}, mesh, cut),
                   randperm(9, mesh, cut),   ones({9}, mesh, cut),    arange(9, mesh, cut)};
  };
  compare_on(kMeshes, {{"normal_", inputs, [](const Tensors& x) { return Tensors{x[0].normal_(1, 2)}; }},
                       {"uniform_", inputs, [](const Tensors& x) { return Tensors{x[0].uniform_(-1, 1)}; }},
                       {"random_", inputs,
                        [](const Tensors& x) {
                          return Tensors{x[0].random_(), x[0].random_(3, 11)};
                        }},
                       {"random_ without end", inputs,
                        [](const Tensors& x) { return Tensors{x[0].random_(3, std::optional<int64_t>())}; }},
                       {"exponential_", inputs,
                        [](const Tensors& x) {
                          return Tensors{x[0].exponential_(2), x[0].geometric_(0.3)};
                        }},
                       {"factories", inputs, factories}});
}

TEST(Recordable, FusedAndForeachOptimizers) {
  const auto state = [](const DeviceMesh& m) {
    Tensors all;
    for (int i = 0; i < 4; ++i) all.push_back(place(at::rand({5, 3}), m, on_last(m, Shard(0))));
    all.push_back(at::full({}, 3.f));
    return all;
  };
  const auto adamw = [](const Tensors& t) {
    Tensors p{t[0]}, g{t[1]}, m{t[2]}, v{t[3]}, steps{t[4]};
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(p, g, m, v, {}, steps, 0.1, 0.9, 0.99, 0.1, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
    return Tensors{};
  };
  const auto sgd = [](const Tensors& t) {
    Tensors p{t[0]}, g{t[1]}, momentum{t[2]};
    at::_fused_sgd_(p, g, momentum, 0.1, 0.9, 0.1, 0., /*nesterov=*/true, /*maximize=*/false, /*is_first_step=*/false);
    at::_foreach_mul_(momentum, 0.5);
    return Tensors{};
  };
  compare_on(kMeshes, {{"adamw", state, adamw}, {"sgd", state, sgd}});
}

TEST(Recordable, BetweenLocalAndGlobal) {
  const auto inputs = [](const DeviceMesh&) { return Tensors{at::randn({4, 3}).requires_grad_(true)}; };
  for (const Sizes& shape : {Sizes{2}, Sizes{3}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      compare({"from_local", inputs,
               [&](const Tensors& x) {
                 const DTensor d = DTensor::from_local(x[0], mesh, {Shard(0)}, {.run_check = true});
                 return with_gradients(d.full_tensor().pow(2).sum() + d.to_local().sum(), x);
               }},
              mesh);
    });
  }
}

TEST(Recordable, ChecksAreNoPartOfWhatIsRecorded) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor table = place(at::ones({6, 2}), mesh, {Shard(0)});
    const DTensor index = place(at::arange(4), mesh, {Replicate()});
    manual_seed(1, mesh);
    Tape tape;
    {
      const tape::Scope scope(tape);
      at::embedding(table, index);
      at::rand_like(table);
      at::bernoulli(table);
      DTensor::from_local(at::ones({2}), mesh, {Shard(0)}, {.run_check = true});
    }
    EXPECT_EQ(tape.count("aten::_local_scalar_dense"), 0);
    EXPECT_EQ(tape.count("serried::check_range"), 1) << "each replay checks its indices";
    EXPECT_EQ(tape.count("serried::all_reduce_"), 0) << "the comparison of generators";
    EXPECT_EQ(tape.count("serried::all_gather"), 0) << "the comparison of parts";
  });
}

TEST(Recordable, AReplayedLookupChecksItsIndices) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor table = place(at::ones({6, 2}), mesh, {Shard(0)});
    const DTensor index = place(at::arange(4), mesh, {Replicate()});
    Tape tape;
    {
      const tape::Scope scope(tape);
      at::embedding(table, index);
    }
    part(index).fill_(6);
    EXPECT_EQ(error_text<c10::IndexError>([&] { tape.replay(); }),
              c10::str("[aten::embedding] index 6 is out of range for a dim of size 6\n"
                       "  fix: pass indices from 0 to 5\n"
                       "  at:  rank ",
                       mesh.get_rank(), "/2"));
  });
}

TEST(Recordable, AWriteThatIsNoOpWouldBeFound) {
  const at::Tensor x = at::ones({1});
  Tape tape;
  at::Tensor y;
  {
    const tape::Scope scope(tape);
    const at::Tensor copy = at::empty({1});
    *copy.mutable_data_ptr<float>() = *x.const_data_ptr<float>();
    y = copy * 2;
  }
  x.fill_(5);
  tape.replay();
  EXPECT_NE(y.item<float>(), 10);
}

TEST(Recordable, AKindOfFillThatDoesNotExist) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::random_fill_", "");
  Stack stack;
  torch::jit::push(stack, at::ones({2}), "cauchy", c10::List<at::Scalar>(), Sizes{2}, Sizes{1}, "R", Sizes{1}, Sizes{0},
                   rank_generator());
  EXPECT_EQ(error_text<c10::ValueError>([&] { tape::run_unrecorded(op, stack); }),
            "[serried::random_fill_] there is no kind \"cauchy\"\n"
            "  fix: pass bernoulli, integers, normal or uniform");
}

}  // namespace
}  // namespace serried
