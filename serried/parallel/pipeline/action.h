// What a rank of a pipeline does at one moment: one kind of work on one stage and micro-batch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace serried {

/// One cell of a PipelineTable.
struct PipelineAction {
  enum class Kind : uint8_t {
    F,        // forward
    B,        // backward, all of it
    I,        // the first part of a backward: gradients of the stage's inputs, which the stage before waits for
    W,        // its second part: gradients of the weights, for which nobody waits
    unshard,  // the stage's parameters are gathered
    reshard,  // and given up again
    reduce,   // the stage's gradients are reduced over data-parallel ranks
  };
  Kind kind = Kind::F;
  int64_t stage = 0;
  int64_t microbatch = 0;  // of F, B, I and W; 0 of the others, which are a stage's

  bool operator==(const PipelineAction&) const = default;
};

/// Whether actions of this kind are of one micro-batch: F, B, I and W are.
bool has_microbatch(PipelineAction::Kind kind);

/// "B s2 m0", "unshard s2": as errors say it.
std::string to_string(const PipelineAction& action);

/// "2B0", "2UNSHARD", "2RESHARD", "2REDUCE_GRAD": as tables say it, PyTorch's included.
std::string to_cell(const PipelineAction& action);

/// The action that a cell names; none if it names none.
std::optional<PipelineAction> parse_cell(std::string_view cell);

}  // namespace serried
