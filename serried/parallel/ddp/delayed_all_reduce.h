// Gradients of chosen parameters, averaged as one when the gradient of another parameter is there.
#pragma once

#include <memory>
#include <vector>

#include "serried/parallel/ddp/bucket.h"
#include "serried/parallel/ddp/claim.h"
#include "serried/parallel/ddp/forward_passes.h"
#include "serried/parallel/ddp/gradient_hooks.h"
#include "serried/parallel/ddp/options.h"

namespace serried::detail {

/// Takes the delayed parameters out of `parameters`. ValueError for a name that is not among them, for parameters
/// without a trigger or a trigger without parameters, and for several dtypes or sparse gradients.
struct DelayedParameters {
  std::vector<ManagedParameter> parameters;
  ManagedParameter trigger;
};
DelayedParameters take_delayed(std::vector<ManagedParameter>& parameters, const DelayedAllReduce& options);

class DelayedReducer : public std::enable_shared_from_this<DelayedReducer> {
 public:
  DelayedReducer(DelayedParameters delayed, Group group, std::shared_ptr<Claim> claim);
  DelayedReducer(const DelayedReducer&) = delete;

  /// Apart from construction because hooks hold a weak pointer to this.
  void install_hooks();
  void remove_hooks();

  /// As those of Reducer.
  void follow_accumulators();
  void follow_memory();

  /// After each forward: its backward comes through `outputs`, or out of another part of `pass`.
  void follow(const std::vector<at::Tensor>& outputs, ForwardPasses::PassPtr pass);

  /// Drops a reduction that did not end, with its gradients.
  void reset();
  void set_group(Group group);

  const std::vector<ManagedParameter>& parameters() const { return delayed_.parameters; }

 private:
  void enter(bool synchronise);
  void on_gradient(size_t index);
  void on_trigger();
  void launch();
  void gather();
  void end(bool completed);

  const DelayedParameters delayed_;
  Group group_;
  Bucket bucket_;
  GradientHooks hooks_;
  ForwardPasses passes_;
  std::shared_ptr<Claim> claim_;  // null: hooks are removed
  bool active_ = false;           // inside a backward that averages
};

}  // namespace serried::detail
