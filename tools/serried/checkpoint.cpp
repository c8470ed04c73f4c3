// `serried checkpoint`: lists, verifies and compares checkpoints.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>
#include <iterator>

#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/inspect.h"
#include "tools/serried/progress_option.h"

namespace {

using serried::checkpoint::detail::OnBytes;
using serried::tools::Progress;
namespace inspect = serried::checkpoint::detail;

constexpr const char* kExamples =
    "Examples:\n"
    "  serried checkpoint ls ckpt/step100\n"
    "  serried checkpoint verify ckpt/step100            reads every byte; 1 where something is damaged\n"
    "  serried checkpoint diff ckpt/step100 ckpt/step200  1 where they differ\n"
    "  serried checkpoint cat ckpt/step100 model.head.bias\n";

constexpr int kDiffers = 1;
constexpr int kFailed = 2;

struct Words {
  std::string folder, other, name, progress;
  bool all = false, as_json = false;
};

constexpr const char* kSubcommands[] = {"ls", "verify", "diff", "cat"};

// The one that the command line begins with; "" where it is none of them.
std::string subcommand_of(int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "";
  return std::count(std::begin(kSubcommands), std::end(kSubcommands), word) == 0 ? "" : word;
}

void check_subcommand(int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-' || !subcommand_of(argc, argv).empty()) return;
  inspect::fail("unknown subcommand \"" + serried::detail::printable(argv[1]) + "\"; known: ls, verify, diff, cat",
                "serried checkpoint --help says what each of them does");
}

// `run` gets what to tell how far it is.
template <class Run>
auto with_progress(const char* what, const Words& words, const Run& run) {
  constexpr int64_t kWhole = 1000;
  Progress progress(what, kWhole, *Progress::mode_of(words.progress));
  return run([&](int64_t done, int64_t total, const std::string& item) {
    progress.at(total == 0 ? kWhole : int64_t(double(done) / double(total) * double(kWhole)), item);
  });
}

int verify(const Words& words) {
  const auto findings = with_progress("verifying", words,
                                      [&](const OnBytes& on_bytes) { return inspect::verify(words.folder, on_bytes); });
  for (const std::string& finding : findings) std::cout << finding << "\n";
  std::cout << words.folder << (findings.empty() ? ": all of it is as it was saved\n" : ": damaged\n");
  return findings.empty() ? 0 : kDiffers;
}

int diff(const Words& words) {
  const auto lines = with_progress("comparing", words, [&](const OnBytes& on_bytes) {
    return inspect::differences(words.folder, words.other, on_bytes);
  });
  for (const std::string& line : lines) std::cout << line << "\n";
  return lines.empty() ? 0 : kDiffers;
}

int run(CLI::App& app, int argc, char** argv) {
  check_subcommand(argc, argv);
  Words words;
  const auto add = [&](const char* name, const char* text) {
    CLI::App* const command = app.add_subcommand(name, text);
    command->add_option("CHECKPOINT", words.folder, "The folder of a checkpoint")->required()->type_name("");
    return command;
  };
  CLI::App* const ls = add("ls", "What is in it: values, tensors, sizes.");
  CLI::App* const verified = add("verify", "Read every byte and compare it with the hashes that were saved.");
  CLI::App* const compared = add("diff", "How two of them differ: names, sizes, contents, values.");
  CLI::App* const shown = add("cat", "Print one value or tensor.");
  compared->add_option("OTHER", words.other, "The folder of another one")->required()->type_name("");
  shown->add_option("NAME", words.name, "\"step\", \"model.head.bias\"")->required()->type_name("");
  shown->add_flag("--all", words.all, "All elements of a tensor, however many");
  shown->add_flag("--json", words.as_json, "As JSON, with all elements");
  ls->add_flag("--json", words.as_json, "As JSON");
  serried::tools::add_progress_option(*verified, words.progress);
  serried::tools::add_progress_option(*compared, words.progress);
  app.require_subcommand(1);
  app.footer(kExamples);
  app.parse(argc, argv);
  if (verified->parsed()) return verify(words);
  if (compared->parsed()) return diff(words);
  if (ls->parsed()) {
    std::cout << (words.as_json ? inspect::listing_json(words.folder) : inspect::listing(words.folder));
  } else {
    std::cout << inspect::text_of(words.folder, words.name, {.all = words.all, .as_json = words.as_json});
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Looks at checkpoints that serried::checkpoint has saved.", "serried checkpoint");
  try {
    return run(app, argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::string subcommand = subcommand_of(argc, argv);
    std::cerr << "[checkpoint" << (subcommand.empty() ? "" : " " + subcommand) << "] " << error.what()
              << "\n  fix: serried checkpoint " << (subcommand.empty() ? "" : subcommand + " ")
              << "--help lists what it takes\n";
  } catch (const inspect::Failure& failure) {
    std::cerr << serried::format_error({"checkpoint", failure.text, failure.fix}) << "\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  }
  return kFailed;
}
