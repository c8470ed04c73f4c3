// The table of torch::optim's optimizers.
#include "serried/checkpoint/optimizer_kinds.h"

#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/values.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;
namespace optim = torch::optim;

template <class AdamState>
std::vector<StateField> adam_fields(AdamState& state) {
  return {{"step", &state.step()},
          {"exp_avg", &state.exp_avg()},
          {"exp_avg_sq", &state.exp_avg_sq()},
          {"max_exp_avg_sq", &state.max_exp_avg_sq()}};
}

std::vector<StateField> fields_of(optim::AdamParamState& state) {
  return adam_fields(state);
}

std::vector<StateField> fields_of(optim::AdamWParamState& state) {
  return adam_fields(state);
}

std::vector<StateField> fields_of(optim::SGDParamState& state) {
  return {{"momentum_buffer", &state.momentum_buffer()}};
}

std::vector<StateField> fields_of(optim::RMSpropParamState& state) {
  return {{"step", &state.step()},
          {"square_avg", &state.square_avg()},
          {"momentum_buffer", &state.momentum_buffer()},
          {"grad_avg", &state.grad_avg()}};
}

std::vector<StateField> fields_of(optim::AdagradParamState& state) {
  return {{"step", &state.step()}, {"sum", &state.sum()}};
}

// `al` is scratch: every direction writes it before it reads it.
std::vector<StateField> fields_of(optim::LBFGSParamState& state) {
  return {{"func_evals", &state.func_evals()},
          {"n_iter", &state.n_iter()},
          {"t", &state.t()},
          {"prev_loss", &state.prev_loss()},
          {"d", &state.d()},
          {"H_diag", &state.H_diag()},
          {"prev_flat_grad", &state.prev_flat_grad()},
          {"old_dirs", &state.old_dirs()},
          {"old_stps", &state.old_stps()},
          {"ro", &state.ro()}};
}

template <class AdamOptions, class Visit>
void visit_adam(AdamOptions& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("betas", options.betas());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}

template <class Visit>
void visit_options(optim::AdamOptions& options, const Visit& visit) {
  visit_adam(options, visit);
}

template <class Visit>
void visit_options(optim::AdamWOptions& options, const Visit& visit) {
  visit_adam(options, visit);
}

template <class Visit>
void visit_options(optim::SGDOptions& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}

template <class Visit>
void visit_options(optim::RMSpropOptions& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("momentum", options.momentum());
  visit("centered", options.centered());
}

template <class Visit>
void visit_options(optim::AdagradOptions& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
  visit("eps", options.eps());
}

template <class Visit>
void visit_options(optim::LBFGSOptions& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("max_iter", options.max_iter());
  visit("max_eval", options.max_eval());
  visit("tolerance_grad", options.tolerance_grad());
  visit("tolerance_change", options.tolerance_change());
  visit("history_size", options.history_size());
  visit("line_search_fn", options.line_search_fn());
}

json json_of_option(double value) {
  return number_json(value);
}
json json_of_option(bool value) {
  return value;
}
json json_of_option(int64_t value) {
  return value;
}
json json_of_option(const std::tuple<double, double>& value) {
  return {number_json(std::get<0>(value)), number_json(std::get<1>(value))};
}
template <class T>
json json_of_option(const std::optional<T>& value) {
  return value ? json(*value) : json();
}

void set_option(double& option, const json& value) {
  option = number_of(value);
}
void set_option(bool& option, const json& value) {
  option = value.get<bool>();
}
void set_option(int64_t& option, const json& value) {
  option = value.get<int64_t>();
}
void set_option(std::tuple<double, double>& option, const json& value) {
  option = {number_of(value.at(0)), number_of(value.at(1))};
}
template <class T>
void set_option(std::optional<T>& option, const json& value) {
  option = value.is_null() ? std::nullopt : std::optional<T>(value.get<T>());
}

template <class Options, class State>
OptimizerKind kind(const char* name, bool has_one_state = false) {
  return {name,
          [](const optim::OptimizerOptions& options) { return dynamic_cast<const Options*>(&options) != nullptr; },
          []() -> std::unique_ptr<optim::OptimizerParamState> { return std::make_unique<State>(); },
          [](optim::OptimizerParamState& state) {
            if (auto* known = dynamic_cast<State*>(&state)) return fields_of(*known);
            fail(c10::str("the state of a parameter is a ", c10::demangle(typeid(state).name())),
                 c10::str("save an optimizer that keeps a ", c10::demangle_type<State>(), " per parameter"));
          },
          [](const optim::OptimizerOptions& options) {
            json object = json::object();
            // Options give references only where they may be changed.
            auto& known = const_cast<Options&>(static_cast<const Options&>(options));
            visit_options(known, [&](const char* field, auto& value) { object[field] = json_of_option(value); });
            return object;
          },
          [](optim::OptimizerOptions& options, const json& object) {
            visit_options(static_cast<Options&>(options), [&](const char* field, auto& value) {
              if (object.contains(field)) set_option(value, object[field]);
            });
          },
          has_one_state};
}

}  // namespace

const OptimizerKind& kind_of(const optim::Optimizer& optimizer) {
  static const std::vector<OptimizerKind> kinds = {
      kind<optim::AdamWOptions, optim::AdamWParamState>("AdamW"),
      kind<optim::AdamOptions, optim::AdamParamState>("Adam"),
      kind<optim::SGDOptions, optim::SGDParamState>("SGD"),
      kind<optim::RMSpropOptions, optim::RMSpropParamState>("RMSprop"),
      kind<optim::AdagradOptions, optim::AdagradParamState>("Adagrad"),
      kind<optim::LBFGSOptions, optim::LBFGSParamState>("LBFGS", true),
  };
  for (const OptimizerKind& each : kinds) {
    if (each.is_kind_of(optimizer.defaults())) return each;
  }
  const optim::OptimizerOptions& options = optimizer.defaults();
  fail(c10::str("an optimizer with options of type ", c10::demangle(typeid(options).name())),
       "save one of torch::optim's or serried's optimizers, or its tensors one by one");
}

}  // namespace serried::checkpoint::detail
