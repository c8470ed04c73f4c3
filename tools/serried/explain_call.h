// The words of `serried explain` as a call.
#pragma once

#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "serried/mesh/placement.h"
#include "serried/tensor/dispatch/explain.h"

namespace serried::tools {

struct ExplainWords {
  std::string op;
  std::vector<std::string> placements;  // one text per tensor: "S0 R"
  std::string mesh = "2";               // "dp=2,tp=2" or "2x2"
  std::string shapes;                   // "8x16,16x4"; "": 64 in each of two dims, or as many as cut
  std::string dtype = "f32";            // of all, or one per tensor: "f32,i64"; the last counts for the rest
  std::vector<std::string> arguments;   // "dim=1"
};

/// ValueError that names the word it does not understand.
MeshAxes parse_mesh(const std::string& text);
std::vector<Sizes> parse_shapes(const std::string& text);
c10::ScalarType parse_dtype(const std::string& text);
/// "dim=1" as the schema wants it: ints, floats, bools, lists "[0,1]", "none", else text.
c10::IValue parse_argument(const c10::FunctionSchema& schema, const std::string& name, const std::string& text);

/// What to print.
std::string explain_words(const ExplainWords& words);

}  // namespace serried::tools
