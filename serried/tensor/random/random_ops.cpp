// Random ops on DTensors: initialisation follows the generator's stream, ops of a step count from a key.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/mul.h>
#include <ATen/ExpandUtils.h>

#include "serried/base/error.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/making/like.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"
#include "serried/tensor/random/random_fill.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

using detail::OpCall;
using detail::Part;
using torch::jit::Stack;

// Null for a plain tensor.
const DTensorMeta* meta_of(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? dtensor_meta(value.toTensor()) : nullptr;
}

std::optional<at::Generator> generator_of(const OpCall& arguments) {
  return arguments.optional<at::Generator>("generator");
}

at::MemoryFormat memory_format_of(const OpCall& arguments) {
  return arguments.optional<at::MemoryFormat>("memory_format").value_or(at::MemoryFormat::Preserve);
}

// What fill_by_key draws from.
at::Generator source_for(const OpCall& arguments, const Spec& spec) {
  return generator_for(generator_of(arguments), spec.mesh);
}

// The dispatcher's check comes after handlers.
const DTensorMeta& writable(const c10::OperatorHandle& op, const DTensorMeta& meta) {
  detail::begin_write(op.schema().name(), op.schema().arguments()[0].name(), meta);
  return meta;
}

at::Tensor result(const Part& part) {
  return wrap(part.local, part.spec);
}

// The part of a tensor whose Partial axes were reduced.
Part reduced(const DTensorMeta& meta) {
  const Placements to = without_partial(meta.spec->placements);
  if (to == meta.spec->placements) return {meta.local, meta.spec};
  return {redistribute_local(meta.local, *meta.spec, to), with_placements(*meta.spec, to)};
}

// --- initialisation: what plain LibTorch on one device gives ---

std::vector<c10::IValue> between_self_and_generator(const OpCall& arguments) {
  std::vector<c10::IValue> values;
  for (size_t i = 1; i + 1 < arguments.arguments().size(); ++i) values.push_back(arguments.argument(i));
  return values;
}

bool initialise(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  if (meta == nullptr) return false;
  detail::reject_partial(op.schema().name(), *meta->spec);
  const at::Generator generator = generator_for(generator_of(arguments), meta->spec->mesh);
  detail::fill_by_stream(writable(op, *meta).local, *meta->spec, {op, between_self_and_generator(arguments)},
                         generator);
  return detail::finish(op, stack, {arguments.argument(0).toTensor()});
}

// "aten::uniform" and its like: the in-place op on a new tensor.
bool initialise_new(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  if (meta == nullptr || arguments.has_out()) return false;
  std::string name = op.schema().name();
  if (name == "aten::normal_functional") name = "aten::normal";
  const detail::StreamOp stream = detail::stream_op((name + "_").c_str(), op.schema().overload_name().c_str(),
                                                    between_self_and_generator(arguments));
  const Part part = detail::empty_beside(*meta->spec);
  detail::fill_by_stream(part.local, *part.spec, stream, generator_for(generator_of(arguments), part.spec->mesh));
  return detail::finish(op, stack, {result(part)});
}

// --- ops of a step: element i is a function of a key and i ---

void check_probability(const c10::OperatorHandle& op, double p) {
  if (p >= 0 && p <= 1) return;
  raise<c10::ValueError>({op.schema().name(), c10::str("p is ", p), "pass a probability from 0 to 1"});
}

void check_probabilities(const c10::OperatorHandle& op, const at::Tensor& p) {
  const DTensorMeta* meta = dtensor_meta(p);
  const tape::Pause only_checks;
  const detail::LocalOnly guard;
  const at::Tensor& local = meta != nullptr ? meta->local : p;
  if (!at::is_floating_point(local)) return;
  if (local.numel() == 0 || local.ge(0).logical_and_(local.le(1)).all().item<bool>()) return;
  raise<c10::ValueError>({op.schema().name(), "some elements of p are not probabilities",
                          "pass values from 0 to 1, for example through sigmoid"});
}

// Draws 0 and 1 into a part that may be Partial: dropout's noise has its input's placements.
void fill_bernoulli(const Part& part, const at::Generator& generator, double p) {
  // Every rank's generator moves on, also where the numbers do not count.
  detail::fill_by_key(part.local, *part.spec, "bernoulli", {p}, generator);
  if (const auto identity = detail::identity_here(part.spec->placements, part.spec->mesh.position())) {
    const detail::LocalOnly guard;
    fill_identity_(part.local, *identity);
  }
}

bool bernoulli_in_place(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  if (meta == nullptr) return false;
  const double p = arguments.number("p");
  check_probability(op, p);
  fill_bernoulli({writable(op, *meta).local, meta->spec}, source_for(arguments, *meta->spec), p);
  return detail::finish(op, stack, {arguments.argument(0).toTensor()});
}

