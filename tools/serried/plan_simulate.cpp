// Words to jobs, jobs to tables.
#include "tools/serried/plan_simulate.h"

#include <CLI/CLI.hpp>

#include <ATen/Parallel.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iostream>
#include <thread>

#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/graph/text/report.h"
#include "serried/graph/text/serialize.h"
#include "tools/serried/graph_job.h"
#include "tools/serried/plan_gpt.h"
#include "tools/serried/plan_options.h"
#include "tools/serried/progress_option.h"
#include "tools/serried/saved_step.h"
#include "tools/serried/simulate/report.h"
#include "tools/serried/usage.h"

namespace serried::tools {
namespace {

using simulation::Outcome;
using simulation::SimulationError;

constexpr const char* kSimulateExamples =
    "Examples:\n"
    "  serried plan --simulate example --ranks 8..16384\n"
    "  serried plan --simulate machine.json --ranks 64,96,128 --fsdp 8 --trace step.json\n"
    "\n"
    "The machine is JSON: ranks per host, and what bytes take in memory, out of a host, into it and through uplinks;\n"
    "docs/simulation.md has one with all keys.\n";

constexpr int kTimedReplays = 7;
constexpr size_t kMostSizes = 64;

struct SimulateWords {
  std::string machine_file, trace_file, progress;
  std::string ranks = "8";
  std::string order;            // of sums
  std::string step_file, mesh;  // of a step that was saved
  std::vector<std::string> groups;
  PlanWords model;
};

[[noreturn]] void refuse(const std::string& what, const std::string& fix) {
  raise<c10::ValueError>({"plan", what, fix});
}

int64_t number_in(std::string_view text, const std::string& all) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number >= 1) return number;
  refuse("--ranks is \"" + detail::printable(all) + "\"", "pass 64, or 8..4096 for 8, 16, 32 and so on, or 48,64,96");
}

// "8", "8..64" doubles, "8,24".
std::vector<int64_t> sizes_in(const std::string& text) {
  std::vector<int64_t> sizes;
  const size_t dots = text.find("..");
  if (dots != std::string::npos) {
    const int64_t least = number_in(std::string_view(text).substr(0, dots), text);
    const int64_t most = number_in(std::string_view(text).substr(dots + 2), text);
    if (least > most) refuse("--ranks is \"" + detail::printable(text) + "\"", "pass the smaller number first");
    for (int64_t size = least; size <= most; size *= 2) {
      sizes.push_back(size);
      if (size > most / 2) break;
    }
    return sizes;
  }
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    sizes.push_back(number_in(std::string_view(text).substr(begin, end - begin), text));
    begin = end + 1;
  }
  if (sizes.size() > kMostSizes) refuse(c10::str(sizes.size(), " sizes are too many"), "pass up to 64");
  return sizes;
}

int64_t dp_of(const std::vector<simulation::Axis>& axes) {
  return axes.front().name == "dp" ? axes.front().size : 1;
}

// What a rank does is the same for any number of copies above one: two are enough to capture it.
PlanWords captured_words(const PlanWords& words, const std::vector<simulation::Axis>& axes) {
  PlanWords small = words;
  small.dp = std::min<int64_t>(2, dp_of(axes));
  small.ranks = std::nullopt;
  return small;
}

simulation::Order order_of(const std::string& word) {
  if (word.empty()) return simulation::Order::automatic;
  return word == "ranks" ? simulation::Order::ranks : simulation::Order::hosts;
}

simulation::Machine machine_of(const std::string& word) {
  return word == "example" ? simulation::example_machine() : simulation::read_machine(word);
}

class Simulator {
 public:
  Simulator(const SimulateWords& words, const simulation::Machine& machine)
      : words_(words), machine_(machine), sizes_(sizes_in(words.ranks)) {}

  void run() {
    if (!words_.step_file.empty()) load();
    std::vector<std::vector<simulation::Axis>> meshes;
    for (const int64_t size : sizes_) meshes.push_back(mesh_of(size));
    for (const auto& mesh : meshes) simulation::check({.machine = machine_, .axes = mesh, .programs = {{}}});
    Progress progress("simulating", int64_t(sizes_.size()), *Progress::mode_of(words_.progress));
    for (size_t i = 0; i < sizes_.size(); ++i) {
      progress.at(int64_t(i), std::to_string(sizes_[i]) + " ranks");
      outcomes_.push_back(outcome_on(meshes[i]));
    }
  }

  void print() const {
    std::cout << "One training step of " << what() << ",\nsimulated on " << detail::printable(words_.machine_file)
              << ": " << machine_.ranks_per_host << " ranks per host; what is computed is "
              << (machine_.compute ? "as the machine says" : "as measured here") << ".\n\n"
              << simulation::step_table(outcomes_) << "\non " << sizes_.back() << " ranks:\n"
              << simulation::call_table(outcomes_.back()) << "\n"
              << simulation::not_modelled(machine_);
  }

  void write_trace() const {
    if (words_.trace_file.empty()) return;
    errno = 0;
    std::ofstream out(words_.trace_file, std::ios::binary);
    out << simulation::chrome_trace(outcomes_.back());
    out.close();
    if (out) return;
    refuse("cannot write \"" + detail::printable(words_.trace_file) + "\": " + std::strerror(errno),
           "pass a path in a folder that exists and is writable");
  }

 private:
  struct Step {
    graph::Graph graph;
    std::optional<double> step_us;
    int64_t peak_bytes;
  };

  std::string what() const {
    if (mesh_) return detail::printable(words_.step_file);
    const PlanWords& model = words_.model;
    return c10::str("a GPT of ", num_parameters_, " parameters (", model.layers, " layers, width ", model.width, ", ",
                    model.heads, " heads), ", model.batch, " sequences of ", model.context,
                    " letters per data-parallel rank");
  }

