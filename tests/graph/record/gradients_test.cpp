// Gradients whose memory the surroundings hold too: in a snapshot, in a flat buffer.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/graph/captured_calls.h"

namespace serried {
namespace {

using testing::compare_with_eager;
using testing::Surroundings;

at::Tensor three_numbers(int call) {
  return torch::tensor({1.f, 2.f, 3.f}) + float(call);
}

using Between = std::function<void(Surroundings&, int call)>;

// Twelve calls, before each of which `between` changes the surroundings.
void compare_changing(const std::function<Surroundings()>& make, const testing::CapturedFn& fn,
                      const Between& between) {
  const auto argument = [&](Surroundings& s, int call) {
    between(s, call);
    return three_numbers(call);
  };
  compare_with_eager(make, fn, argument, 12);
}

at::Tensor weight_of(float value) {
  return torch::full({3}, value).requires_grad_();
}

// The weight with a gradient, a snapshot of it, and a tensor that may take the snapshot's place.
Surroundings with_snapshot() {
  Surroundings s{{weight_of(0.5), at::Tensor(), torch::full({3}, 100.f)}};
  s[0].mutable_grad() = torch::ones({3});
  s[1] = s[0].grad().detach();
  return s;
}

at::Tensor drop_and_train(Surroundings& s, const at::Tensor& x) {
  s[0].mutable_grad().reset();
  (s[0] * x).sum().backward();
  return s[0].grad() * s[1];
}

at::Tensor accumulate_beside(Surroundings& s, const at::Tensor& x) {
  const at::Tensor before = s[1] * 2;
  (s[0] * x).sum().backward();
  return s[0].grad() * s[1] + before;
}

at::Tensor read_and_drop(Surroundings& s, const at::Tensor& x) {
  const at::Tensor before = s[0].grad() * s[1];
  s[0].mutable_grad().reset();
  (s[0] * x).sum().backward();
  return s[0].grad() * s[1] + before;
}

at::Tensor write_and_drop(Surroundings& s, const at::Tensor& x) {
  {
    const at::NoGradGuard no_grad;
    s[0].grad().mul_(2);
  }
  const at::Tensor before = s[1] + 1;
  s[0].mutable_grad().reset();
  (s[0] * x).sum().backward();
  return s[0].grad() * s[1] + before;
}

class CaptureSnapshot : public ::testing::TestWithParam<testing::CapturedFn> {
 protected:
  static void compare(const Between& between) { compare_changing(with_snapshot, GetParam(), between); }
};

TEST_P(CaptureSnapshot, TakenOnce) {
  compare([](Surroundings&, int) {});
}
TEST_P(CaptureSnapshot, TakenBeforeEachCall) {
  compare([](Surroundings& s, int) { s[1] = s[0].grad().detach(); });
}
TEST_P(CaptureSnapshot, TakenUntilTheRecordingsAreDone) {
  for (int last = 0; last < 7; ++last) {
    compare([&](Surroundings& s, int call) {
      if (call <= last) s[1] = s[0].grad().detach();
    });
  }
}
TEST_P(CaptureSnapshot, AnotherTensorTakesItsPlace) {
  for (int last = 0; last < 7; ++last) {
    compare([&](Surroundings& s, int call) { s[1] = call <= last ? s[0].grad().detach() : s[2]; });
  }
}
TEST_P(CaptureSnapshot, TheHandleItself) {
  for (int last = 0; last < 7; ++last) {
    compare([&](Surroundings& s, int call) { s[1] = call <= last ? s[0].grad() : s[2]; });
  }
}
TEST_P(CaptureSnapshot, TheGradientBecomesTheOtherTensor) {
  for (int last = 0; last < 7; ++last) {
    compare([&](Surroundings& s, int call) {
      if (call <= last) s[1] = s[0].grad().detach();
      if (call == last + 1) s[0].mutable_grad() = torch::full({3}, 7.f);
    });
  }
}
INSTANTIATE_TEST_SUITE_P(Of, CaptureSnapshot,
                         ::testing::Values(drop_and_train, accumulate_beside, read_and_drop, write_and_drop));

// Two weights and two flat buffers for their gradients.
Surroundings with_buffers() {
  return {{weight_of(0.5), weight_of(0.25), torch::ones({6}), torch::full({6}, 3.f)}};
}

void place_in(Surroundings& s, size_t buffer, int64_t shift = 0) {
  for (int64_t i = 0; i < 2; ++i) s[size_t(i)].mutable_grad() = s[buffer].narrow(0, 3 * ((i + shift) % 2), 3);
}

at::Tensor train_step(Surroundings& s, const at::Tensor& x) {
  (s[0] * x + s[1] * x * x).sum().backward();
  const at::NoGradGuard no_grad;
  s[0].sub_(s[0].grad() * 0.1);
  s[1].sub_(s[1].grad() * 0.01);
  return s[0].grad() + s[1].grad();
}
at::Tensor zero_and_train(Surroundings& s, const at::Tensor& x) {
  s[0].mutable_grad().zero_();
  s[1].mutable_grad().zero_();
  return train_step(s, x);
}
at::Tensor train_and_drop(Surroundings& s, const at::Tensor& x) {
  const at::Tensor result = train_step(s, x);
  s[0].mutable_grad().reset();
  s[1].mutable_grad().reset();
  return result;
}
at::Tensor place_and_train(Surroundings& s, const at::Tensor& x) {
  place_in(s, 2);
  return zero_and_train(s, x);
}
at::Tensor drop_first(Surroundings& s, const at::Tensor& x) {
  s[0].mutable_grad().reset();
  return train_step(s, x);
}

class CaptureFlatGradients : public ::testing::TestWithParam<testing::CapturedFn> {
 protected:
  static void compare(const Between& between) { compare_changing(with_buffers, GetParam(), between); }
};

TEST_P(CaptureFlatGradients, PlacedOnce) {
  compare([](Surroundings& s, int call) {
    if (call == 0) place_in(s, 2);
  });
}
TEST_P(CaptureFlatGradients, PlacedBeforeEachCall) {
  compare([](Surroundings& s, int) { place_in(s, 2); });
}
TEST_P(CaptureFlatGradients, AnotherBufferOneDay) {
  for (int last = 0; last < 7; ++last) compare([&](Surroundings& s, int call) { place_in(s, call <= last ? 2 : 3); });
}
TEST_P(CaptureFlatGradients, AnotherPlaceOneDay) {
  for (int last = 0; last < 7; ++last)
    compare([&](Surroundings& s, int call) { place_in(s, 2, call <= last ? 0 : 1); });
}
TEST_P(CaptureFlatGradients, OwnMemoryOneDay) {
  for (int last = 0; last < 7; ++last) {
    compare([&](Surroundings& s, int call) {
      place_in(s, 2);
      if (call > last) s[1].mutable_grad() = torch::full({3}, 9.f);
    });
  }
}
TEST_P(CaptureFlatGradients, InTurn) {
  compare([&](Surroundings& s, int call) { place_in(s, size_t(2 + call % 2)); });
}
INSTANTIATE_TEST_SUITE_P(Of, CaptureFlatGradients,
                         ::testing::Values(train_step, zero_and_train, train_and_drop, place_and_train, drop_first));

}  // namespace
}  // namespace serried