bool bernoulli_p(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  if (meta == nullptr || arguments.has_out()) return false;
  const double p = arguments.number("p");
  check_probability(op, p);
  const Part part = detail::empty_beside(*meta->spec);
  fill_bernoulli(part, source_for(arguments, *part.spec), p);
  return detail::finish(op, stack, {result(part)});
}

// Uniform numbers beside `like`, as fine as probabilities of type `p` need.
at::Tensor uniform_beside(const Spec& like, at::ScalarType p, const at::Generator& generator) {
  const Part part = detail::empty_beside(like, p == at::kDouble ? at::kDouble : at::kFloat);
  detail::fill_by_key(part.local, *part.spec, "uniform", {}, generator);
  return result(part);
}

// bernoulli(self), bernoulli.Tensor(self, p), bernoulli_.Tensor(self, p): probabilities are tensors.
bool bernoulli_tensor(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  if (meta == nullptr || arguments.has_out()) return false;
  const at::Tensor self = arguments.argument(0).toTensor();
  at::Tensor p = arguments.has("p") ? arguments.tensor_value("p") : self;
  const DTensorMeta* p_meta = dtensor_meta(p);
  if (p_meta != nullptr) p = result(reduced(*p_meta));
  check_probabilities(op, p);
  const at::Tensor uniform = uniform_beside(*meta->spec, p.scalar_type(), source_for(arguments, *meta->spec));
  const at::Tensor drawn = at::lt(uniform, p);
  if (op.schema().name() != "aten::bernoulli_") return detail::finish(op, stack, {drawn.to(self.scalar_type())});
  writable(op, *meta);
  self.copy_(drawn);
  return detail::finish(op, stack, {self});
}

bool rand_like(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  if (meta == nullptr || arguments.has_out()) return false;
  const Part part =
      detail::empty_beside(*meta->spec, arguments.optional<at::ScalarType>("dtype"), memory_format_of(arguments));
  const char* kind = op.schema().name() == "aten::randn_like" ? "normal" : "uniform";
  detail::fill_by_key(part.local, *part.spec, kind, {}, source_for(arguments, *part.spec));
  return detail::finish(op, stack, {result(part)});
}

int64_t as_integer(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item<int64_t>() : value.toInt();
}

bool randint_like(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  if (meta == nullptr || arguments.has_out()) return false;
  const int64_t low = arguments.has("low") ? as_integer(*arguments.value("low")) : 0;
  const int64_t high = as_integer(*arguments.value("high"));
  if (low >= high) {
    raise<c10::ValueError>(
        {"randint_like", c10::str("there is no integer from ", low, " up to but not ", high), "pass low < high"});
  }
  const Part part =
      detail::empty_beside(*meta->spec, arguments.optional<at::ScalarType>("dtype"), memory_format_of(arguments));
  detail::fill_by_key(part.local, *part.spec, "integers", {low, high}, source_for(arguments, *part.spec));
  return detail::finish(op, stack, {result(part)});
}

// A mask scales, so what waits for a sum may go on waiting.
Part linear_input(const DTensorMeta& meta) {
  for (const Placement& placement : meta.spec->placements) {
    if (!placement.is_partial()) continue;
    if (!placement.is_partial(ReduceKind::sum) && !placement.is_partial(ReduceKind::avg)) return reduced(meta);
  }
  return {meta.local, meta.spec};
}

bool native_dropout(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  if (meta == nullptr || arguments.has_out()) return false;
  const double p = arguments.number("p");
  check_probability(op, p);
  const Part input = linear_input(*meta);
  const Part mask = detail::empty_beside(*input.spec, at::kBool);
  const bool drops = arguments.flag("train", true);
  if (drops) detail::fill_by_key(mask.local, *mask.spec, "bernoulli", {1 - p}, source_for(arguments, *mask.spec));
  Part output{{}, input.spec};
  {
    const detail::LocalOnly guard;
    if (!drops) mask.local.fill_(true);
    output.local = drops ? at::mul(input.local, mask.local).mul_(p == 1 ? 0. : 1 / (1 - p)) : input.local.clone();
  }
  return detail::finish(op, stack, {result(output), result(mask)});
}

// Slopes of the negative elements, drawn into `noise`; 1 where self is positive.
at::Tensor rrelu_part(const Part& self, const Part& noise, const OpCall& arguments) {
  const double lower = arguments.value("lower")->toScalar().toDouble();
  const double upper = arguments.value("upper")->toScalar().toDouble();
  const Part slope = detail::empty_beside(*self.spec);
  detail::fill_by_key(slope.local, *slope.spec, "uniform", {}, source_for(arguments, *slope.spec));
  const detail::LocalOnly guard;
  slope.local.mul_(upper - lower).add_(lower).masked_fill_(self.local.gt(0), 1);
  noise.local.copy_(slope.local);
  return at::mul(self.local, slope.local);
}

