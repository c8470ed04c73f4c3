// What goes into a checkpoint: the state of modules, optimizers and other things by name, and plain values beside them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/parallel/sampler.h"

namespace serried::checkpoint {

namespace detail {
class Source;
struct ValueContent;
}  // namespace detail

/// Something that can be saved and loaded again. Refers to it: it has to live until the call it is passed to is over.
class State {
 public:
  explicit State(std::shared_ptr<detail::Source> source) : source_(std::move(source)) {}
  const std::shared_ptr<detail::Source>& source() const { return source_; }

 private:
  std::shared_ptr<detail::Source> source_;
};

/// Parameters and buffers by name: plain ones, DTensors on any mesh, and parameters that fully_shard has cut. Of a
/// DistributedDataParallel it is the module inside. Plain parameters are the same on all ranks, else the save is
/// refused; of buffers rank 0's count, since batch norm's differ.
State state_of(const torch::nn::Module& module);
template <class Contained>
State state_of(const torch::nn::ModuleHolder<Contained>& holder) {
  return state_of(static_cast<const torch::nn::Module&>(*holder));
}
template <std::derived_from<torch::nn::Module> Contained>
State state_of(const std::shared_ptr<Contained>& module) {
  return state_of(static_cast<const torch::nn::Module&>(*module));
}

/// Options and state of each parameter, by the name that a module of the same call has for it; where none has, by its
/// place. All of torch::optim's optimizers, serried's, and ZeroRedundancyOptimizer: each into each other of the same
/// kind, AdamW into serried::AdamW as well. A load makes the state where there is none yet, placed like the parameter.
State state_of(torch::optim::Optimizer& optimizer);

/// How often it has stepped; what it has set is among the options of the optimizer.
State state_of(torch::optim::LRScheduler& scheduler);
State state_of(torch::optim::ReduceLROnPlateauScheduler& scheduler);

/// Epoch and samples that all ranks have been given: any number of ranks goes on behind them. `consumed`, where a
/// loader with workers has asked for more than the training has used.
State state_of(DistributedSampler& sampler, std::optional<size_t> consumed = {});

/// The random generators of each rank: torch's default one, and that of DTensors. Another number of ranks can load them
/// where all ranks had the same.
State random_state();

/// The same for a generator of one's own, on any device.
State state_of(const at::Generator& generator);

struct Entry;

/// What stands behind a name: a State; a number, a text, a truth value, a tensor, a list of such, entries by name, or
/// an IValue made of these; or a pointer to a variable, which a load writes.
class Value {
 public:
  Value(State state);
  Value(c10::IValue value);
  Value(const at::Tensor& tensor);
  Value(bool value);
  Value(const char* text);
  Value(std::string text);
  template <std::integral Number>
  Value(Number number) : Value(c10::IValue(as_int64(number))) {}
  template <std::floating_point Number>
  Value(Number number) : Value(c10::IValue(double(number))) {}
  template <class Element>
  Value(const std::vector<Element>& elements) : Value(list_of(elements)) {}
  Value(std::initializer_list<Entry> entries);
  Value(const std::vector<Entry>& entries);

  Value(int64_t* variable);
  Value(int* variable);
  Value(double* variable);
  Value(std::string* variable);
  Value(bool* variable);
  template <class Other>
  Value(Other* variable) = delete;  // would count as a truth value

  const detail::ValueContent& content() const { return *content_; }

 private:
  explicit Value(std::shared_ptr<const detail::ValueContent> content) : content_(std::move(content)) {}
  template <class Element>
  static c10::IValue list_of(const std::vector<Element>& elements) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const Element& element : elements) list.push_back(Value(Element(element)).value());
    return list;
  }
  template <std::integral Number>
  static int64_t as_int64(Number number) {
    if constexpr (std::is_unsigned_v<Number> && sizeof(Number) >= sizeof(int64_t)) check_fits(number);
    return int64_t(number);
  }
  static void check_fits(uint64_t number);
  const c10::IValue& value() const;

  std::shared_ptr<const detail::ValueContent> content_;
};

struct Entry {
  std::string name;
  Value value;
};

/// {{"model", state_of(*net)}, {"step", 200}}
using Contents = std::vector<Entry>;

}  // namespace serried::checkpoint
