// `--progress` and `--no-progress`, the same for every command that may take long.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

#include "tools/serried/progress.h"

namespace serried::tools {

/// `--progress`, `--progress=auto|always|never`, `--no-progress`. `word` lives as long as the app; Progress::mode_of
/// takes it after parsing. A flag, not an option: the word behind `--progress` may be a file.
inline void add_progress_option(CLI::App& app, std::string& word) {
  app.add_flag("--progress{always},--no-progress{never}", word,
               "Say on stderr how far it is: auto (on a terminal, the default), always or never")
      ->check([](const std::string& given) {
        return Progress::mode_of(given) ? std::string() : "takes auto, always or never, not \"" + given + "\"";
      });
}

}  // namespace serried::tools
