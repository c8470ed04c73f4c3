// Options of `serried top`.
#include "tools/serried/top_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string_view>
#include <thread>

#include "serried/launch/error.h"
#include "tools/serried/top/error.h"
#include "tools/serried/top/jobs.h"
#include "tools/serried/top/snapshot.h"
#include "tools/serried/top/table.h"
#include "tools/serried/top/terminal.h"

namespace serried::tools {
namespace {

using top::Job;
using top::Proc;
using top::Snapshot;
using top::Terminal;
using Seconds = std::chrono::duration<double>;
using Clock = std::chrono::steady_clock;

constexpr const char* kExamples =
    "Examples:\n"
    "  serried top                 the only job of this user on this host\n"
    "  serried top 3f2a            the one whose id begins so; or the number of one of its processes\n"
    "  serried top --once          one table, for scripts; --json for programs\n"
    "\n"
    "q or Ctrl-C ends it. It only reads: ranks are not asked, stopped or slowed down, and it works where they hang.\n"
    "Only the user who runs the job, and root, can look. Each host shows its own ranks.\n";

// A window that nobody cuts: files and pipes take lines of any length.
constexpr size_t kWide = 200;

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Whether stdout is a terminal that knows escape sequences.
bool can_draw() {
  const std::string_view kind = variable("TERM");
  return ::isatty(STDOUT_FILENO) == 1 && !kind.empty() && kind != "dumb";
}

bool takes_colours() {
  return can_draw() && variable("NO_COLOR").empty();
}

Clock::time_point after(Seconds interval) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(interval);
}

std::string ended_text(const Job& job) {
  return "job " + job.id + " has ended\n";
}

// Two looks, an interval apart: one alone knows no rates.
Snapshot look_twice(Proc& proc, const Job& job, Seconds interval) {
  const Snapshot first = top::look(proc, job, nullptr);
  if (first.job.has_ended) return first;
  std::this_thread::sleep_for(interval);
  return top::look(proc, first.job, &first);
}

int show_once(Proc& proc, const Job& job, Seconds interval, bool as_json) {
  const Snapshot snapshot = look_twice(proc, job, interval);
  if (as_json) {
    std::cout << top::json_of(snapshot) << "\n";
  } else if (snapshot.job.has_ended) {
    std::cout << ended_text(job);
  } else {
    const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
    const size_t width = is_terminal ? top::window_size(STDOUT_FILENO).width : kWide;
    for (const std::string& line : top::table_of(snapshot, {width, 0, takes_colours()})) {
      std::cout << line << "\n";
    }
  }
  std::cout.flush();
  return std::cout ? 0 : launch::kExitFailure;
}

int show_live(Proc& proc, const Job& job, Seconds interval) {
  Snapshot last;
  {
    Terminal terminal;
    bool is_first = true;
    Clock::time_point next = Clock::now();
    for (auto event = Terminal::Event::timeout; event != Terminal::Event::quit; event = terminal.wait(next)) {
      if (event == Terminal::Event::gone) return launch::kExitFailure;
      if (event == Terminal::Event::timeout) {
        last = top::look(proc, is_first ? job : last.job, is_first ? nullptr : &last);
        if (last.job.has_ended) break;
        next = after(is_first ? std::min(interval, Seconds(0.3)) : interval);  // rates soon
        is_first = false;
      }
      const top::WindowSize window = top::window_size(STDOUT_FILENO);
      if (!terminal.draw(top::table_of(last, {window.width, window.height, takes_colours()}))) {
        return launch::kExitFailure;
      }
    }
  }
  if (last.job.has_ended) std::cout << ended_text(job);
  return 0;
}

}  // namespace

TopCommand::TopCommand(CLI::App& app)
    : command_(app.add_subcommand(kName, "Watch a running job: what each rank does, and for whom it waits.")) {
  CLI::App& command = *command_;
  command.footer(kExamples);
  command.add_option("job", job_, "The beginning of its id, or the number of one of its processes");
  command.add_flag("--once", once_,
                   "Print one table after an interval and end; so it does where stdout is no terminal");
  command.add_flag("--json", json_, "The same as JSON");
  command.add_option("--interval", interval_, "Seconds between two looks")
      ->check([](const std::string& text) {
        const double seconds = std::strtod(text.c_str(), nullptr);
        return seconds >= 0.1 && seconds <= 3600 ? "" : "takes 0.1 to 3600 seconds, not " + text;  // nor nan
      })
      ->capture_default_str();
}

bool TopCommand::chosen() const {
  return command_->parsed();
}

int TopCommand::execute() {
  try {
    Proc proc;
    const Job job = top::choose_job(proc, job_);
    if (once_ || json_ || !can_draw()) return show_once(proc, job, Seconds(interval_), json_);
    return show_live(proc, job, Seconds(interval_));
  } catch (const top::TopError& error) {
    std::cerr << error.what() << "\n";
    return launch::kExitFailure;
  }
}

}  // namespace serried::tools
