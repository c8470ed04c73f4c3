// Executes redistributions on local tensors: no gradients, no checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "serried/comm/collectives/collective.h"
#include "serried/spmd/redistribute.h"
#include "serried/tensor/spec.h"

namespace serried {

/// The steps between two specs of one mesh and the same sizes, kept once computed (per thread).
const std::vector<spmd::Step>& redistribution(const Spec& from, const Placements& to);

/// This rank's part after `steps`; `local` itself where there are none. All ranks of the axes involved call it.
/// The result is contiguous unless it is `local`.
at::Tensor run_steps(const at::Tensor& local, const Spec& from, const std::vector<spmd::Step>& steps);

/// Both at once.
at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to);

/// A redistribution that is started only. Collectives of a mesh run in the order of the calls, so all but the last have
/// happened; the last is on its way.
struct StartedRedistribution {
  at::Tensor arriving;                 // the last collective's result
  detail::WorkPtr work;                // to wait for; none where nothing is on its way
  std::function<at::Tensor()> finish;  // then: this rank's part, as the blocking form gives it
};
StartedRedistribution start_redistribution(const at::Tensor& local, const SpecPtr& from, const Placements& to);

/// From one mesh to another of the same root group, by chunk intersection; ranks of both meshes call it. Undefined
/// where this rank is not in `to`.
at::Tensor redistribute_across(const at::Tensor& local, const Spec& from, const DeviceMesh& mesh, const Placements& to);
StartedRedistribution start_redistribution_across(const at::Tensor& local, const Spec& from, const DeviceMesh& mesh,
                                                  const Placements& to);

/// The reduction's neutral element as a tensor like `t`: zeros for sum, the lowest value for max, ...
at::Tensor identity_like(const at::Tensor& t, ReduceKind kind);
/// Fills `t` with it.
void fill_identity_(const at::Tensor& t, ReduceKind kind);

namespace detail {

/// What one step leaves to do where it is started only.
struct StartedStep {
  WorkPtr work;
  std::function<void()> after;  // completes the result once the Work is done; may be empty
};

/// This rank's part after `step`, contiguous and never an alias of `local`. `owned`: nobody else sees `local`, so it
/// may be reduced in place. Where somebody wants to know what is left, a step that communicates is started only.
at::Tensor run_step(const at::Tensor& local, bool owned, const Spec& spec, const spmd::Step& step,
                    StartedStep* started = nullptr);

/// Now, or once what was started is there.
template <class Fn>
void run_after(StartedStep* started, Fn fn) {
  if (started == nullptr) return fn();
  started->after = std::move(fn);
}

inline WorkPtr* work_of(StartedStep* started) {
  return started == nullptr ? nullptr : &started->work;
}

}  // namespace detail

}  // namespace serried
