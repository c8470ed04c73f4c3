// One call of an op on windows of an image that is cut along its space: who computes which rows and reads which.
#pragma once

#include <functional>
#include <optional>

#include "serried/spmd/plan.h"
#include "serried/tensor/dispatch/arguments.h"
#include "serried/tensor/redistribute/borders.h"

namespace serried::detail {

/// Space, the last dims of a tensor, on both sides of an op, and what lies between: rows(d, outputs) are the rows that
/// these outputs of dim d read. They may reach outside of the input: padding.
struct Space {
  Sizes inputs;
  Sizes outputs;
  std::function<Span(size_t dim, const Span& outputs)> rows;

  size_t ndim() const { return inputs.size(); }
};

/// Whether the image of `call`, its input or else the gradient of its result, is cut along its last `space_ndim` dims
/// over several ranks. All that other calls pay.
bool is_cut_in_space(const OpCall& call, size_t space_ndim);

/// Results stay cut as the image is, in equal parts of their own rows. Along other axes the call goes by its rule.
/// Arguments "self", "input" lie as inputs do, "grad_output" and "indices" as outputs; others are whole in space, and
/// gradients of them are pending sums.
class ImageCut {
 public:
  /// Which ways the call will go.
  struct Exchanges {
    bool fetch = true;
    bool give_back = false;
    bool at_any_cost = false;  // where the rule gives something else
  };
  /// None where the rule alone costs less, or the cut is none that goes by spans of rows; decided by what all ranks
  /// know.
  static std::optional<ImageCut> of(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Space space,
                                    Exchanges exchanges);

  /// This rank's part of an argument, brought where the call needs it; undefined where it is absent. All ranks call it.
  at::Tensor local(const char* argument) const;

  bool is_cut(size_t dim) const { return parts_[dim].is_cut; }
  /// Of dim `dim` of space: what this rank computes, reads and holds; of a dim that is whole all of it.
  const Span& outputs(size_t dim) const { return parts_[dim].outputs; }
  const Span& rows(size_t dim) const { return parts_[dim].rows; }
  const Space& space() const { return space_; }

  const BorderExchange& borders() const { return *borders_; }

  /// `sizes` with this rank's outputs in space.
  Sizes output_sizes(c10::IntArrayRef sizes) const;

  /// Result `index` of the op.
  at::Tensor wrap(size_t index, const at::Tensor& local) const;

 private:
  struct Part {
    bool is_cut = false;
    Span outputs, rows;
  };
  enum class Side : uint8_t { input, output, neither };

  ImageCut() = default;
  bool find_axes(const OpCall& call);
  bool plan_other_axes(const OpCall& call);
  void divide_space();
  int64_t bytes_moved(int64_t places) const;
  bool costs_less(const OpCall& call, Exchanges exchanges) const;
  Placements overlaid(Placements others, const Placement& no_space, Side side) const;
  Side side_of(int argument) const;

  SpecPtr leader_;  // of the image
  Space space_;
  const c10::FunctionSchema* schema_ = nullptr;
  std::vector<TensorSlot> slots_;
  std::vector<Placements> current_;
  std::vector<Placements> targets_;    // per slot
  std::vector<Placements> results_;    // per result
  std::vector<c10::DimVector> sizes_;  // per result; -1: as the local one says
  std::vector<bool> cuts_space_;       // per mesh axis
  double cost_ = 0;                    // of the rule on the other axes
  std::vector<Part> parts_;            // per dim of space
  std::optional<BorderExchange> borders_;
};

}  // namespace serried::detail
