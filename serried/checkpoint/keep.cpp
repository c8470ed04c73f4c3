// Which older checkpoints stay.
#include <algorithm>
#include <filesystem>
#include <vector>

#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/save_job.h"

namespace serried::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

// "step100" -> "step", 100.
struct NumberedName {
  std::string stem;
  int64_t number = -1;  // none
};

NumberedName numbered(const std::string& name) {
  const size_t digits = name.find_last_not_of("0123456789") + 1;
  if (digits == name.size() || name.size() - digits > 18) return {name, -1};
  return {name.substr(0, digits), std::stoll(name.substr(digits))};
}

}  // namespace

void remove_older(const std::string& path, const SaveOptions& options) {
  if (options.keep_last <= 0) return;
  const std::string target = clean_path(path), parent = parent_of(target);
  const NumberedName mine = numbered(fs::path(target).filename().string());
  if (mine.number < 0) return;
  std::vector<std::pair<int64_t, std::string>> others;
  for (const auto& item : fs::directory_iterator(parent)) {
    const NumberedName theirs = numbered(item.path().filename().string());
    if (theirs.stem != mine.stem || theirs.number < 0 || !is_checkpoint(item.path().string())) continue;
    others.emplace_back(theirs.number, item.path().string());
  }
  std::sort(others.begin(), others.end());
  const size_t num_old = others.size() - std::min(others.size(), size_t(options.keep_last));
  for (size_t i = 0; i < num_old; ++i) {
    const auto& [number, old] = others[i];
    const bool is_kept = options.keep_every > 0 && number % options.keep_every == 0;
    if (!is_kept && number != mine.number) remove_checkpoint(old);
  }
}

}  // namespace serried::checkpoint::detail
