// The `serried` command. It does not link LibTorch, which would cost a quarter of a second at each start.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>

#include "serried/launch/error.h"
#include "serried/launch/token.h"
#include "serried/launch/version.h"
#include "tools/serried/debug_command.h"
#include "tools/serried/external.h"
#include "tools/serried/rendezvous_command.h"
#include "tools/serried/run_command.h"
#include "tools/serried/top_command.h"
#include "tools/serried/trace_command.h"
#include "tools/serried/usage.h"

namespace {

using serried::launch::kExitUsage;

int parse_error(const CLI::App& app, const CLI::ParseError& error, const std::string& command) {
  if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
  std::cerr << "[serried] " << serried::tools::usage_text(app, error) << "\n  fix: serried " << command
            << " --help lists the options\n";
  return kExitUsage;
}

int run_serried(int argc, char** argv) {
  CLI::App app("Distributed training for LibTorch.", "serried");
  app.set_version_flag("--version", serried::launch::version_text());
  app.footer("Other commands:" + serried::tools::describe_external_commands() + "\n");
  app.require_subcommand(0, 1);
  serried::tools::RunCommand run(app);
  serried::tools::RendezvousCommand rendezvous(app);
  serried::tools::TopCommand top(app);
  const serried::tools::TraceCommand trace(app);
  const serried::tools::DebugCommand debug(app);
  CLI::App* token = app.add_subcommand("token", "Print a new secret, which launchers on several nodes share.");
  token->footer("");
  const std::string command = argc < 2 ? "help" : argv[1];
  if (command == "help") {
    std::cout << app.help();
    return 0;
  }
  const auto is_it = [&](CLI::App* ours) { return ours->get_name() == command; };
  if (command[0] != '-' && app.get_subcommands(is_it).empty()) {
    std::vector<std::string> own;
    for (const CLI::App* each : app.get_subcommands({})) own.push_back(each->get_name());
    return serried::tools::exec_external_command(command, argv + 1, own);
  }
  char** const end = std::find(argv + 1, argv + argc, std::string_view("--"));
  try {
    app.parse(static_cast<int>(end - argv), argv);
  } catch (const CLI::ParseError& error) {
    const std::string asked = trace.chosen()        ? "trace merge"
                              : debug.chosen()      ? debug.asked()
                              : token->parsed()     ? "token"
                              : top.chosen()        ? "top"
                              : rendezvous.chosen() ? rendezvous.kName
                                                    : "run";
    return parse_error(app, error, asked);
  }
  if (token->parsed()) {
    std::cout << serried::launch::make_token() << "\n";
    return 0;
  }
  if (rendezvous.chosen()) return rendezvous.execute();
  if (top.chosen()) return top.execute();
  if (trace.chosen()) return trace.execute();
  if (debug.chosen()) return debug.execute();
  return run.chosen() ? run.execute({end, argv + argc}) : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run_serried(argc, argv);
  } catch (const serried::launch::LaunchError& error) {
    std::cerr << error.what() << "\n";
    return error.exit_code();
  } catch (const std::exception& error) {
    std::cerr << "[serried] " << error.what() << "\n  fix: report this with the command you ran\n";
    return 1;
  }
}
