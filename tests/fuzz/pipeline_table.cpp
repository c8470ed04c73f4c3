// Tables and steps of pipelines: any text is read or refused, and what is read comes back the same and ends or names
// its cycle.
#include "tests/fuzz/target.h"

#include <c10/util/Exception.h>

#include <optional>

#include "serried/parallel/pipeline/trace.h"

namespace serried::fuzz {

void run_pipeline_trace(std::string_view bytes) {
  std::optional<PipelineTrace> trace;
  if (!succeeds<c10::ValueError>([&] { trace = PipelineTrace::from_csv(bytes); })) return;
  require(PipelineTrace::from_csv(trace->to_csv()).table == trace->table, "a step that does not come back");
  PipelineSimulation simulation;
  if (!succeeds<c10::ValueError>([&] { simulation = simulate(trace->table, trace->costs()); })) return;
  require(trace->measured().spans.size() == simulation.spans.size(), "a rank that is lost");
}

void run_pipeline_table(std::string_view bytes) {
  if (is_pipeline_trace(bytes)) return run_pipeline_trace(bytes);
  std::optional<PipelineTable> table;
  if (!succeeds<c10::ValueError>([&] { table = PipelineTable::from_csv(bytes); }) &&
      !succeeds<c10::ValueError>([&] { table = PipelineTable::from_text(bytes); })) {
    return;
  }
  require(PipelineTable::from_csv(table->to_csv()) == *table, "a table that does not come back from CSV");
  require(PipelineTable::from_text(table->to_text()) == *table, "a table that does not come back from text");
  PipelineSimulation simulation;
  if (!succeeds<c10::ValueError>([&] { simulation = simulate(*table); })) return;
  require(simulation.makespan > 0 && simulation.bubble >= 0 && simulation.bubble < 1, "times that cannot be");
}

}  // namespace serried::fuzz
