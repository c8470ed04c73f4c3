// Random functions, captured and plain, each on state of its own: every call leaves the same, bit for bit, or is
// refused.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/optim/sgd.h"
#include "tests/support/random_programs.h"

namespace serried {
namespace {

constexpr int64_t kSide = 3;  // all tensors are square, so that every op fits every tensor
constexpr size_t kNumParameters = 2, kNumBuffers = 5;
// These may be arguments too, and are not replaced: a variable that always gets what the caller gives looks like that.
constexpr size_t kNumGiven = 3;

class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int below(int n) { return int(engine_() % uint64_t(n)); }
  bool once_in(int n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

at::Tensor square_of(uint64_t number) {
  const at::Tensor t = torch::arange(float(kSide * kSide)).view({kSide, kSide});
  return ((t + float(number % 97)) * 0.37f).sin();
}

/// What a function finds by itself.
struct World {
  explicit World(uint64_t seed) {
    Dice dice(seed);
    data = torch::cat({square_of(1), square_of(2), square_of(3)});
    for (size_t i = 0; i < kNumParameters; ++i) parameters.push_back(square_of(10 + i).requires_grad_());
    for (size_t i = 0; i < kNumBuffers; ++i) buffers.push_back(new_buffer(dice));
    const int kind = dice.below(4);
    if (kind == 1) optimizer = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
    if (kind == 2) optimizer = std::make_unique<SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
    if (kind == 3) optimizer = std::make_unique<AdamW>(parameters);
  }

  // One of its own, a piece of the data, or a second name of another buffer.
  at::Tensor new_buffer(Dice& dice) {
    const int kind = dice.below(4);
    if (kind == 0) return data.narrow(0, dice.below(2 * kSide), kSide);
    if (kind == 1 && !buffers.empty()) return buffers[size_t(dice.below(int(buffers.size())))].variable_data();
    if (kind == 2) return torch::cat({square_of(20), square_of(21)}).narrow(0, dice.below(kSide), kSide);
    return square_of(uint64_t(30 + dice.below(9)));
  }

  at::Tensor data;
  std::vector<at::Tensor> parameters, buffers;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  at::Tensor kept;  // an argument that comes again
  at::Tensor last;  // the last result
};

using Registers = std::vector<at::Tensor>;
using Instruction = std::function<void(World&, Registers&)>;

at::Tensor& pick(World& world, Registers& registers, int n) {
  const int choice = n % 7;
  if (choice < 4) return registers[size_t(n / 7) % registers.size()];
  if (choice < 6) return world.buffers[size_t(n / 7) % kNumBuffers];
  return world.parameters[size_t(n / 7) % kNumParameters];
}

at::Tensor of_two(int kind, const at::Tensor& a, const at::Tensor& b) {
  switch (kind % 6) {
    case 0: return a + b;
    case 1: return a * b;
    case 2: return a - b;
    case 3: return a.mm(b) * 0.3;
    case 4: return torch::maximum(a, b);
    default: return a + b.mean();
  }
}

at::Tensor of_one(int kind, const at::Tensor& a) {
  switch (kind % 9) {
    case 0: return a.sin();
    case 1: return a.tanh();
    case 2: return a.t();
    case 3: return a.detach();
    case 4: return a.contiguous();
    case 5: return a.flip({0});
    case 6: return a.view_as(a);
    case 7: return a * 0.5 + 1;
    default: return a.clone();
  }
}

void write_to(int kind, at::Tensor target, const at::Tensor& value) {
  const torch::NoGradGuard no_grad;
  const at::Tensor source = value.detach();
  switch (kind % 6) {
    case 0: target.add_(source * 0.1); return;
    case 1: target.mul_(0.9); return;
    case 2: target.copy_(source); return;
    case 3: target.narrow(0, 1, 1).add_(source.narrow(0, 0, 1)); return;
    case 4: target.t().select(0, 0).fill_(0.25); return;
    default: target.detach().sub_(0.125);
  }
}

void zero(World& world, int style) {
  if (style % 3 == 0) return;
  for (at::Tensor& p : world.parameters) {
    if (!p.grad().defined()) continue;
    if (style % 3 == 1) {
      p.mutable_grad().reset();
    } else {
      p.mutable_grad().zero_();
    }
  }
}

Instruction training(int zero_style, int which, int order) {
  return [=](World& world, Registers& registers) {
    zero(world, zero_style);
    const at::Tensor& p = world.parameters[size_t(which) % kNumParameters];
    // All of them: no op would show that the gradient of another one was dropped.
    const at::Tensor loss = (registers[size_t(which) % registers.size()] * p).sin().sum() +
                            world.parameters[0].square().sum() + world.parameters[1].sum() * (order % 2);
    loss.backward();
    if (order % 3 != 0 && world.optimizer) {
      world.optimizer->step();
    } else if (order % 3 == 2) {
      const torch::NoGradGuard no_grad;
      p.sub_(p.grad() * 0.01);
    }
    registers.push_back(loss.detach().expand({kSide, kSide}).contiguous());
  };
}

// A gradient with respect to what was made inside of an argument.
Instruction saliency(int n) {
  return [=](World& world, Registers& registers) {
    const torch::AutoGradMode on(true);
    const at::Tensor leaf = pick(world, registers, n).detach().requires_grad_();
    registers.push_back(torch::autograd::grad({(leaf * world.buffers[0]).sin().sum()}, {leaf})[0]);
  };
}

Instruction new_instruction(Dice& dice) {
  const int a = dice.below(1000), b = dice.below(1000), kind = dice.below(1000);
  switch (dice.below(10)) {
    case 0:
    case 1:
    case 2: return [=](World& w, Registers& r) { r.push_back(of_two(kind, pick(w, r, a), pick(w, r, b))); };
    case 3:
    case 4: return [=](World& w, Registers& r) { r.push_back(of_one(kind, pick(w, r, a))); };
    case 5:
    case 6: return [=](World& w, Registers& r) { write_to(kind, w.buffers[size_t(a) % kNumBuffers], pick(w, r, b)); };
    case 7: return [=](World& w, Registers& r) { write_to(kind, r[size_t(a) % r.size()], pick(w, r, b)); };
    case 8: return saliency(a);
    default: return training(a, b, kind);
  }
}

struct Function {
  std::vector<Instruction> instructions;
  bool in_no_grad;
  int result;

  at::Tensor operator()(World& world, const at::Tensor& x, const at::Tensor& y) const {
    const torch::AutoGradMode mode(!in_no_grad);
    Registers registers = {x, y};
    for (const Instruction& instruction : instructions) instruction(world, registers);
    return result < 3 ? registers.back().detach() : registers[size_t(result) % registers.size()].detach();
  }
};

Function new_function(Dice& dice) {
  Function function{{}, false, dice.below(7)};
  for (int n = 1 + dice.below(7); n > 0; --n) function.instructions.push_back(new_instruction(dice));
  return function;
}

/// What the caller gives; the same numbers in every world.
at::Tensor new_argument(World& world, int kind, int n, const at::Tensor& other) {
  switch (kind) {
    case 0: return world.buffers[size_t(n) % kNumGiven];
    case 1: return world.data.narrow(0, n % (2 * kSide), kSide);
    case 2: return world.parameters[size_t(n) % kNumParameters];
    case 3: return world.parameters[size_t(n) % kNumParameters].detach();
    case 4: {
      const at::Tensor grad = world.parameters[size_t(n) % kNumParameters].grad();
      return grad.defined() ? grad : square_of(uint64_t(n));
    }
    case 5: return world.kept.defined() ? world.kept : world.kept = square_of(uint64_t(n));
    case 6: return world.last.defined() ? world.last : square_of(uint64_t(n));
    case 7: return other.defined() ? other : square_of(uint64_t(n));
    case 8: return other.defined() ? other.detach() : square_of(uint64_t(n)).requires_grad_();
    case 9: return world.buffers[size_t(n) % kNumGiven].view({kSide, kSide});
    default: return square_of(uint64_t(n));
  }
}

/// What happens between two calls.
void change(World& world, int kind, int n) {
  at::Tensor& buffer = world.buffers[size_t(n) % kNumBuffers];
  at::Tensor& replaced = world.buffers[kNumGiven + size_t(n) % (kNumBuffers - kNumGiven)];
  at::Tensor& parameter = world.parameters[size_t(n) % kNumParameters];
  const torch::NoGradGuard no_grad;
  switch (kind) {
    case 0: buffer.t_(); return;
    case 1: buffer.as_strided_({kSide, kSide}, {kSide, 1}, 0); return;
    case 2: buffer.set_data(square_of(uint64_t(n))); return;
    case 3: replaced = square_of(uint64_t(n)); return;
    case 4: buffer.copy_(square_of(uint64_t(n))); return;
    case 5: zero(world, 1); return;
    case 6: zero(world, 2); return;
    case 7: parameter.set_data(parameter.clone()); return;
    case 8: parameter.mutable_grad() = square_of(uint64_t(n)); return;
    case 9: buffer.set_data(world.data.narrow(0, n % (2 * kSide), kSide)); return;
    case 10: replaced = world.data.narrow(0, n % (2 * kSide), kSide); return;
    default: return;
  }
}

std::vector<Pass> new_passes(Dice& dice) {
  std::vector<Pass> all = passes::defaults(), some;
  if (dice.once_in(2)) return all;
  for (const Pass& pass : all) {
    if (dice.once_in(2)) some.push_back(pass);
  }
  return some;
}

bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset() &&
         a.detach().contiguous().view(at::kInt).equal(b.detach().contiguous().view(at::kInt));
}

void expect_same_worlds(const World& actual, const World& expected) {
  EXPECT_TRUE(same_tensor(actual.data, expected.data)) << "data";
  for (size_t i = 0; i < kNumBuffers; ++i) {
    EXPECT_TRUE(same_tensor(actual.buffers[i], expected.buffers[i])) << "buffer " << i;
  }
  for (size_t i = 0; i < kNumParameters; ++i) {
    EXPECT_TRUE(same_tensor(actual.parameters[i], expected.parameters[i])) << "parameter " << i;
    const at::Tensor a = actual.parameters[i].grad(), b = expected.parameters[i].grad();
    ASSERT_EQ(a.defined(), b.defined()) << "gradient " << i;
    EXPECT_TRUE(!a.defined() || same_tensor(a, b)) << "gradient " << i;
  }
}

struct Tally {
  int64_t calls = 0, replays = 0;
  std::map<std::string, int64_t> refusals;  // by kind
};

using Call = std::function<at::Tensor(World&)>;

class Comparison {
 public:
  Comparison(uint64_t seed, Tally& tally)
      : dice_(seed), tally_(tally), captured_(seed), plain_(seed), function_(new_function(dice_)) {}

