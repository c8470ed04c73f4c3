// The nearest option by the number of letters that have to be changed.
#include "tools/serried/usage.h"

#include <algorithm>
#include <vector>

#include "serried/base/edit_distance.h"

namespace serried::tools {
namespace {

// Of the subcommand that was given, as deep as it goes.
const CLI::App& innermost(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  return chosen.empty() ? app : innermost(*chosen.front());
}

std::string nearest_option(const CLI::App& app, const std::string& word) {
  // A third of its letters: of "--tp" none is like "--help".
  const size_t most_changes = (word.size() - std::min<size_t>(word.size(), 2)) / 3 + 1;
  std::string nearest;
  size_t changes = most_changes + 1;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const size_t distance = serried::detail::edit_distance(word, "--" + name);
      if (distance < changes) changes = distance, nearest = "--" + name;
    }
  }
  return nearest;
}

}  // namespace

std::string usage_text(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() != int(CLI::ExitCodes::ExtrasError)) return error.what();
  const std::vector<std::string> words = app.remaining(/*recurse=*/true);
  const auto is_option = [](const std::string& word) { return word.starts_with("-"); };
  const auto found = std::find_if(words.begin(), words.end(), is_option);
  if (found == words.end()) return words.empty() ? error.what() : "\"" + words.front() + "\" was not expected";
  const std::string option = found->substr(0, found->find('='));
  const std::string nearest = nearest_option(innermost(app), option);
  return "there is no option " + option + (nearest.empty() ? "" : "; did you mean " + nearest + "?");
}

}  // namespace serried::tools
