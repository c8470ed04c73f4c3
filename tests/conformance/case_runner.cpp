// Runs one recorded call on one rank.
#include "tests/conformance/case_runner.h"

#include <time.h>

#include <torch/torch.h>

#include "serried/tensor/dispatch/dispatch.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"
#include "tests/conformance/compare.h"
#include "tests/conformance/local_values.h"

namespace serried::testing {
namespace {

constexpr double kMaxSeconds = 3;  // of this rank's processor time for one call

double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

at::Tensor distributed(const at::Tensor& full, const Placements& placements, const RankSetting& setting) {
  if (setting.mesh == nullptr) return exact_copy(full);
  const Position at = setting.mesh->position();
  const Seat seat{at.coordinate.vec(), at.mesh_shape.vec()};
  return wrap(local_value(full, placements, seat),
              intern_spec(*setting.mesh, placements, full.sizes(), full.strides(), full.scalar_type()));
}

c10::IValue with_element(const c10::IValue& list, int64_t element, const at::Tensor& tensor) {
  if (list.isTensorList()) {
    auto copy = list.toTensorList().copy();
    copy.set(element, tensor);
    return copy;
  }
  auto copy = list.toList().copy();
  copy.set(element, tensor);
  return copy;
}

torch::jit::Stack make_arguments(const VectorCase& vector_case, const Combination& combination,
                                 const RankSetting& setting) {
  torch::jit::Stack arguments = vector_case.arguments;
  const std::vector<TensorPlace> places = tensor_places(vector_case);
  for (size_t i = 0; i < places.size(); ++i) {
    const at::Tensor tensor = distributed(places[i].tensor, combination[i], setting);
    c10::IValue& argument = arguments[places[i].argument];
    argument = places[i].element < 0 ? c10::IValue(tensor) : with_element(argument, places[i].element, tensor);
  }
  return arguments;
}

// Every tensor as the plain whole.
c10::IValue full(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !is_dtensor(tensor)) return value;
    const at::Tensor whole = DTensor(tensor).full_tensor();
    TORCH_CHECK(whole.sizes() == tensor.sizes(), "the DTensor says ", tensor.sizes(), " and is ", whole.sizes());
    return whole;
  }
  if (!value.isList()) return value;
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& item : value.toListRef()) list.push_back(full(item));
  return list;
}

std::string compare(const VectorCase& vector_case, const torch::jit::Stack& arguments,
                    const torch::jit::Stack& results) {
  // Everything is gathered before anything is compared: a rank that sees a difference must not leave the others
  // waiting.
  torch::jit::Stack whole;
  for (const c10::IValue& result : results) whole.push_back(full(result));
  torch::jit::Stack written;
  for (const auto& [argument, want] : vector_case.mutated) written.push_back(full(arguments[argument]));
  const std::string text = difference(whole, vector_case.outputs);
  if (!text.empty()) return "result " + text;
  for (size_t i = 0; i < written.size(); ++i) {
    const std::string differs = difference(written[i], vector_case.mutated[i].second);
    if (!differs.empty()) return c10::str("argument #", vector_case.mutated[i].first, " ", differs);
  }
  return "";
}

std::string one_line(std::string text) {
  const size_t end = text.find("\nException raised from");
  if (end != std::string::npos) text.resize(end);
  for (char& c : text) c = c == '\n' ? ' ' : c;
  return text.substr(0, 400);
}

}  // namespace

Outcome run_case(const c10::OperatorHandle& op, const VectorCase& vector_case, const Combination& combination,
                 const RankSetting& setting) {
  const at::NoGradGuard no_grad;
  const double begin = thread_seconds();
  Outcome outcome;
  try {
    const torch::jit::Stack arguments = make_arguments(vector_case, combination, setting);
    torch::jit::Stack stack = arguments;
    const uint64_t defaults = dispatch_stats().defaults;
    op.callBoxed(&stack);
    outcome.took_default = dispatch_stats().defaults != defaults;
    outcome.text = compare(vector_case, arguments, stack);
    if (!outcome.text.empty()) outcome.status = Status::wrong;
  } catch (const c10::Error& error) {
    return {Status::raises, outcome.took_default, one_line(error.what_without_backtrace())};
  } catch (const std::exception& error) {
    return {Status::raises, outcome.took_default, one_line(error.what())};
  }
  const double seconds = thread_seconds() - begin;
  if (seconds > kMaxSeconds) return {Status::raises, outcome.took_default, c10::str("took ", seconds, " s")};
  return outcome;
}

bool expect_plain_result(const c10::OperatorHandle& op, VectorCase& vector_case) {
  const at::NoGradGuard no_grad;
  const torch::jit::Stack arguments = make_arguments(vector_case, Combination(tensor_places(vector_case).size()), {});
  torch::jit::Stack results = arguments;
  op.callBoxed(&results);
  if (compare(vector_case, arguments, results).empty()) return false;
  vector_case.outputs = std::move(results);
  for (auto& [argument, value] : vector_case.mutated) value = arguments[argument];
  return true;
}

}  // namespace serried::testing
