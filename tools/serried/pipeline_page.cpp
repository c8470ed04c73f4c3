// The page around the picture.
#include "tools/serried/pipeline_page.h"

#include "serried/base/text.h"
#include "tools/serried/pipeline_lateness.h"
#include "tools/serried/pipeline_svg.h"
#include "tools/serried/pipeline_text.h"

namespace serried::tools {
namespace {

constexpr const char* kPageStyle = R"(
:root{color-scheme:light dark}
body{margin:0;padding:16px;background:#ffffff;color:#1f2328;font:14px/1.45 ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.scroll{overflow-x:auto;margin-bottom:14px;border:1px solid #d1d9e0;border-radius:6px}
svg{display:block}
table{border-collapse:collapse;margin:20px 0} td,th{padding:3px 14px;text-align:right;border-bottom:1px solid #d1d9e0}
pre{overflow-x:auto;padding:10px;border:1px solid #d1d9e0;border-radius:6px}
@media (prefers-color-scheme:dark){
body{background:#0d1117;color:#e6edf3} .scroll,td,th,pre{border-color:#30363d}}
)";

// Everything of other micro-batches fades while one is pointed at.
constexpr const char* kScript = R"(
const rule = document.head.appendChild(document.createElement("style"));
document.querySelectorAll("svg.pipeline").forEach(picture => picture.addEventListener("pointerover", event => {
  const action = event.target.closest("[data-m]");
  rule.textContent = action ? `svg.pipeline [data-m]:not([data-m="${action.dataset.m}"]) { opacity: 0.25 }` : "";
}));
)";

std::string ranks_table(const PipelineTable& table, const PipelineSimulation& simulation) {
  std::string text =
      "<table><tr><th>rank</th><th>stages</th><th>works</th><th>waits</th><th>most in flight</th></tr>\n";
  for (size_t rank = 0; rank < table.rows().size(); ++rank) {
    std::string stages;
    for (int64_t stage : table.stages_of(int64_t(rank))) stages += (stages.empty() ? "" : ", ") + std::to_string(stage);
    const double busy = busy_time(simulation, rank);
    text += "<tr><td>" + std::to_string(rank) + "</td><td>" + stages + "</td><td>" + short_number(busy) + "</td><td>" +
            short_number(simulation.makespan - busy) + "</td><td>" + std::to_string(simulation.peak_in_flight[rank]) +
            "</td></tr>\n";
  }
  return text + "</table>\n";
}

std::string lateness_table(const PipelineTrace& trace, const PipelineSimulation& simulation) {
  std::string text =
      "<table><tr><th>rank</th><th>action</th><th>took</th><th>began</th><th>simulated</th><th>late</th>"
      "<th>lost here</th></tr>\n";
  for (const LateAction& one : late_actions(trace, simulation)) {
    text += "<tr><td>" + std::to_string(one.rank) + "</td><td>" + to_cell(one.action) + "</td>";
    for (double time : {one.took, one.begin, one.simulated_begin, one.late(), one.lost})
      text += "<td>" + short_number(time) + "</td>";
    text += "</tr>\n";
  }
  return text + "</table>\n";
}

std::string scrolled(const std::string& picture) {
  return "<div class=\"scroll\">\n" + picture + "</div>\n";
}

// `content` between the head and the table of the pipeline.
std::string page(const PipelineTable& table, const std::string& title, const std::string& content) {
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width\">\n<title>" +
         detail::escaped(title) + "</title>\n<style>" + kPageStyle + "</style>\n</head>\n<body>\n" + content +
         "<details><summary>The table as CSV</summary>\n<pre>" + detail::escaped(table.to_csv()) +
         "</pre></details>\n<script>" + kScript + "</script>\n</body>\n</html>\n";
}

}  // namespace

std::string pipeline_page(const PipelineTable& table, const PipelineSimulation& simulation, const std::string& title) {
  return page(table, title, scrolled(pipeline_svg(table, simulation, title)) + ranks_table(table, simulation));
}

std::string pipeline_page(const PipelineTrace& trace, const std::string& title) {
  const PipelineSimulation measured = trace.measured();
  const PipelineSimulation simulated = simulate(trace.table, trace.costs());
  return page(trace.table, title,
              scrolled(pipeline_svg(trace.table, measured, title + ", in us, as it ran")) +
                  scrolled(pipeline_svg(trace.table, simulated, title + ", in us, simulated", &measured)) + "<p>" +
                  lateness_line(measured, simulated) + "; bubble " + percent(measured.bubble) + ", simulated " +
                  percent(simulated.bubble) + "</p>\n" + ranks_table(trace.table, measured) +
                  "<details open><summary>How late every action began</summary>\n<p>All times in microseconds. Late: "
                  "began so much after its simulated beginning. Lost here: so much more than the action before it on "
                  "the rank; less than 0: caught up.</p>\n" +
                  lateness_table(trace, simulated) + "</details>\n");
}

}  // namespace serried::tools
