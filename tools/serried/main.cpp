// The `serried` command. It does not link LibTorch, which would cost a quarter of a second at each start.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>

#include "serried/launch/error.h"
#include "tools/serried/external.h"
#include "tools/serried/run_command.h"

namespace {

using serried::launch::kExitUsage;

int parse_error(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
  std::cerr << "[serried] " << error.what() << "\n  fix: serried run --help lists the options\n";
  return kExitUsage;
}

int run_serried(int argc, char** argv) {
  CLI::App app("Distributed training for LibTorch.", "serried");
  app.set_version_flag("--version", std::string("serried ") + SERRIED_VERSION);
  app.footer("Other commands: " + serried::tools::list_external_commands());
  app.require_subcommand(0, 1);
  serried::tools::RunCommand run(app);
  if (argc < 2) {
    std::cout << app.help();
    return 0;
  }
  const std::string command = argv[1];
  if (command[0] != '-' && command != serried::tools::RunCommand::kName) {
    return serried::tools::exec_external_command(command, argv + 1);
  }
  char** const end = std::find(argv + 1, argv + argc, std::string_view("--"));
  try {
    app.parse(static_cast<int>(end - argv), argv);
  } catch (const CLI::ParseError& error) {
    return parse_error(app, error);
  }
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
