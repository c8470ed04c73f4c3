// Compares arguments before and after a call, and sees backward leave the function through one of them.
#include "serried/graph/record/argument_watch.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

using GradNode = torch::autograd::Node;
using torch::autograd::variable_list;

[[noreturn]] void refuse(const std::string& what, std::vector<std::string> hints) {
  throw CaptureError({CaptureErrorKind::unsupported, "", "", what, std::move(hints)});
}

std::string name_of(size_t i, const at::Tensor& t) {
  return c10::str("argument ", i, ", ", meta_of(t).to_string());
}

struct NotePassage : torch::autograd::FunctionPostHook {
  explicit NotePassage(std::shared_ptr<bool> flag) : was_passed(std::move(flag)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    *was_passed = true;
    return outputs;
  }
  std::shared_ptr<bool> was_passed;
};

void check_constants(const std::vector<std::string>& before, const std::vector<std::string>& now) {
  for (size_t i = 0; i < std::min(before.size(), now.size()); ++i) {
    if (before[i] == now[i]) continue;
    refuse(c10::str("the function changes argument value ", i, " from ", before[i], " to ", now[i],
                    "; a replay would leave it as it is"),
           {"return the new value", "keep it in a tensor, and change that by an op"});
  }
}

}  // namespace

/// The node that made an argument, watched while alive.
class ArgumentWatch::History {
 public:
  explicit History(c10::intrusive_ptr<GradNode> node) : node_(std::move(node)) {
    hook_ = node_->add_post_hook(std::make_unique<NotePassage>(was_passed_));
  }
  ~History() { node_->del_post_hook(hook_); }
  History(const History&) = delete;
  History& operator=(const History&) = delete;

  bool was_passed() const { return *was_passed_; }

 private:
  c10::intrusive_ptr<GradNode> node_;
  std::shared_ptr<bool> was_passed_ = std::make_shared<bool>(false);
  uintptr_t hook_ = 0;
};

ArgumentWatch::Before::Before(const at::Tensor& t)
    : tensor(t),
      place(t.defined() ? place_of(t) : Place()),
      requires_grad(t.defined() && t.requires_grad()),
      made_by(history_of(t)),
      history(t.defined() && !t.is_leaf() ? std::make_shared<History>(t.grad_fn()) : nullptr) {}

ArgumentWatch::ArgumentWatch(const FlatValues& arguments) : constants_(arguments.constants) {
  for (const at::Tensor& t : arguments.tensors) tensors_.emplace_back(t);
}

ArgumentWatch::~ArgumentWatch() = default;

bool ArgumentWatch::Before::has_same_history() const {
  return tensor.requires_grad() == requires_grad && has_history(tensor, made_by);
}

void ArgumentWatch::check(const Recorder& recorder, const FlatValues& now) const {
  check_constants(constants_, now.constants);
  for (size_t i = 0; i < std::min(tensors_.size(), now.tensors.size()); ++i) {
    const Before& before = tensors_[i];
    const at::Tensor& t = before.tensor;
    if (!now.tensors[i].is_same(t)) {
      refuse(c10::str("the function puts another tensor in the place of ",
                      t.defined() ? name_of(i, t) : c10::str("argument ", i, ", which was undefined"),
                      " (x = ..., reset(), swap); a replay would leave the caller's variable as it is"),
             {"return the new tensor", "copy_ into the old one"});
    }
    if (!t.defined()) continue;
    if (!before.place.holds(t) && !recorder.is_as_ops_left(part_of(t))) {
      refuse("the function gives " + name_of(i, t) + " other memory without an op (set_data); a replay would not",
             {"copy_ into it", "return the new tensor"});
    }
    if (before.history && before.history->was_passed()) {
      refuse(name_of(i, t) +
                 ", has a history outside of the function, and backward goes on there; the next argument may come "
                 "with another one",
             {"pass x.detach().requires_grad_(), and give its gradient to x.backward(...) outside",
              "make x inside of the captured function"});
    }
    if (before.has_same_history()) continue;
    refuse("the function changes whether " + name_of(i, t) +
               ", requires gradients, or its history (requires_grad_, detach_, an in-place op with a tensor that "
               "requires gradients); a replay would not",
           {"use x.detach() or x.detach().requires_grad_() inside", "write into x under torch::NoGradGuard"});
  }
}

}  // namespace serried::graph
