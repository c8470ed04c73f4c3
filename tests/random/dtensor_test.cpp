// Random programs on DTensors against the same programs on plain tensors: values and gradients, on 2 to 4 ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <iostream>

#include "tests/support/on_mesh.h"
#include "tests/support/random_programs.h"
#include "tests/support/tensor_programs.h"

namespace serried::testing {
namespace {

struct Outcome {
  std::vector<at::Tensor> values;  // tensors of the program, then gradients of its leaves
  size_t num_gradients = 0;
  std::string log;
  std::string error;
};

Outcome run_program(uint64_t seed, const DeviceMesh* mesh, std::optional<uint64_t> noise = std::nullopt) {
  Outcome outcome;
  TensorProgram program(seed, mesh, noise);
  try {
    const at::Tensor loss = program.run(program.dice.between(2, 12));
    if (loss.defined()) loss.backward();
    for (const at::Tensor& t : program.tensors) outcome.values.push_back(full(t.detach()));
    for (const at::Tensor& leaf : program.leaves) {
      outcome.values.push_back(leaf.grad().defined() ? full(leaf.grad()) : at::zeros({}, at::kDouble));
    }
    outcome.num_gradients = program.leaves.size();
  } catch (const c10::Error& error) {
    outcome.error = error.what_without_backtrace();
  }
  outcome.log = program.log;
  return outcome;
}

double largest(const at::Tensor& t) {
  return t.numel() == 0 ? 0.0 : t.abs().max().item<double>();
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  // Equal infinities and NaNs are no distance.
  const at::Tensor apart = (a - b).abs();
  return largest(at::where(at::isclose(a, b, 0, 0, /*equal_nan=*/true), at::zeros_like(apart), apart));
}

// How far the plain program's results move when its leaves do by a few units in the last place. What is amplified more
// than a million times is no test of anything: it depends on the order of any sum.
struct Amplification {
  std::vector<double> moved;

  Amplification(uint64_t seed, const Outcome& plain) : moved(plain.values.size(), 0) {
    for (uint64_t noise = 1; noise <= 3; ++noise) {
      const Outcome other = run_program(seed, nullptr, noise);
      for (size_t i = 0; i < moved.size() && i < other.values.size(); ++i) {
        const double d = distance(other.values[i], plain.values[i]);
        moved[i] = std::isfinite(d) ? std::max(moved[i], d) : INFINITY;
      }
    }
  }
};

struct Counts {
  std::atomic<int64_t> compared = 0;
  std::atomic<int64_t> amplified = 0;
  std::atomic<int64_t> refused = 0;
  int64_t not_plain = 0;
};

void compare(const Outcome& actual, const Outcome& plain, const Amplification& amplification, Counts& counts) {
  ASSERT_EQ(actual.values.size(), plain.values.size());
  for (size_t i = 0; i < plain.values.size(); ++i) {
    const std::string what = i + plain.num_gradients >= plain.values.size()
                                 ? c10::str("gradient of leaf ", i + plain.num_gradients - plain.values.size())
                                 : c10::str("tensor ", i);
    ASSERT_EQ(actual.values[i].sizes(), plain.values[i].sizes()) << what;
    const double scale = std::max(1.0, largest(plain.values[i].nan_to_num(0, 1, 1)));
    const double tolerance = 1e-11 * scale + 256 * amplification.moved[i];
    if (!(tolerance < 1e-6 * scale)) {
      ++counts.amplified;
      continue;
    }
    ++counts.compared;
    const double apart = distance(actual.values[i], plain.values[i]);
    ASSERT_LE(apart, tolerance) << what << " of scale " << scale << ":\n"
                                << actual.values[i] << "\nexpected:\n"
                                << plain.values[i];
  }
}

// A view that had to be a copy may refuse to be written, and to be used once its base was.
bool is_refusal(const std::string& error) {
  return error.find("is a view across a cut dim") != std::string::npos && error.find("fix:") != std::string::npos;
}

void check_program(uint64_t seed, Counts& counts) {
  const Outcome plain = run_program(seed, nullptr);
  if (!plain.error.empty()) {
    ++counts.not_plain;
    return;
  }
  const Amplification amplification(seed, plain);
  const std::vector<Sizes> shapes = {{2}, {3}, {4}, {2, 2}, {1, 3}, {3, 1}, {2, 1, 2}};
  const Sizes& shape = shapes[seed % shapes.size()];
  on_mesh(shape, [&](const DeviceMesh& mesh) {
    const Outcome actual = run_program(seed, &mesh);
    SCOPED_TRACE(c10::str("seed ", seed, " on ", mesh.to_string(), "\n", actual.log));
    if (is_refusal(actual.error)) {
      ++counts.refused;
      return;
    }
    ASSERT_EQ(actual.error, "");
    compare(actual, plain, amplification, counts);
  });
}

TEST(RandomDTensorPrograms, GiveThePlainValuesAndGradients) {
  Counts counts;
  for_random_programs(400, [&](uint64_t seed) { check_program(seed, counts); });
  std::cout << counts.compared << " tensors compared, " << counts.amplified << " amplified rounding; " << counts.refused
            << " ranks refused a view, " << counts.not_plain << " programs are errors in plain LibTorch" << std::endl;
}

}  // namespace
}  // namespace serried::testing
