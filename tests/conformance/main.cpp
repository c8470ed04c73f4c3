// serried_conformance: scores ops on distributed tensors against recorded results. Exits with 1 where a limit is
// broken.
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <regex>

#include "tests/conformance/report.h"

namespace {

using namespace serried::testing;

struct Arguments {
  std::string folder = vectors_folder();
  std::string op = ".*";
  std::string skip;
  std::string mesh = "4";
  std::string list;
  std::string json;
  std::string pytorch;
  std::string shard = "1/1";
  size_t max_cases = 0;
  bool uneven = false;
  bool plain = false;
};

void add_options(CLI::App& app, Arguments& arguments) {
  app.add_option("folder", arguments.folder, "Unpacked vectors; default: the build's own");
  app.add_option("--op", arguments.op, "Only overloads that this regular expression finds: ^aten.mm");
  app.add_option("--skip", arguments.skip, "Not these");
  app.add_option("--mesh", arguments.mesh, "Ranks per axis: 4, 2x2, 3")->capture_default_str();
  app.add_flag("--uneven", arguments.uneven, "Three ranks: most sizes are cut unevenly");
  app.add_option("--list", arguments.list, "Print each such trial")
      ->check(CLI::IsMember({"raises", "wrong", "default"}));
  app.add_option("--max-cases", arguments.max_cases, "Cases per overload, spread over all; 0: all");
  app.add_option("--json", arguments.json, "Write counts per overload there");
  app.add_option("--pytorch", arguments.pytorch, "Counts per overload not to fall behind");
  app.add_option("--shard", arguments.shard, "i/n: part i (from 1) of n of the overloads");
  app.add_flag("--plain", arguments.plain, "Plain tensors: tests the scorer itself");
}

serried::Sizes mesh_shape(const Arguments& arguments) {
  if (arguments.uneven) return {3};
  serried::Sizes shape;
  std::istringstream words(arguments.mesh);
  for (std::string word; std::getline(words, word, 'x');) shape.push_back(std::stoll(word));
  return shape;
}

// Every n-th overload: neighbours in the alphabet take about as long, so the parts do too.
std::vector<std::string> chosen_names(const Arguments& arguments) {
  size_t part = 1, parts = 1;
  if (std::sscanf(arguments.shard.c_str(), "%zu/%zu", &part, &parts) != 2 || part < 1 || part > parts) {
    throw CLI::ValidationError("--shard", "\"" + arguments.shard + "\" is not i/n with 1 <= i <= n");
  }
  const std::regex wanted(arguments.op);
  const std::regex unwanted(arguments.skip.empty() ? "$." : arguments.skip);
  std::vector<std::string> names;
  size_t index = 0;
  for (const std::string& name : vector_names(arguments.folder)) {
    if (!std::regex_search(name, wanted) || std::regex_search(name, unwanted)) continue;
    if (index++ % parts == part - 1) names.push_back(name);
  }
  return names;
}

int run(const Arguments& arguments) {
  const CountsByOverload reference = arguments.pytorch.empty() ? CountsByOverload() : read_counts(arguments.pytorch);
  const Score result = score(chosen_names(arguments), arguments.folder,
                             {.mesh_shape = mesh_shape(arguments),
                              .max_cases = arguments.max_cases == 0 ? SIZE_MAX : arguments.max_cases,
                              .plain = arguments.plain});
  const CountsByOverload counts = count(result);
  if (!arguments.list.empty()) print_list(std::cout, result, arguments.list);
  for (const std::string& name : result.local) {
    std::cout << "plain LibTorch differs here from the record and counts instead: " << name << "\n";
  }
  print_table(std::cout, counts, reference);
  if (!arguments.json.empty()) write_json(arguments.json, counts);
  const std::vector<std::string> worse = worse_than(reference, counts);
  for (const std::string& name : worse) std::cout << "fewer right than PyTorch: " << name << "\n";
  return keeps_limits(total(counts)) && worse.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Scores every op on distributed tensors against recorded results.", "serried_conformance");
  Arguments arguments;
  add_options(app, arguments);
  try {
    app.parse(argc, argv);
    at::set_num_threads(1);  // ranks have one each, and plain results must come about alike
    return run(arguments);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::cerr << "[conformance] " << error.what() << "\n";
    return 2;
  }
}
