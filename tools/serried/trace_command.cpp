// Merging on a terminal: a line of progress where it takes long, then the summary.
#include "tools/serried/trace_command.h"

#include <CLI/CLI.hpp>

#include <filesystem>
#include <iostream>

#include "serried/base/text.h"
#include "serried/launch/error.h"
#include "tools/serried/progress_option.h"

namespace serried::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kExamples =
    "Examples:\n"
    "  SERRIED_TRACE=traces serried run -n 4 ./train\n"
    "  serried trace merge traces                        writes traces/trace.json\n"
    "  serried trace merge host0/ host1/ -o all.json     of ranks on two hosts\n"
    "\n"
    "Open the result at https://ui.perfetto.dev or chrome://tracing. Each rank is a process; collectives are on "
    "tracks\n"
    "of their group, with an arrow from the rank that came last to the others.\n"
    "\n"
    "What is printed, for each rank: the time in forward, backward and optimizer without waiting; the time with a\n"
    "collective under way, the part of it that was hidden behind other work, and the time the program could only "
    "wait;\n"
    "the bytes it gave to collectives.\n";

}  // namespace

TraceCommand::TraceCommand(CLI::App& app)
    : command_(app.add_subcommand(kName, "Make one trace of those that ranks have written.")),
      merge_(command_->add_subcommand("merge", "Join the traces of all ranks of a job, and say where the time went.")) {
  command_->require_subcommand(0, 1);
  command_->footer("serried trace merge --help says more.");
  merge_->footer(kExamples);
  merge_->add_option("DIR", inputs_, "The folder that SERRIED_TRACE named; several, or files, are fine")
      ->required()
      ->type_name("");
  merge_->add_option("-o,--output", output_, "The file to write; default: trace.json in the first folder")
      ->type_name("FILE");
  add_progress_option(*merge_, progress_);
}

bool TraceCommand::chosen() const {
  return command_->parsed();
}

std::string TraceCommand::output() const {
  if (!output_.empty()) return output_;
  const fs::path first = inputs_.front();
  std::error_code error;
  return (fs::is_directory(first, error) ? first : first.parent_path()) / "trace.json";
}

int TraceCommand::execute() const {
  if (!merge_->parsed()) {
    std::cout << command_->help("serried");
    return 0;
  }
  try {
    const trace::MergeReport report = merge();
    for (const std::string& remark : report.remarks) std::cerr << "[trace] " << remark << "\n";
    std::cout << trace::to_text(report.summary) << "\nwritten: " << detail::printable(output())
              << "   open it at https://ui.perfetto.dev\n";
    return 0;
  } catch (const trace::TraceError& error) {
    std::cerr << "[trace] " << error.what() << "\n  fix: " << error.fix() << "\n";
    return launch::kExitFailure;
  }
}

trace::MergeReport TraceCommand::merge() const {
  constexpr int64_t kWhole = 100;
  Progress progress("merging", kWhole, *Progress::mode_of(progress_));
  return trace::merge_traces(
      {.inputs = inputs_, .output = output(), .on_progress = [&](const std::string& what, double share) {
         progress.at(int64_t(double(kWhole) * share), what);
       }});
}

}  // namespace serried::tools
