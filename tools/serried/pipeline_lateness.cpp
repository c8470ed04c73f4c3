// How late each action was, and the worst of them.
#include "tools/serried/pipeline_lateness.h"

#include <algorithm>
#include <cstdio>

#include "tools/serried/pipeline_text.h"

namespace serried::tools {
namespace {

std::string micros(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

}  // namespace

std::vector<LateAction> late_actions(const PipelineTrace& trace, const PipelineSimulation& simulation) {
  std::vector<LateAction> actions;
  for (size_t rank = 0; rank < trace.spans.size(); ++rank) {
    double late_before = 0;
    for (size_t i = 0; i < trace.spans[rank].size(); ++i) {
      const auto [begin, end] = trace.spans[rank][i];
      LateAction one{rank, trace.table.rows()[rank][i], end - begin, begin, simulation.spans[rank][i].begin};
      one.lost = one.late() - late_before;
      late_before = one.late();
      actions.push_back(one);
    }
  }
  return actions;
}

std::string lateness_list(const PipelineTrace& trace, const PipelineSimulation& simulation, size_t most) {
  std::vector<LateAction> actions = late_actions(trace, simulation);
  std::stable_sort(actions.begin(), actions.end(),
                   [](const LateAction& a, const LateAction& b) { return a.lost > b.lost; });
  actions.resize(std::min(actions.size(), most));
  TextTable lines = {{"rank", "action", "took us", "began", "simulated", "late", "lost here"}};
  for (const LateAction& one : actions) {
    lines.push_back({std::to_string(one.rank), to_cell(one.action), micros(one.took), micros(one.begin),
                     micros(one.simulated_begin), micros(one.late()), micros(one.lost)});
  }
  return aligned(lines);
}

std::string lateness_line(const PipelineSimulation& measured, const PipelineSimulation& simulation) {
  char ratio[32];
  std::snprintf(ratio, sizeof ratio, "%.3f", simulation.makespan > 0 ? measured.makespan / simulation.makespan : 1.0);
  return "step " + micros(measured.makespan) + " us, simulated with the times its actions took " +
         micros(simulation.makespan) + " us: " + ratio + " of it";
}

}  // namespace serried::tools
