// Counts strong references, less those whose holder is known.
#include "serried/graph/record/handles.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "serried/comm/groups/live_groups.h"
#include "serried/graph/text/text.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

// The node that adds to a leaf's gradient holds the leaf, and lives as long as any graph that ends there.
bool is_held_by_autograd(const c10::TensorImpl& tensor) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
  return meta != nullptr && !meta->grad_accumulator_.expired();
}

// How many counts are remembered of one tensor, the newest first. One that is forgotten and comes again costs one more
// recording.
constexpr size_t kMostCounts = 8;

size_t count_handles(const WeakTensor& tensor) {
  return num_handles(tensor);
}

size_t count_handles(const WeakGenerator& generator) {
  return generator.use_count();
}

const void* address_of(const WeakTensor& tensor) {
  return tensor.address();
}

const void* address_of(const WeakGenerator& generator) {
  return generator._unsafe_get_target();
}

bool is_part_of_bucket(const at::Tensor& grad) {
  const at::Tensor part = part_of(grad);
  return storage_of(part) == nullptr || !owns_storage(part);
}

// Effects guard these; buckets and hooks take and drop handles of them as they like. One that somebody else holds
// before the call may be what the function found there.
std::unordered_set<const c10::TensorImpl*> gradients_of_leaves(const Recording& recording) {
  std::unordered_set<const c10::TensorImpl*> gradients;
  for (const OuterTensor& outer : recording.outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (!t.defined() || !t.is_leaf() || !t.grad().defined()) continue;
    const bool is_held_elsewhere = t.grad().use_count() > 1 && !is_part_of_bucket(t.grad());
    if (!is_held_elsewhere) gradients.insert(t.grad().unsafeGetTensorImpl());
  }
  return gradients;
}

using torch::autograd::AutogradMeta;
using torch::autograd::DifferentiableViewMeta;

// Threads of a backend drop what they sent a moment after its sender was told that all is done; other threads of the
// user may look at an argument.
std::chrono::milliseconds time_to_let_go(const Recording& recording, const KeptTensor& kept) {
  if (!recording.groups.empty()) return std::chrono::milliseconds(1000);
  return std::chrono::milliseconds(kept.argument >= 0 ? 100 : 0);
}

/// Who holds what, as far as tensors themselves show it.
class Holders {
 public:
  void add_result(const at::Tensor& t) {
    if (!t.defined()) return;
    handles_[t.unsafeGetTensorImpl()] += 2;
    visit(t);
  }
  void add_gradient_of(const at::Tensor& leaf) {
    if (!leaves_.insert(leaf.unsafeGetTensorImpl()).second) return;
    const AutogradMeta* meta = torch::autograd::impl::get_autograd_meta(leaf);
    if (meta != nullptr) hold(meta->grad_);
  }
  void add_foreign(const at::Tensor& t) { foreign_.insert(storage_of(t)); }

  // `t` is there: so is what it holds.
  void visit(const at::Tensor& t) {
    if (!t.defined() || !tensors_.insert(t.unsafeGetTensorImpl()).second) return;
    add_gradient_of(t);
    const DTensorMeta* dtensor = dtensor_meta(t);
    if (dtensor == nullptr) ++in_storage_[storage_of(t)];
    if (dtensor != nullptr && dtensors_.insert(dtensor).second) hold(dtensor->local);
    const DifferentiableViewMeta* view = torch::autograd::impl::get_view_autograd_meta(t);
    if (view == nullptr) return;
    if (view->has_bw_view()) hold(view->get_backward_view().base_);
    if (view->has_fw_view() && !view->shared_view_info()) hold(view->get_forward_view().base_);
  }

  size_t handles_of(const WeakTensor& t) const {
    const auto found = handles_.find(t.address());
    return found != handles_.end() ? found->second : 0;
  }
  std::optional<size_t> tensors_in(const c10::StorageImpl* storage) const {
    if (foreign_.count(storage) != 0) return std::nullopt;
    const auto found = in_storage_.find(storage);
    return found != in_storage_.end() ? found->second : 0;
  }

 private:
  void hold(const at::Tensor& t) {
    if (!t.defined()) return;
    ++handles_[t.unsafeGetTensorImpl()];
    visit(t);
  }

