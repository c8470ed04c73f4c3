// Collecting from a living job, and the page of what was collected.
#include "tools/serried/debug_command.h"

#include <CLI/CLI.hpp>

#include <cstdlib>
#include <iostream>

#include "serried/base/text.h"
#include "serried/launch/dump.h"
#include "serried/launch/error.h"
#include "tools/serried/debug/collect.h"
#include "tools/serried/debug/page.h"
#include "tools/serried/top/error.h"

namespace serried::tools {
namespace {

constexpr const char* kDumpExamples =
    "Examples:\n"
    "  serried debug dump               the only job of this user on this host, into dump/<host>.json\n"
    "  serried debug dump 3f2a -o d     the job whose id begins so; or the number of one of its processes\n"
    "\n"
    "Writes the newest calls of each rank of this host, also of ranks that hang, are stopped or have died, and their\n"
    "stacks where eu-stack or gdb is there. Run it on each host, and put the files together.\n";

constexpr const char* kShowExamples =
    "Examples:\n"
    "  serried run -n 4 --log-dir logs ./train     on failure writes logs/dump/<host>.json\n"
    "  serried debug show logs/dump                what differs, who is missing, who is late\n";

int complain(const std::string& what, const std::string& fix) {
  std::cerr << "[debug] " << what << "\n  fix: " << fix << "\n";
  return launch::kExitFailure;
}

}  // namespace

DebugCommand::DebugCommand(CLI::App& app)
    : command_(app.add_subcommand(kName, "See what the ranks of a job did, while it hangs or after it failed.")),
      dump_(command_->add_subcommand("dump", "Write down what each rank of a running job does.")),
      show_(command_->add_subcommand("show", "Make one page of the dumps of all hosts.")) {
  command_->require_subcommand(0, 1);
  command_->footer("serried debug dump --help and serried debug show --help say more.");
  dump_->footer(kDumpExamples);
  dump_->add_option("job", job_, "The beginning of its id, or the number of one of its processes");
  dump_->add_option("-o,--output", output_, "The folder to write to")->type_name("DIR")->capture_default_str();
  dump_->add_option("--stacks-within", patience_, "Seconds that taking stacks may take; 0: none")
      ->check([](const std::string& text) {
        const double seconds = std::strtod(text.c_str(), nullptr);
        return seconds >= 0 && seconds <= 3600 ? "" : "takes 0 to 3600 seconds, not " + text;  // nor nan
      })
      ->capture_default_str();
  show_->footer(kShowExamples);
  show_->add_option("DIR", folder_, "The folder with the dumps")->required()->type_name("");
}

bool DebugCommand::chosen() const {
  return command_->parsed();
}

std::string DebugCommand::asked() const {
  return dump_->parsed() ? "debug dump" : show_->parsed() ? "debug show" : "debug";
}

int DebugCommand::execute() const {
  if (dump_->parsed()) return dump();
  if (show_->parsed()) return show();
  std::cout << command_->help("serried");
  return 0;
}

int DebugCommand::dump() const {
  try {
    top::Proc proc;
    const top::Job job = top::choose_job(proc, job_);
    const launch::HostSeen seen = debug::collect(proc, job, launch::Seconds(patience_));
    const std::string path = launch::write_dump(seen, output_, job.num_nodes);
    std::cout << "written: " << detail::printable(path) << "   serried debug show " << detail::printable(output_)
              << " reads it\n";
    return 0;
  } catch (const top::TopError& error) {
    std::cerr << error.what() << "\n";
    return launch::kExitFailure;
  } catch (const std::runtime_error& error) {
    return complain(error.what(), "pass a folder that you may write to: -o DIR");
  }
}

int DebugCommand::show() const {
  std::vector<std::string> problems;
  const std::vector<launch::HostSeen> dumps = launch::read_dumps(folder_, problems);
  for (std::string& problem : problems) problem = detail::printable(problem);
  if (dumps.empty()) {
    std::string what = "there is no dump in " + detail::printable(folder_);
    for (const std::string& problem : problems) what += "; " + problem;
    return complain(what, "name the folder that serried run --log-dir logs has made, logs/dump, or serried debug dump");
  }
  std::cout << debug::page_of(dumps, problems) << std::flush;
  return std::cout ? 0 : launch::kExitFailure;
}

}  // namespace serried::tools
