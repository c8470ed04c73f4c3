// Words to sizes, sizes to a table, and the table to wherever it is wanted.
#include "tools/serried/plan_pipeline.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>

#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/parallel/pipeline/schedule.h"
#include "serried/parallel/pipeline/trace.h"
#include "tools/serried/pipeline_lateness.h"
#include "tools/serried/pipeline_page.h"
#include "tools/serried/pipeline_svg.h"
#include "tools/serried/pipeline_text.h"
#include "tools/serried/usage.h"

namespace serried::tools {
namespace {

constexpr const char* kPipelineExamples =
    "Examples:\n"
    "  serried plan --pipeline zbv --stages 8 --microbatches 16\n"
    "  serried plan --pipeline interleaved --ranks 4 --stages 12 --microbatches 8 --html steps.html\n"
    "  serried plan --pipeline own.csv --svg own.svg\n"
    "  serried plan --pipeline trace.csv --html step.html      a step as it ran, from PipelineTrace::to_csv()\n"
    "\n"
    "A forward takes 1, a backward 2, each of its parts 1. Cells are stage, kind and micro-batch: 3F0 is the forward\n"
    "of micro-batch 0 in stage 3; B is a backward, I and W its two parts: gradients of inputs and of weights.\n";

constexpr size_t kTextWidth = 100;
constexpr size_t kFewBlocks = 12;

struct PipelineWords {
  std::string pipeline;  // a schedule's name, or a file
  std::optional<int64_t> stages = {};
  std::optional<int64_t> ranks = {};
  int64_t microbatches = 8;
  bool full = false;
  std::string svg_file, html_file, csv_file;
};

struct NamedTable {
  PipelineTable table;
  std::string name;
  std::optional<PipelineTrace> trace = {};  // of a file that has one
};

[[noreturn]] void refuse_words(const std::string& what, const std::string& fix) {
  raise<c10::ValueError>({"plan", what, fix});
}

bool is_csv_file(const std::string& word) {
  return word.ends_with(".csv");
}

void check_number(const std::optional<int64_t>& number, const std::string& option) {
  constexpr int64_t kMost = 1'000'000;
  if (!number || (*number >= 1 && *number <= kMost)) return;
  refuse_words(option + " is " + std::to_string(*number), "pass 1 to " + std::to_string(kMost));
}

// What the words leave out follows from the rest.
TableOptions sizes_of(const PipelineWords& words, Schedule schedule) {
  if (!words.stages && !words.ranks) refuse_words("no size is given", "pass --stages, --ranks or both");
  check_number(words.stages, "--stages");
  check_number(words.ranks, "--ranks");
  check_number(words.microbatches, "--microbatches");
  const std::optional<int64_t> fixed = stages_per_rank_of(schedule);
  const int64_t usual = fixed.value_or(2);
  if (!words.stages) return {*words.ranks, usual, words.microbatches};
  const int64_t stages = *words.stages;
  const int64_t ranks = words.ranks.value_or(stages / usual);
  const bool fits = ranks > 0 && stages % ranks == 0 && (!fixed || stages == *fixed * ranks) &&
                    (words.ranks || stages == usual * ranks);
  if (fits) return {ranks, stages / ranks, words.microbatches};
  const std::string other = words.ranks ? " --ranks " + std::to_string(ranks) : "";
  const std::string each = fixed || !words.ranks ? std::to_string(usual) : "equally many";
  refuse_words("--stages " + std::to_string(stages) + " does not fit" + other + ": " + to_string(schedule) + " puts " +
                   each + " on each rank" + (fixed || words.ranks ? "" : ", unless --ranks is given"),
               "pass --stages " + std::to_string(words.ranks ? usual * ranks : stages + 1));
}

std::string read_table(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (in.is_open() && !in.bad()) return text;
  refuse_words("cannot read \"" + detail::printable(path) + "\": " + std::strerror(errno),
               "pass a table as CSV: a line per rank, cells such as 0F0");
}

std::string size_text(const PipelineTable& table) {
  const auto count = [](int64_t number, const std::string& of_what) {
    return std::to_string(number) + " " + of_what + (number == 1 ? "" : of_what.ends_with("h") ? "es" : "s");
  };
  return count(table.ranks(), "rank") + ", " + count(table.stages(), "stage") + ", " +
         count(table.microbatches(), "micro-batch");
}

NamedTable table_of(const PipelineWords& words, bool has_sizes) {
  if (!is_csv_file(words.pipeline)) {
    const Schedule schedule = parse_schedule(words.pipeline);
    return {pipeline_table(schedule, sizes_of(words, schedule)), to_string(schedule)};
  }
  if (has_sizes)
    refuse_words("a table from a file has its sizes in it", "leave out --stages, --ranks and --microbatches");
  const std::string text = read_table(words.pipeline), name = detail::printable(words.pipeline);
  if (!is_pipeline_trace(text)) return {PipelineTable::from_csv(text), name};
  const PipelineTrace trace = PipelineTrace::from_csv(text);
  return {trace.table, name, trace};
}

void write_picture(const std::string& path, const std::string& content) {
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  out << content;
  out.close();
  if (out) return;
  refuse_words("cannot write \"" + detail::printable(path) + "\": " + std::strerror(errno),
               "pass a path in a folder that exists and is writable");
}

void check_drawable(const PipelineTable& table) {
  constexpr size_t kMostDrawn = 200'000;
  size_t count = 0;
  for (const PipelineTable::Row& row : table.rows()) count += row.size();
  if (count <= kMostDrawn) return;
  refuse_words(std::to_string(count) + " actions are too many for a timetable",
               "pass smaller sizes: at most " + std::to_string(kMostDrawn) + " actions can be shown");
}

void show_table(const PipelineWords& words, const PipelineTable& table, const std::string& title) {
  const PipelineSimulation simulation = simulate(table);
  if (!words.svg_file.empty()) write_picture(words.svg_file, pipeline_svg(table, simulation, title));
  if (!words.html_file.empty()) write_picture(words.html_file, pipeline_page(table, simulation, title));
  std::cout << title << "\n\n"
            << timetable(table, simulation, kTextWidth, words.full ? SIZE_MAX : kFewBlocks) << "\n"
            << rank_list(table, simulation) << "\nmakespan " << short_number(simulation.makespan) << ", bubble "
            << percent(simulation.bubble) << "\n";
}

void show_trace(const PipelineWords& words, const PipelineTrace& trace, const std::string& title) {
  const PipelineSimulation measured = trace.measured();
  const PipelineSimulation simulated = simulate(trace.table, trace.costs());
  if (!words.svg_file.empty()) write_picture(words.svg_file, pipeline_svg(trace.table, measured, title + ", in us"));
  if (!words.html_file.empty()) write_picture(words.html_file, pipeline_page(trace, title));
  std::cout << title << ", in us\n\n"
            << rank_list(trace.table, measured) << "\n"
            << lateness_list(trace, simulated) << "\n"
            << lateness_line(measured, simulated) << "; bubble " << percent(measured.bubble) << ", simulated "
            << percent(simulated.bubble) << "\n";
}

void show(const PipelineWords& words, const NamedTable& named) {
  check_drawable(named.table);
  const std::string title = named.name + ": " + size_text(named.table);
  if (!words.csv_file.empty()) write_picture(words.csv_file, named.table.to_csv());
  if (named.trace)
    show_trace(words, *named.trace, title);
  else
    show_table(words, named.table, title);
}

// Before anything is parsed: behind --pipeline it would be the name of a schedule.
bool asks_for_help(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](std::string_view word) { return word == "-h" || word == "--help"; });
}

}  // namespace