  std::unordered_map<const c10::TensorImpl*, size_t> handles_;
  std::unordered_set<const c10::TensorImpl*> tensors_;
  std::unordered_set<const c10::TensorImpl*> leaves_;
  std::unordered_set<const DTensorMeta*> dtensors_;
  std::unordered_map<const c10::StorageImpl*, size_t> in_storage_;
  std::unordered_set<const c10::StorageImpl*> foreign_;  // not made by the call
};

Holders holders_of(const Recorder& recorder, const std::vector<at::Tensor>& results) {
  Holders holders;
  for (const at::Tensor& t : results) holders.add_result(t);
  for (const OuterTensor& outer : recorder.outer_tensors()) {
    const at::Tensor t = outer.tensor.lock();
    if (!t.defined()) continue;
    if (outer.input >= 0 || outer.is_of_surroundings()) holders.add_foreign(t);
    holders.add_gradient_of(t);
  }
  for (const MadeTensor& made : recorder.made()) holders.visit(made.tensor.lock());
  return holders;
}

// Whether what autograd keeps for a second derivative lives in gradients.
bool has_gradient_with_history(const Recorder& recorder) {
  return std::any_of(recorder.outer_tensors().begin(), recorder.outer_tensors().end(), [](const OuterTensor& outer) {
    const at::Tensor t = outer.tensor.lock();
    const AutogradMeta* meta = t.defined() ? torch::autograd::impl::get_autograd_meta(t) : nullptr;
    return meta != nullptr && meta->grad_.defined() && meta->grad_.requires_grad();
  });
}

// Whether the function has met DTensors: arguments may then be parts, and autograd's way back from a view holds what
// the view was taken from, which nothing shows.
bool has_met_dtensors() {
  return c10::AutogradState::get_tls_state().get_view_replay_enabled();
}

/// Storages, by number, that several values lie in.
std::unordered_set<int32_t> storages_with_views(const Recorder& recorder) {
  std::unordered_set<int32_t> storages, with_views;
  for (const Value& value : recorder.values()) {
    if (!storages.insert(value.storage).second) with_views.insert(value.storage);
  }
  return with_views;
}

const Node* maker_of(const Graph& graph, ValueId id, size_t& index) {
  for (index = 0; index < graph.nodes().size(); ++index) {
    bool is_maker = false;
    for_each_result(graph.nodes()[index], [&](ValueId result) { is_maker |= result == id; });
    if (is_maker) return &graph.nodes()[index];
  }
  return nullptr;
}

[[noreturn]] void raise_kept(const Recording& recording, const KeptTensor& kept) {
  const std::vector<std::string> hints = {"return it from the function, and keep it outside",
                                          "copy_ it into a tensor that lives longer than the call"};
  const std::string text = recording.graph.value(kept.value).meta.to_string();
  if (kept.argument >= 0) {
    throw CaptureError({CaptureErrorKind::unsupported,
                        "",
                        "",
                        c10::str("argument ", kept.argument, ", ", text,
                                 ", is kept by the surroundings of the function (a variable, a list, a gradient); a "
                                 "replay would not put the next one there"),
                        {"keep it outside, where the function is called", hints[1]}});
  }
  size_t index = 0;
  const Node* maker = maker_of(recording.graph, kept.value, index);
  const std::string op = maker != nullptr ? c10::toString(maker->op.operator_name()) : "";
  throw CaptureError(
      {CaptureErrorKind::unsupported, op, maker != nullptr ? line_of(recording.graph, index) : "",
       c10::str("the tensor ", text, " that ", op.empty() ? "the function" : op,
                " makes is kept by the surroundings of the function (a variable, a list, a gradient that "
                "was set by hand); a replay would not put a new one there"),
       hints});
}

}  // namespace

size_t num_handles(const WeakTensor& tensor) {
  const size_t count = tensor.num_handles();
  return count == 0 ? 0 : count - size_t(is_held_by_autograd(*tensor.address()));
}

