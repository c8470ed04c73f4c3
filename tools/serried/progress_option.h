// `--progress` and `--no-progress`, the same for every command that may take long.
#pragma once

#include <CLI/CLI.hpp>

#include <memory>
#include <string>

#include "tools/serried/progress.h"

namespace serried::tools {

/// Help without the values that flags stand for: "--progress, --no-progress", not "--progress{always}".
class PlainFlags : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
    std::string name = CLI::Formatter::make_option_name(option, is_positional);
    for (size_t begin = name.find('{'); begin != std::string::npos; begin = name.find('{', begin)) {
      const size_t end = name.find('}', begin);
      name.erase(begin, end == std::string::npos ? end : end - begin + 1);
    }
    return name;
  }
};

/// `--progress`, `--progress=auto|always|never`, `--no-progress`. `word` lives as long as the app; Progress::mode_of
/// takes it after parsing. A flag, not an option: the word behind `--progress` may be a file.
inline void add_progress_option(CLI::App& app, std::string& word) {
  app.formatter(std::make_shared<PlainFlags>());
  app.add_flag("--progress{always},--no-progress{never}", word,
               "Say on stderr how far it is: auto (on a terminal, the default), always or never")
      ->check([](const std::string& given) {
        return Progress::mode_of(given) ? std::string() : "takes auto, always or never, not \"" + given + "\"";
      });
}

}  // namespace serried::tools