bool asks_for_pipeline(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc,
                     [](std::string_view word) { return word == "--pipeline" || word.starts_with("--pipeline="); });
}

int plan_pipeline(int argc, char** argv) {
  CLI::App app("Prints and draws the timetable of a pipeline schedule: who computes what when, and where ranks wait.",
               "serried plan");
  PipelineWords words;
  app.add_option("--pipeline", words.pipeline,
                 "GPipe, 1F1B, Interleaved, LoopedBFS, InterleavedZeroBubble, ZBV or DualPipeV, or a file that ends in "
                 ".csv: a table of your own, or a step as it ran")
      ->type_name("NAME")
      ->required();
  std::vector<CLI::Option*> sizes = {
      app.add_option("--stages", words.stages,
                     "Parts of the model; default: 1 per rank, or 2 where several are possible"),
      app.add_option("--ranks", words.ranks, "Default: as many as the stages need"),
      app.add_option("--microbatches", words.microbatches, "Parts of a batch")->capture_default_str()};
  app.add_flag("--full", words.full, "The whole timetable, however long");
  app.add_option("--svg", words.svg_file, "File for the picture")->type_name("FILE");
  app.add_option("--html", words.html_file, "File for the picture on a page with its numbers")->type_name("FILE");
  app.add_option("--csv", words.csv_file, "File for the table")->type_name("FILE");
  app.footer(kPipelineExamples);
  if (asks_for_help(argc, argv)) {
    std::cout << app.help();
    return 0;
  }
  try {
    app.parse(argc, argv);
    const auto is_given = [](const CLI::Option* option) { return option->count() > 0; };
    show(words, table_of(words, std::any_of(sizes.begin(), sizes.end(), is_given)));
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "[plan] " << usage_text(app, error) << "\n  fix: serried plan --pipeline --help lists the options\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  }
  return 2;
}

}  // namespace serried::tools