  void run() {
    auto step = capture([this](const at::Tensor& x, const at::Tensor& y) { return function_(captured_, x, y); },
                        {.passes = new_passes(dice_)});
    const int habit = dice_.below(14), other_habit = dice_.below(14);  // what most calls give
    for (int call = 0; call < 24 && !::testing::Test::HasFailure(); ++call) {
      SCOPED_TRACE(call);
      const int kind = dice_.once_in(5) ? dice_.below(14) : habit;
      const int other = dice_.once_in(5) ? dice_.below(14) : other_habit;
      const int n = dice_.below(1000), m = dice_.once_in(2) ? n : dice_.below(1000);
      if (dice_.once_in(4)) change_both(dice_.below(11), dice_.below(1000));
      if (!call_both(
              step, [=](World& w) { return new_argument(w, kind, n, {}); },
              [=](World& w, const at::Tensor& x) { return new_argument(w, other, m, x); })) {
        break;
      }
    }
    tally_.replays += step.replays();
  }

 private:
  void change_both(int kind, int n) {
    change(captured_, kind, n);
    change(plain_, kind, n);
  }

  // False where the function itself raises.
  template <class Step, class First, class Second>
  bool call_both(Step& step, const First& first, const Second& second) {
    const at::Tensor x = first(plain_), y = second(plain_, x);
    const at::Tensor u = first(captured_), v = second(captured_, u);
    at::Tensor expected;
    try {
      expected = function_(plain_, x, y);
    } catch (const c10::Error&) {
      return false;
    }
    plain_.last = expected.clone();
    captured_.last = expected.clone();
    ++tally_.calls;
    try {
      const at::Tensor actual = step(u, v);
      EXPECT_TRUE(same_tensor(actual, expected)) << actual << "\n" << expected;
      // No views, which would keep what they were made of alive.
      captured_.last = actual.variable_data();
      plain_.last = expected.variable_data();
    } catch (const graph::CaptureError& error) {
      ++tally_.refusals[to_string(error.report().kind)];
    }
    EXPECT_TRUE(same_tensor(u, x)) << "first argument";
    EXPECT_TRUE(same_tensor(v, y)) << "second argument";
    expect_same_worlds(captured_, plain_);
    return true;
  }

  Dice dice_;
  Tally& tally_;
  World captured_, plain_;
  Function function_;
};

TEST(RandomCaptured, EqualThePlainFunctionOrAreRefused) {
  Tally tally;
  testing::for_random_programs(1000, [&](uint64_t seed) { Comparison(seed, tally).run(); });
  std::cout << tally.calls << " calls, " << tally.replays << " replays";
  for (const auto& [kind, count] : tally.refusals) std::cout << ", " << count << " times " << kind;
  std::cout << std::endl;
  EXPECT_GT(tally.replays, tally.calls / 10);
}

}  // namespace
}  // namespace serried
