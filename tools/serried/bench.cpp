// `serried bench`: measures this machine for `serried plan --simulate`.
#include <CLI/CLI.hpp>

#include <unistd.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "serried/base/columns.h"
#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/comm/groups/group.h"
#include "tools/serried/calibrate.h"
#include "tools/serried/check.h"
#include "tools/serried/simulate/error.h"
#include "tools/serried/usage.h"

namespace {

using serried::simulation::Fitted;
using serried::simulation::Machine;

constexpr const char* kExamples =
    "Examples:\n"
    "  serried bench --calibrate -o machine.json          the ranks of this host, and nothing of links\n"
    "\n"
    "On several hosts, started on each of them, with the same words:\n"
    "  serried run --nnodes 2 --rendezvous host:29500 -n 4 serried bench --calibrate -o machine.json\n"
    "Rank 0 writes the file.\n"
    "With --check machine.json in place of --calibrate the same ranks measure collectives and steps of other sizes\n"
    "beside what the simulation says of them; every host has the file.\n";

struct BenchWords {
  bool calibrates = false;
  std::string checked;  // machine
  int ranks = 0;
  int rounds = 25;
  std::string output = "machine.json";
};

[[noreturn]] void refuse(const std::string& what, const std::string& fix) {
  serried::raise<c10::ValueError>({"bench", what, fix});
}

bool is_launched() {
  return std::getenv("WORLD_SIZE") != nullptr;
}

// By itself it is one process: the launcher starts it again, as many times as there are ranks.
[[noreturn]] void launch(const BenchWords& words, char** argv) {
  namespace fs = std::filesystem;
  const fs::path self = fs::read_symlink("/proc/self/exe");
  fs::path launcher = self.parent_path() / "serried";
  if (!fs::exists(launcher)) launcher = self.parent_path().parent_path().parent_path() / "bin" / "serried";
  const int cores = int(std::max(1u, std::thread::hardware_concurrency()));
  const std::string ranks = std::to_string(words.ranks > 0 ? words.ranks : std::min(cores, 8));
  std::vector<const char*> command = {launcher.c_str(), "run", "-n", ranks.c_str(), self.c_str()};
  for (char** word = argv + 1; *word != nullptr; ++word) command.push_back(*word);
  command.push_back(nullptr);
  ::execv(launcher.c_str(), const_cast<char**>(command.data()));
  refuse("cannot start " + launcher.string() + ": " + std::strerror(errno),
         "start it by hand: serried run -n " + ranks + " serried bench --calibrate");
}

int64_t ranks_per_host(int64_t ranks) {
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  const int64_t local = text != nullptr ? std::atoll(text) : ranks;
  if (local >= 1 && ranks % local == 0) return local;
  refuse(c10::str(ranks, " ranks are not ", local, " on each host"), "start equally many ranks on every host");
}

Machine checked_machine(const BenchWords& words, int64_t ranks) {
  const Machine machine = serried::simulation::read_machine(words.checked);
  const int64_t local = ranks_per_host(ranks);
  if (machine.ranks_per_host == local) return machine;
  refuse(c10::str("the machine has ", machine.ranks_per_host, " ranks on a host, and ", local, " are started"),
         c10::str("start it with -n ", machine.ranks_per_host));
}

std::string text_of(const Fitted& number) {
  char text[96];
  std::snprintf(text, sizeof text, "%.4g (%.4g to %.4g)", number.value, number.low, number.high);
  return text;
}

std::string table_of(const Machine& machine, bool has_link) {
  std::vector<serried::detail::TextRow> rows = {{"memory", "alpha us", text_of(machine.memory.alpha_us)},
                                                {"", "beta ns/byte", text_of(machine.memory.beta_ns_per_byte)},
                                                {"", "gamma ns/byte", text_of(machine.memory.gamma_ns_per_byte)},
                                                {"compute", "op us", text_of(machine.compute->op_us)},
                                                {"", "ns/flop", text_of(machine.compute->ns_per_flop)},
                                                {"", "ns/byte", text_of(machine.compute->ns_per_byte)}};
  if (has_link) {
    rows.push_back({"link", "alpha us", text_of(machine.nic_out.alpha_us)});
    rows.push_back({"", "beta ns/byte", text_of(machine.nic_out.beta_ns_per_byte)});
  }
  return serried::detail::columns(rows);
}

void write(const BenchWords& words, const Machine& machine) {
  errno = 0;
  std::ofstream out(words.output, std::ios::binary);
  out << to_json(machine);
  out.close();
  if (out) {
    std::cerr << "written to " << serried::detail::printable(words.output) << "\n";
    return;
  }
  refuse("cannot write \"" + serried::detail::printable(words.output) + "\": " + std::strerror(errno),
         "pass a path in a folder that exists and is writable");
}

void show_check(const serried::Group& world, const Machine& machine, int rounds) {
  const std::vector<serried::tools::CheckRow> rows = serried::tools::check(world, machine, rounds);
  if (world->getRank() != 0) return;
  std::vector<serried::detail::TextRow> table = {{"", "measured us", "simulated us", "ratio"}};
  for (const serried::tools::CheckRow& row : rows) {
    char measured[32], simulated[32], ratio[32];
    std::snprintf(measured, sizeof measured, "%.0f", row.measured_us);
    std::snprintf(simulated, sizeof simulated, "%.0f", row.simulated_us);
    std::snprintf(ratio, sizeof ratio, "%.2f", row.ratio());
    table.push_back({row.what, measured, simulated, ratio});
  }
  std::cout << serried::detail::columns(table);
}

void run(const BenchWords& words) {
  at::set_num_threads(1);
  const serried::Group world = serried::new_group();
  if (!words.checked.empty()) return show_check(world, checked_machine(words, world->getSize()), words.rounds);
  const int64_t local = ranks_per_host(world->getSize());
  const bool has_link = local < world->getSize();
  const Machine machine = serried::tools::calibrate(world, {.ranks_per_host = local, .rounds = words.rounds});
  if (world->getRank() != 0) return;
  std::cerr << world->getSize() / local << " host" << (has_link ? "s" : "") << " of " << local
            << " ranks; medians, and where nine of ten fits lie\n"
            << table_of(machine, has_link);
  if (!has_link) {
    std::cerr
        << "there is one host, so that nothing is known of links: nic_out and nic_in are 0\n"
           "  fix: start it on several hosts, serried bench --help says how, or write their numbers into the file\n";
  }
  write(words, machine);
}

int parsed(const CLI::App& app, const BenchWords& words, char** argv) {
  if (words.calibrates == !words.checked.empty()) {
    refuse(words.calibrates ? "--calibrate and --check are two things" : "there is nothing to do",
           "pass --calibrate, or --check with a machine");
  }
  if (words.ranks < 0 || words.rounds < 3) {
    refuse(words.ranks < 0 ? c10::str("-n is ", words.ranks) : c10::str("--rounds is ", words.rounds),
           words.ranks < 0 ? "pass 1 or more" : "pass 3 or more");
  }
  if (!is_launched()) launch(words, argv);
  if (app.count("-n") > 0 && std::to_string(words.ranks) != std::getenv("LOCAL_WORLD_SIZE")) {
    refuse(c10::str("-n is ", words.ranks, ", and the launcher has started other ranks"), "leave out -n here");
  }
  run(words);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Measures this machine, or several, for serried plan --simulate.", "serried bench");
  BenchWords words;
  app.add_flag("--calibrate", words.calibrates, "Measure delays, bytes, sums and ops, with intervals");
  app.add_option("--check", words.checked, "Measure collectives and steps beside what is simulated on this machine")
      ->type_name("FILE");
  app.add_option("-n,--ranks", words.ranks, "Ranks of this host; default: one per core, up to 8");
  app.add_option("--rounds", words.rounds, "How often each size is measured")->capture_default_str();
  app.add_option("-o,--output", words.output, "File for the machine")->type_name("FILE")->capture_default_str();
  app.footer(kExamples);
  try {
    app.parse(argc, argv);
    return parsed(app, words, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "[bench] " << serried::tools::usage_text(app, error)
              << "\n  fix: serried bench --help lists the options\n";
  } catch (const serried::simulation::SimulationError& error) {
    std::cerr << "[bench] " << error.what() << "\n  fix: " << error.fix() << "\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  }
  return 2;
}
