// `serried plan`: what a training step costs each rank of a mesh of any size, without ranks.
#include <CLI/CLI.hpp>

#include <fstream>
#include <iostream>

#include "serried/base/columns.h"
#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/graph/text/serialize.h"
#include "serried/graph/text/view.h"
#include "tools/serried/plan_gpt.h"
#include "tools/serried/plan_options.h"
#include "tools/serried/plan_pipeline.h"
#include "tools/serried/plan_simulate.h"
#include "tools/serried/progress_option.h"
#include "tools/serried/usage.h"

namespace {

using serried::tools::Plan;
using serried::tools::PlanMemory;
using serried::tools::PlanWords;
using serried::tools::Progress;

constexpr const char* kExamples =
    "Examples:\n"
    "  serried plan --ranks 4096\n"
    "  serried plan --dp 2 --tp 2                    data parallel over 2 copies, each cut over 2 ranks\n"
    "  serried plan --fsdp 4                         every parameter cut over 4 ranks\n"
    "  serried plan --dp 2 --fsdp 8 --tp 4 --layers 12 --width 768 --heads 12 --html step.html\n"
    "\n"
    "serried plan --pipeline zbv --stages 8 --microbatches 16 prints the timetable of a pipeline instead, and takes\n"
    "other options: serried plan --pipeline --help.\n"
    "serried plan --simulate machine.json --ranks 8..4096 says how long the step takes on such machines, and takes\n"
    "more options: serried plan --simulate --help.\n";

void write(const std::string& path, const std::string& content) {
  if (path.empty()) return;
  std::ofstream out(path);
  out << content;
  out.close();
  if (!out) serried::raise<c10::ValueError>({"plan", "cannot write " + path, "give a file in a folder that exists"});
}

Plan plan_with_progress(const PlanWords& words, Progress::Mode mode) {
  Progress progress("planning", serried::tools::kPlanStages, mode);
  return serried::tools::make_plan(words, [&](int64_t done, std::string_view next) { progress.at(done, next); });
}

std::string memory_table(const PlanMemory& memory) {
  using serried::detail::bytes_text;
  std::vector<serried::detail::TextRow> rows = {{"  parameters", bytes_text(memory.parameters)},
                                                {"  gradients", bytes_text(memory.gradients)},
                                                {"  AdamW", bytes_text(memory.optimizer)}};
  if (memory.gathered > 0) rows.push_back({"  gathered blocks, at most", bytes_text(memory.gathered)});
  if (memory.whole_gradients > 0) {
    rows.push_back({"  gradients of blocks, at most", bytes_text(memory.whole_gradients)});
  }
  rows.push_back({"  all", bytes_text(memory.sum())});
  return "memory beside activations\n" + serried::detail::columns(rows);
}

void print(const PlanWords& words, const Plan& plan) {
  std::cout << "One training step of a GPT of " << plan.num_parameters << " parameters (" << words.layers
            << " layers, width " << words.width << ", " << words.heads << " heads), " << words.batch << " sequences of "
            << words.context << " letters per data-parallel rank\n"
            << "on " << plan.mesh << ", captured here as rank 0; all numbers are per rank.\n\n"
            << memory_table(plan.memory) << "\n"
            << plan.report.to_string();
}

}  // namespace

int main(int argc, char** argv) {
  if (serried::tools::asks_for_pipeline(argc, argv)) return serried::tools::plan_pipeline(argc, argv);
  if (serried::tools::asks_for_simulation(argc, argv)) return serried::tools::plan_simulation(argc, argv);
  CLI::App app(
      "Captures a training step of the demo GPT as one of many ranks, on this machine alone, and says what it "
      "costs each rank: bytes per collective, memory, ops.",
      "serried plan");
  PlanWords words;
  std::string graph_file, html_file, saved_file, progress_word;
  bool shows_modules = false;
  app.add_option("--ranks", words.ranks, "Ranks in all; default: as many as --dp, --fsdp and --tp make, or 8");
  serried::tools::add_model_options(app, words);
  app.add_flag("--modules", shows_modules, "Also how parameters lie, and what each module sends");
  app.add_option("--graph", graph_file, "File for the graph as text");
  app.add_option("--save", saved_file, "File for the graph, for serried plan --simulate --step");
  app.add_option("--html", html_file, "File for the graph as a page");
  serried::tools::add_progress_option(app, progress_word);
  app.footer(kExamples);
  try {
    app.parse(argc, argv);
    const Plan plan = plan_with_progress(words, *Progress::mode_of(progress_word));
    print(words, plan);
    if (shows_modules) std::cout << "\n" << plan.modules.text();
    write(graph_file, plan.graph.to_string());
    if (!saved_file.empty()) serried::graph::save(plan.graph, saved_file);
    write(html_file, serried::graph::to_html(plan.graph));
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "[plan] " << serried::tools::usage_text(app, error)
              << "\n  fix: serried plan --help lists the options\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  }
  return 2;
}
