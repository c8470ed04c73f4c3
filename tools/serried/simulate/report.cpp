// Tables, and JSON.
#include "tools/serried/simulate/report.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>

#include "serried/base/columns.h"
#include "serried/base/text.h"

namespace serried::simulation {
namespace {

using serried::detail::bytes_text;
using serried::detail::TextRow;

std::string share_text(Time part, Time whole) {
  char text[16];
  std::snprintf(text, sizeof text, "%.0f %%", whole == 0 ? 0 : 100 * double(part) / double(whole));
  return text;
}

}  // namespace

std::string time_text(Time time) {
  struct Unit {
    const char* name;
    double us;
  };
  const double us = to_us(time);
  const Unit unit = us < 1e3 ? Unit{"us", 1} : us < 1e6 ? Unit{"ms", 1e3} : Unit{"s", 1e6};
  const double number = us / unit.us;
  char text[48];
  std::snprintf(text, sizeof text, "%.*f %s", number < 10 ? 2 : number < 100 ? 1 : 0, number, unit.name);
  return text;
}

std::string mesh_text(const std::vector<Axis>& axes) {
  std::string text = "mesh";
  for (const Axis& axis : axes) text += " " + axis.name + "=" + std::to_string(axis.size);
  return text;
}

std::string step_table(const std::vector<Outcome>& outcomes) {
  const bool jitters = std::any_of(outcomes.begin(), outcomes.end(),
                                   [](const Outcome& outcome) { return outcome.job.machine.jitter_sigma > 0; });
  std::vector<TextRow> rows = {{"ranks", "mesh", "hosts", "step", "compute", "exposed", "", "memory"}};
  if (jitters) rows[0].push_back("with jitter");
  for (const Outcome& outcome : outcomes) {
    const Job& job = outcome.job;
    const Simulation& simulation = outcome.simulation;
    const int64_t per_host = job.machine.ranks_per_host;
    rows.push_back({std::to_string(job.num_ranks()), mesh_text(job.axes).substr(5),
                    std::to_string((job.num_ranks() + per_host - 1) / per_host), time_text(simulation.step),
                    time_text(simulation.compute), time_text(simulation.exposed()),
                    share_text(simulation.exposed(), simulation.step), bytes_text(outcome.peak_bytes)});
    if (jitters) rows.back().push_back(time_text(simulation.step + jitter_of(job, simulation)));
  }
  return serried::detail::columns(rows);
}

std::string call_table(const Outcome& outcome) {
  std::vector<TextRow> rows = {{"collective", "axis", "calls", "bytes", "alone", "each", "waited for"}};
  std::vector<CallUse> uses = outcome.simulation.calls;
  std::stable_sort(uses.begin(), uses.end(), [](const CallUse& a, const CallUse& b) { return a.taken > b.taken; });
  for (const CallUse& use : uses) {
    rows.push_back({name_of(use.call.call.kind), outcome.job.axes[use.call.axis].name, std::to_string(use.count),
                    bytes_text(use.call.call.bytes), time_text(use.alone), time_text(use.taken / use.count),
                    time_text(use.waited)});
  }
  return rows.size() == 1 ? "no collectives\n" : serried::detail::columns(rows);
}

std::string not_modelled(const Machine& machine) {
  std::string text = "not modelled: switches, incast, NUMA; what communication takes of cores and computing of memory";
  if (!machine.uplink) text += "; all hosts are as if on one switch without limits";
  if (machine.nic_out.message_us.value == 0) text += "; messages cost nothing but their bytes and one delay per step";
  return text + "\n";
}

std::string chrome_trace(const Outcome& outcome) {
  using nlohmann::json;
  json events = json::array();
  std::vector<std::string> names = {"compute"};
  for (const Axis& axis : outcome.job.axes) names.push_back(axis.name);
  for (size_t row = 0; row < names.size(); ++row) {
    events.push_back(
        {{"ph", "M"}, {"pid", 0}, {"tid", row}, {"name", "thread_name"}, {"args", {{"name", names[row]}}}});
  }
  for (const Span& span : outcome.simulation.spans) {
    const auto row = std::find(names.begin(), names.end(), span.row) - names.begin();
    events.push_back({{"ph", "X"},
                      {"pid", 0},
                      {"tid", row},
                      {"name", span.name},
                      {"ts", to_us(span.begin)},
                      {"dur", to_us(span.end - span.begin)}});
  }
  return json{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n";
}

}  // namespace serried::simulation
