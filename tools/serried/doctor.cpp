// `serried doctor`: what works here, and why not.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "serried/base/env.h"
#include "serried/comm/groups/group.h"
#include "serried/comm/net/make_wire.h"
#include "tools/serried/probes.h"

namespace {

using serried::tools::Probe;

Probe probe_libtorch() {
  Dl_info info{};
  const bool found = ::dladdr(reinterpret_cast<const void*>(&at::get_num_threads), &info) != 0;
  const std::string path = found && info.dli_fname != nullptr ? info.dli_fname : "unknown path";
  return {"LibTorch", true, std::string(TORCH_VERSION) + ", " + path, true};
}

// Without either of these, no group of processes can be made.
Probe probe_transport(const std::vector<Probe>& backends) {
  std::string usable;
  for (const Probe& backend : backends) {
    const bool carries = backend.name == "shm" || backend.name == "gloo" || backend.name == "nccl";
    if (carries && backend.works) usable += (usable.empty() ? "" : ", ") + backend.name;
  }
  return {"groups of processes", !usable.empty(), usable.empty() ? "neither shm nor gloo works" : "through " + usable,
          true};
}

Probe probe_ucx() {
  const std::string why = serried::net::why_no_ucx();
  return {"ucx", why.empty(),
          why.empty() ? "carries messages between hosts" : "gloo carries messages between hosts: " + why};
}

std::vector<Probe> probe_backends() {
  std::vector<Probe> result;
  for (const std::string& name : serried::registered_backends()) {
    const std::string why = serried::why_backend_unavailable(name);
    result.push_back({name, why.empty(), why});
  }
  return result;
}

struct Report {
  std::vector<Probe> machine;
  std::vector<Probe> backends;

  bool healthy() const {
    for (const Probe& probe : machine) {
      if (probe.essential && !probe.works) return false;
    }
    return true;
  }
};

Report examine() {
  Report report{.machine = serried::tools::probe_machine(), .backends = probe_backends()};
  report.machine.insert(report.machine.begin(), probe_libtorch());
  report.machine.push_back(probe_transport(report.backends));
  report.machine.push_back(probe_ucx());
  return report;
}

void print_probes(const std::vector<Probe>& probes) {
  for (const Probe& probe : probes) {
    std::string name = probe.name;
    name.resize(std::max<size_t>(name.size(), 20), ' ');
    std::cout << "  " << (probe.works ? "yes  " : "no   ") << name << " " << probe.detail << "\n";
  }
}

/// The value of a variable as it may be shown: reports get pasted into issues.
std::optional<std::string> shown_value(const serried::env::Variable& variable) {
  const char* value = std::getenv(variable.name);
  if (value == nullptr) return std::nullopt;
  const bool secret = std::string_view(variable.name) == "SERRIED_JOB_SECRET" && *value != 0;
  return secret ? "(hidden)" : value;
}

void print_text(const Report& report) {
  std::cout << "This machine\n";
  print_probes(report.machine);
  std::cout << "\nBackends\n";
  print_probes(report.backends);
  std::cout << "\nEnvironment (* = set now)\n";
  for (const serried::env::Variable& variable : serried::env::table()) {
    const std::optional<std::string> value = shown_value(variable);
    const bool is_set = value && !value->empty();
    const std::string shown = is_set ? *value : variable.fallback;
    std::cout << (is_set ? "  * " : "    ") << variable.name << (shown.empty() ? "" : "=" + shown) << "  "
              << variable.meaning << "\n";
  }
  std::cout << "\n"
            << (report.healthy() ? "The essentials work." : "Something essential does not work: see \"no\" above.")
            << "\n";
}

nlohmann::json to_json(const std::vector<Probe>& probes) {
  nlohmann::json list = nlohmann::json::array();
  for (const Probe& probe : probes) {
    list.push_back({{"name", probe.name}, {"works", probe.works}, {"detail", probe.detail}});
  }
  return list;
}

void print_json(const Report& report) {
  nlohmann::json environment = nlohmann::json::array();
  for (const serried::env::Variable& variable : serried::env::table()) {
    const std::optional<std::string> value = shown_value(variable);
    environment.push_back({{"name", variable.name},
                           {"default", variable.fallback},
                           {"meaning", variable.meaning},
                           {"value", value ? nlohmann::json(*value) : nlohmann::json()}});
  }
  const nlohmann::json document = {{"healthy", report.healthy()},
                                   {"machine", to_json(report.machine)},
                                   {"backends", to_json(report.backends)},
                                   {"environment", environment}};
  std::cout << document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Prints what works on this machine, and why not. Exits with 1 if something essential does not.",
               "serried doctor");
  bool as_json = false;
  app.add_flag("--json", as_json, "Print JSON");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "[doctor] " << error.what() << "\n  fix: serried doctor --help lists the options\n";
    return 2;
  }
  const Report report = examine();
  as_json ? print_json(report) : print_text(report);
  return report.healthy() ? 0 : 1;
}
