// What ops and strategies tell the CommDebugModes of their thread.
#pragma once

#include <c10/core/TensorImpl.h>

#include <string>
#include <vector>

#include "serried/tensor/spec.h"

namespace serried::comm_debug {

/// `op` sends an input from `from` to `to`; cheap where there is no mode.
void note_redistribution(const std::string& op, const Spec& from, const Placements& to, bool implicit);

/// `op` takes the replicate default.
void note_default(const std::string& op);

/// Whether a mode of this thread wants to know whose parameters are communicated for.
bool follows_modules();

/// While alive, what this thread communicates is for the parameters that `each` names, not for the op that runs: those
/// of a block, of a bucket. `each` is called only where a mode asks.
///     const comm_debug::OnBehalf scope([&](auto add) { for (auto& p : parameters) add(p.unsafeGetTensorImpl()); });
class OnBehalf {
 public:
  template <class Each>
  explicit OnBehalf(const Each& each) : is_told_(follows_modules()) {
    if (!is_told_) return;
    std::vector<const c10::TensorImpl*> parameters;
    each([&](const c10::TensorImpl* parameter) { parameters.push_back(parameter); });
    begin(parameters);
  }
  ~OnBehalf() {
    if (is_told_) end();
  }
  OnBehalf(const OnBehalf&) = delete;
  OnBehalf& operator=(const OnBehalf&) = delete;

 private:
  static void begin(const std::vector<const c10::TensorImpl*>& parameters);
  static void end();

  const bool is_told_;
};

}  // namespace serried::comm_debug