HandleCounts::HandleCounts(const Recording& recording) {
  const std::unordered_set<const c10::TensorImpl*> gradients = gradients_of_leaves(recording);
  for (const OuterTensor& outer : recording.outer_tensors) {
    if (gradients.count(outer.tensor.address()) != 0) continue;
    const size_t count = outer.is_of_surroundings() ? count_handles(outer.tensor) : 0;
    if (count > 0) tensors_.push_back({outer.tensor, {count}});
  }
  for (const WeakGenerator& generator : recording.generators) {
    const size_t count = count_handles(generator);
    if (count > 0) generators_.push_back({generator, {count}});
  }
}

template <class Weak>
void HandleCounts::Counted<Weak>::add(const std::vector<Counted>& more) {
  for (const Counted& other : more) {
    if (address_of(other.object) != address_of(object)) continue;
    counts.append(other.counts.begin(), other.counts.end());
    if (counts.size() > kMostCounts) counts.resize(kMostCounts);
  }
}

template <class Weak>
bool HandleCounts::Counted<Weak>::holds() const {
  const size_t count = count_handles(object);
  return count == 0 || std::find(counts.begin(), counts.end(), count) != counts.end();
}

void HandleCounts::add(const HandleCounts& other) {
  for (auto& counted : tensors_) counted.add(other.tensors_);
  for (auto& counted : generators_) counted.add(other.generators_);
}

bool HandleCounts::hold() const {
  const auto holds = [](const auto& counted) { return counted.holds(); };
  return std::all_of(tensors_.begin(), tensors_.end(), holds) &&
         std::all_of(generators_.begin(), generators_.end(), holds);
}

std::string HandleCounts::why_not() const {
  const auto text = [](const std::string& what, const auto& counted) {
    return c10::str(what, " had ", counted.counts.front(), " handles and has ", count_handles(counted.object));
  };
  for (const auto& counted : tensors_) {
    if (counted.holds()) continue;
    const std::string name = "the tensor " + meta_of(counted.object.lock()).to_string();
    return text(name, counted);
  }
  for (const auto& counted : generators_) {
    if (!counted.holds()) return text("a generator", counted);
  }
  return "";
}

bool KeptTensor::is_kept() const {
  return num_handles(tensor) > explained || (tensors_explained && storage.use_count() > *tensors_explained);
}

// Ranks that are threads may be given one tensor, and each takes handles of it.
ArgumentHandles::ArgumentHandles(const std::vector<at::Tensor>& arguments) {
  if (detail::live_groups_of_thread()) return;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].defined()) continue;
    arguments_.push_back({arguments[i], 0, i});
    if (dtensor_meta(arguments[i]) != nullptr) arguments_.push_back({part_of(arguments[i]), 0, i});
  }
  for (Argument& argument : arguments_) argument.handles = num_handles(argument.tensor);
}

std::vector<KeptTensor> ArgumentHandles::kept_now(const Recorder& recorder,
                                                  const std::vector<at::Tensor>& results) const {
  std::vector<KeptTensor> kept;
  if (has_gradient_with_history(recorder)) return kept;
  const bool with_dtensors = has_met_dtensors();
  const Holders holders = holders_of(recorder, results);
  for (const Argument& argument : arguments_) {
    KeptTensor held{.tensor = argument.tensor, .value = recorder.input(argument.number)};
    held.argument = int(argument.number);
    held.explained = argument.handles + holders.handles_of(argument.tensor);
    if (held.value != kNoValue && !with_dtensors && held.is_kept()) kept.push_back(std::move(held));
  }
  std::unordered_set<int32_t> skipped = recorder.storages_handed_out();
  if (with_dtensors) skipped.merge(storages_with_views(recorder));
  for (const MadeTensor& made : recorder.made()) {
    if (skipped.count(recorder.value(made.value).storage) != 0) continue;
    KeptTensor held{made.tensor, made.storage, made.value, -1, holders.handles_of(made.tensor)};
    held.tensors_explained = holders.tensors_in(made.storage._unsafe_get_target());
    if (held.is_kept()) kept.push_back(std::move(held));
  }
  return kept;
}

void refuse_kept(const Recording& recording) {
  const auto begin = std::chrono::steady_clock::now();
  for (const KeptTensor& kept : recording.kept) {
    while (kept.is_kept()) {
      if (std::chrono::steady_clock::now() - begin >= time_to_let_go(recording, kept)) raise_kept(recording, kept);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

}  // namespace serried::graph