bool rrelu_with_noise(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const OpCall arguments(op, stack);
  const DTensorMeta* meta = meta_of(arguments.argument(0));
  const DTensorMeta* noise_meta = meta_of(*arguments.value("noise"));
  const std::string& name = op.schema().name();
  if (meta == nullptr || noise_meta == nullptr || arguments.has_out()) return false;
  if (!arguments.flag("training")) return false;
  detail::reject_partial(name, *noise_meta->spec);
  const Placements& to = noise_meta->spec->placements;
  const Part self{redistribute_local(meta->local, *meta->spec, to), with_placements(*meta->spec, to)};
  const bool is_functional = name == "aten::rrelu_with_noise_functional";
  if (!is_functional) detail::begin_write(name, "noise", *noise_meta);
  const Part noise =
      is_functional ? detail::empty_beside(*noise_meta->spec) : Part{noise_meta->local, noise_meta->spec};
  const at::Tensor output = result({rrelu_part(self, noise, arguments), self.spec});
  if (is_functional) return detail::finish(op, stack, {output, result(noise)});
  if (name == "aten::rrelu_with_noise") return detail::finish(op, stack, {output});
  const at::Tensor given = arguments.argument(0).toTensor();
  given.copy_(output);
  return detail::finish(op, stack, {given});
}

// Standard normal numbers of the broadcast shape, placed like the operand that has it.
at::Tensor normal_beside(const OpCall& arguments, const DTensorMeta* mean, const DTensorMeta* std) {
  const Spec& first = mean != nullptr ? *mean->spec : *std->spec;
  c10::DimVector sizes(first.sizes);
  if (mean != nullptr && std != nullptr) sizes = at::infer_size_dimvector(mean->spec->sizes, std->spec->sizes);
  const bool mean_fits = mean != nullptr && mean->spec->sizes == sizes;
  const bool std_fits = std != nullptr && std->spec->sizes == sizes;
  const Placements placements = mean_fits  ? mean->spec->placements
                                : std_fits ? std->spec->placements
                                           : Placements(first.placements.size());
  const SpecPtr spec =
      intern_spec(first.mesh, without_partial(placements), sizes, serried::contiguous_strides(sizes), first.dtype);
  const Part part{detail::empty_part(*spec), spec};
  detail::fill_by_key(part.local, *spec, "normal", {}, source_for(arguments, *spec));
  return result(part);
}

void check_deviation(const c10::IValue& std) {
  if (!std.isDouble() || std.toDouble() >= 0) return;
  raise<c10::ValueError>({"normal", c10::str("std is ", std.toDouble()), "pass a standard deviation of 0 or more"});
}

bool normal_of_tensors(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const OpCall arguments(op, stack);
  const c10::IValue mean = *arguments.value("mean");
  const c10::IValue std = *arguments.value("std");
  const bool mean_is_plain = mean.isTensor() && meta_of(mean) == nullptr;
  const bool std_is_plain = std.isTensor() && meta_of(std) == nullptr;
  if (mean_is_plain || std_is_plain || arguments.has_out()) return false;
  check_deviation(std);
  const at::Tensor noise = normal_beside(arguments, meta_of(mean), meta_of(std));
  const at::Tensor scaled = std.isTensor() ? at::mul(noise, std.toTensor()) : at::mul(noise, std.toScalar());
  return detail::finish(op, stack, {mean.isTensor() ? scaled.add(mean.toTensor()) : scaled.add(mean.toScalar())});
}

}  // namespace

std::vector<HandlerEntry> random_handlers() {
  return {
      {"aten::bernoulli", bernoulli_tensor},
      {"aten::bernoulli.p", bernoulli_p},
      {"aten::bernoulli_.Tensor", bernoulli_tensor},
      {"aten::bernoulli_.float", bernoulli_in_place},
      {"aten::cauchy", initialise_new},
      {"aten::cauchy_", initialise},
      {"aten::exponential", initialise_new},
      {"aten::exponential_", initialise},
      {"aten::geometric", initialise_new},
      {"aten::geometric_", initialise},
      {"aten::log_normal", initialise_new},
      {"aten::log_normal_", initialise},
      {"aten::native_dropout", native_dropout},
      {"aten::normal.Tensor_Tensor", normal_of_tensors},
      {"aten::normal.Tensor_float", normal_of_tensors},
      {"aten::normal.float_Tensor", normal_of_tensors},
      {"aten::normal_", initialise},
      {"aten::normal_functional", initialise_new},
      {"aten::rand_like", rand_like},
      {"aten::randint_like", randint_like},
      {"aten::randn_like", rand_like},
      {"aten::random", initialise_new},
      {"aten::random_", initialise},
      {"aten::rrelu_with_noise", rrelu_with_noise},
      {"aten::rrelu_with_noise_", rrelu_with_noise},
      {"aten::rrelu_with_noise_functional", rrelu_with_noise},
      {"aten::uniform", initialise_new},
      {"aten::uniform_", initialise},
  };
}

}  // namespace serried
