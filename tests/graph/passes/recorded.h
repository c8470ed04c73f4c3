// Graphs for tests of passes: what a function does, recorded twice, and how it runs again.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "serried/graph/passes/passes.h"
#include "serried/graph/record/compare.h"
#include "serried/graph/record/recorder.h"
#include "serried/graph/replay/program.h"
#include "serried/graph/text/text.h"
#include "tests/support/close.h"

namespace serried::testing {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

struct Recorded {
  graph::Graph graph;
  std::vector<Group> groups;
};

inline graph::Recording record_once(const Function& fn, const Tensors& inputs) {
  graph::Recorder recorder(inputs);
  Tensors outputs;
  {
    const tape::Scope scope(recorder);
    outputs = fn(inputs);
  }
  for (const at::Tensor& t : outputs) recorder.graph().outputs().push_back(recorder.find(t));
  return recorder.take();
}

/// The graph of `fn`, without passes. Runs `fn` twice.
inline Recorded record(const Function& fn, const Tensors& inputs) {
  const graph::Recording first = record_once(fn, inputs);
  graph::Recording second = record_once(fn, inputs);
  graph::make_replayable(first, second);
  return {second.graph, second.groups};
}

inline Recorded with(const Recorded& recorded, const std::vector<Pass>& passes) {
  Recorded changed = recorded;
  for (const Pass& pass : passes) pass.run(changed.graph);
  return changed;
}

/// The nodes alone; groups are called "g".
inline std::string code_of(const Recorded& recorded) {
  static const std::regex group_name("group=\"[^\"]*\"");
  std::string text;
  for (size_t i = 0; i < recorded.graph.nodes().size(); ++i) text += line_of(recorded.graph, i) + "\n";
  return std::regex_replace(text, group_name, "group=\"g\"");
}

inline Tensors rerun(graph::Program& program, const Recorded& recorded, const Tensors& inputs) {
  program.run(inputs);
  Tensors outputs;
  for (graph::ValueId id : recorded.graph.outputs()) outputs.push_back(program.value(id));
  program.clear();
  return outputs;
}

/// Replays with other inputs than those recorded give what the function gives, and go on doing so.
inline void expect_same_results(const Function& fn, const Recorded& changed, const Tensors& inputs) {
  graph::Program program(changed.graph, changed.groups);
  for (int round = 0; round < 3; ++round) {
    Tensors others;
    for (const at::Tensor& t : inputs) others.push_back(t * (0.5 + round));
    const Tensors expected = fn(others), got = rerun(program, changed, others);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], expected[i], "result " + std::to_string(i));
  }
}

}  // namespace serried::testing