  std::vector<simulation::Axis> mesh_of(int64_t size) const {
    if (mesh_) return mesh_->on(size);
    PlanWords words = words_.model;
    words.ranks = size;
    std::vector<simulation::Axis> axes;
    for (const PlanAxis& axis : mesh_axes(words)) axes.push_back({axis.name, axis.size});
    return axes;
  }

  void load() {
    if (words_.mesh.empty()) refuse("--step needs a mesh", "pass --mesh dp=*,tp=2, with the axes that groups are");
    if (!machine_.compute) {
      refuse("the machine says nothing of computing, and a step from a file cannot be measured here",
             "give the machine \"compute\"; serried bench --calibrate measures it");
    }
    mesh_.emplace(words_.mesh);
    graph::Graph graph = graph::load(words_.step_file);
    name_groups(graph, groups_of(words_.groups, *mesh_), *mesh_);
    const int64_t peak = peak_of(graph::report(graph));
    alone_.reset(new Step{std::move(graph), std::nullopt, peak});
  }

  static int64_t peak_of(const graph::GraphReport& report) {
    return report.persistent_bytes + report.constant_bytes + report.input_bytes + report.arena_bytes +
           report.peak_bytes;
  }

  Outcome outcome_on(const std::vector<simulation::Axis>& mesh) {
    const Step& step = step_for(mesh);
    Outcome outcome{.job = {.machine = machine_, .axes = mesh, .programs = {}}, .peak_bytes = step.peak_bytes};
    outcome.job.programs = {
        program_of(step.graph, outcome.job.axes,
                   {.compute = machine_.compute, .step_us = step.step_us, .order = order_of(words_.order)})};
    outcome.simulation = simulation::simulate(outcome.job);
    return outcome;
  }

  const Step& step_for(const std::vector<simulation::Axis>& mesh) {
    if (mesh_) return *alone_;
    std::unique_ptr<Step>& step = dp_of(mesh) > 1 ? with_copies_ : alone_;
    if (step) return *step;
    PlanWords words = captured_words(words_.model, mesh);
    words.num_timed = machine_.compute ? 0 : kTimedReplays;
    Plan plan = make_plan(words, [](int64_t, std::string_view) {});
    num_parameters_ = plan.num_parameters;
    const int64_t peak = peak_of(plan.report);
    step.reset(new Step{std::move(plan.graph), plan.replay_us, peak});
    return *step;
  }

  const SimulateWords& words_;
  const simulation::Machine& machine_;
  const std::vector<int64_t> sizes_;
  std::optional<MeshPattern> mesh_ = {};       // of a step that was saved, which is then alone_
  std::unique_ptr<Step> alone_, with_copies_;  // a step of one copy of the model, and of several
  std::vector<Outcome> outcomes_;
  int64_t num_parameters_ = 0;
};

void use_cores_of_a_rank(const simulation::Machine& machine) {
  const int64_t cores = std::min<int64_t>(machine.cores(), std::max(1u, std::thread::hardware_concurrency()));
  at::set_num_threads(int(std::max<int64_t>(1, cores / machine.ranks_per_host)));
}

void simulate_words(const SimulateWords& words) {
  const simulation::Machine machine = machine_of(words.machine_file);
  use_cores_of_a_rank(machine);
  Simulator simulator(words, machine);
  simulator.run();
  simulator.print();
  simulator.write_trace();
}

void add_options(CLI::App& app, SimulateWords& words) {
  app.add_option("--simulate", words.machine_file, "The machine, as JSON; or the word example")
      ->type_name("FILE")
      ->required();
  app.add_option("--ranks", words.ranks, "Ranks in all: 64, or 8..16384 for 8, 16, 32 and so on, or 48,64,96")
      ->type_name("RANKS")
      ->capture_default_str();
  add_model_options(app, words.model);
  app.add_option("--step", words.step_file, "In place of the GPT, a step that serried::graph::save has written")
      ->type_name("FILE");
  app.add_option("--mesh", words.mesh, "Of --step: its axes, of which one may follow from --ranks: dp=*,tp=2");
  app.add_option("--group", words.groups, "Of --step: which axis a group is, as often as there are groups: default=dp")
      ->type_name("NAME=AXIS");
  app.add_option("--order", words.order,
                 "In which sums are made: ranks, the bits of one host, or hosts; default: ranks on two hosts, hosts on "
                 "more")
      ->check(CLI::IsMember({"ranks", "hosts"}));
  app.add_option("--trace", words.trace_file, "File for the step of rank 0 as a trace, on the last of the sizes")
      ->type_name("FILE");
  add_progress_option(app, words.progress);
  app.footer(kSimulateExamples);
}

}  // namespace

bool asks_for_simulation(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc,
                     [](std::string_view word) { return word == "--simulate" || word.starts_with("--simulate="); });
}

int plan_simulation(int argc, char** argv) {
  CLI::App app(
      "Says how long a training step of the demo GPT takes on many hosts, by simulating it: collectives by the steps "
      "that they run, computing as the machine says or as measured here.",
      "serried plan");
  SimulateWords words;
  add_options(app, words);
  if (std::any_of(argv + 1, argv + argc, [](std::string_view word) { return word == "-h" || word == "--help"; })) {
    std::cout << app.help();
    return 0;
  }
  try {
    app.parse(argc, argv);
    simulate_words(words);
    return 0;
  } catch (const CLI::ParseError& error) {
    std::cerr << "[plan] " << usage_text(app, error) << "\n  fix: serried plan --simulate --help lists the options\n";
  } catch (const SimulationError& error) {
    std::cerr << "[plan] " << error.what() << "\n  fix: " << error.fix() << "\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  }
  return 2;
}

}  // namespace serried::tools
