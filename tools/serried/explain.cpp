// `serried explain`: how an op would run on distributed tensors, without ranks and without data.
#include <CLI/CLI.hpp>

#include <iostream>

#include "tools/serried/explain_call.h"
#include "tools/serried/usage.h"

namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  serried explain aten::mm \"S0 R\" \"R S1\" --mesh dp=2,tp=2\n"
    "  serried explain aten::mm S1 R --mesh 4 --shapes 8x16,16x4 --dtype bf16\n"
    "  serried explain aten::sum.dim_IntList S0 --mesh 4 --args dim=[0] keepdim=true\n";

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Explains how an op runs on distributed tensors: rule, rows tried, bytes moved, how results lie.",
               "serried explain");
  serried::tools::ExplainWords words;
  app.add_option("op", words.op, "Name, with or without overload: aten::add.Tensor")->required();
  app.add_option("placements", words.placements, "Of each tensor, one per axis of the mesh: \"S0 R\", \"P(max)\"")
      ->required();
  app.add_option("--mesh", words.mesh, "Axes: dp=2,tp=2 or 2x2")->capture_default_str();
  app.add_option("--shapes", words.shapes, "Of each tensor: 8x16,16x4; default: 64 in each dim");
  app.add_option("--dtype", words.dtype, "Of all tensors, or one each: f32,i64")->capture_default_str();
  app.add_option("--args", words.arguments, "Other arguments: dim=1 keepdim=true");
  app.footer(kExamples);
  try {
    app.parse(argc, argv);
    std::cout << serried::tools::explain_words(words);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "[explain] " << serried::tools::usage_text(app, error)
              << "\n  fix: serried explain --help lists the options\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  }
  return 2;
}
