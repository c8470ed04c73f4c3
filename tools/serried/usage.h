// What commands say of options that they do not know.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace serried::tools {

/// The text of the error; of words that were not expected the first one, and the option that is most like it:
///     there is no option --microbatchs; did you mean --microbatches?
std::string usage_text(const CLI::App& app, const CLI::ParseError& error);

}  // namespace serried::tools
