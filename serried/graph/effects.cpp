// Gradients and version counts, read after a recording and restored after a replay.
#include "serried/graph/effects.h"

#include <algorithm>

#include "serried/tensor/meta.h"

namespace serried::graph {
namespace {

bool is_parameter(const at::Tensor& t) {
  return t.defined() && t.requires_grad() && t.is_leaf();
}

const at::Tensor& part_of(const at::Tensor& t) {
  const DTensorMeta* dtensor = dtensor_meta(t);
  return dtensor != nullptr ? dtensor->local : t;
}

GradientState state_of(const at::Tensor& parameter) {
  return {parameter, parameter.grad().defined(), parameter.grad()};
}

GradientState state_before(const std::vector<GradientState>& before, const at::Tensor& parameter) {
  for (const GradientState& state : before) {
    if (state.parameter.address() == parameter.unsafeGetTensorImpl()) return state;
  }
  return state_of(parameter);
}

}  // namespace

std::vector<GradientState> gradients_of(const std::vector<Resident>& residents) {
  std::vector<GradientState> states;
  for (const Resident& resident : residents) {
    const at::Tensor t = resident.tensor.lock();
    if (is_parameter(t)) states.push_back(state_of(t));
  }
  return states;
}

Effects::Effects(Recorder& recorder, const std::vector<GradientState>& before) {
  const std::vector<Resident> residents = recorder.residents();
  for (const Resident& resident : residents) {
    const at::Tensor t = resident.tensor.lock();
    if (!t.defined()) continue;
    if (!t.is_inference() && uint32_t(t._version()) != resident.version) {
      bumped_.push_back({t, uint32_t(t._version()) - resident.version});
    }
    if (is_parameter(t)) add_gradient(recorder, t, state_before(before, t));
  }
}

void Effects::add_gradient(Recorder& recorder, const at::Tensor& parameter, const GradientState& state) {
  const at::Tensor before = state.grad.lock();  // undefined also where the call has dropped it
  const at::Tensor after = parameter.grad();
  const bool was_used = before.defined() && recorder.find_known(part_of(before)) != kNoValue;
  if (!state.had_grad || (was_used && after.is_same(before))) expected_.push_back({parameter, before});
  if (after.is_same(before) && before.defined() == state.had_grad) return;
  Given given{.parameter = parameter};
  if (after.defined()) {
    const DTensorMeta* dtensor = dtensor_meta(after);
    given.value = recorder.find(part_of(after));
    if (dtensor != nullptr) given.spec = dtensor->spec;
    if (recorder.graph().value(given.value).kind != ValueKind::computed) given.kept = after;
    recorder.graph().gradients().push_back({meta_of(parameter).to_string(), given.value});
  }
  given_.push_back(std::move(given));
}

bool Effects::Expected::holds() const {
  const at::Tensor t = parameter.lock();
  return t.defined() && t.grad().is_same(grad);
}

bool Effects::hold() const {
  return std::all_of(expected_.begin(), expected_.end(), [](const Expected& expected) { return expected.holds(); });
}

std::string Effects::why_not() const {
  for (const Expected& expected : expected_) {
    if (expected.holds()) continue;
    const at::Tensor parameter = expected.parameter.lock();
    if (!parameter.defined()) return "a parameter of the step is gone";
    const std::string text = "gradient of the parameter " + meta_of(parameter).to_string();
    if (!expected.grad.defined()) return text + " was undefined before the call and is defined";
    return text + (parameter.grad().defined() ? " is another tensor than before" : " was defined and is undefined");
  }
  return "";
}

void Effects::apply(const Program& program) const {
  for (const Given& given : given_) {
    const at::Tensor parameter = given.parameter.lock();
    if (!parameter.defined()) continue;
    at::Tensor& grad = parameter.mutable_grad();
    if (given.kept.defined()) {
      grad = given.kept;
    } else if (given.value == kNoValue) {
      grad.reset();
    } else {
      const at::Tensor part = program.value(given.value);
      grad = given.spec ? wrap(part, given.spec) : part;
    }
  }
  for (const Bumped& bumped : bumped_) {
    const at::Tensor t = bumped.tensor.lock();
    for (uint32_t i = 0; t.defined() && i < bumped.count; ++i) t.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace serried::graph
