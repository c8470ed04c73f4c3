// Names with numbers, and when each was saved.
#include "serried/checkpoint/keep.h"

#include <c10/util/StringUtil.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "serried/base/log.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/load_names.h"

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

struct Numbered {
  int64_t saved_at;
  int64_t number;
  std::string path;
  std::vector<std::string> other_things;
};

// Those beside `target` whose names differ in the number only, as they were saved. Training may have gone back to an
// earlier step: numbers say nothing of that.
std::vector<Numbered> older_than(const std::string& target) {
  const std::string name = fs::path(target).filename().string(), stem = numbered(name).stem;
  std::vector<Numbered> all;
  for (const auto& item : fs::directory_iterator(parent_of(target))) {
    const std::string other = item.path().filename().string();
    const NumberedName theirs = numbered(other);
    if (other == name || theirs.stem != stem || theirs.number < 0 || item.is_symlink()) continue;
    const std::string path = item.path().string();
    const std::optional<Index> index = index_of(path);
    if (index) all.push_back({index->saved_at, theirs.number, path, other_things_in(path, *index)});
  }
  std::sort(all.begin(), all.end(), [](const Numbered& a, const Numbered& b) {
    return std::tie(a.saved_at, a.number) < std::tie(b.saved_at, b.number);
  });
  return all;
}

void remove_or_fail(const Numbered& old) {
  if (old.other_things.empty()) return remove_checkpoint(old.path);
  fail(c10::str("it has more in it than its checkpoint: ", list_of_names(old.other_things)), "");
}

}  // namespace

void check_keep(const SaveOptions& options) {
  const auto check = [](const char* name, int64_t value) {
    if (value < 0) fail(c10::str(name, " is ", value), "pass how many, or 0 to remove nothing");
  };
  check("keep_last", options.keep_last);
  check("keep_every", options.keep_every);
}

int64_t time_of_save(const std::string& path) {
  constexpr int64_t kNanoseconds = 1'000'000'000;
  constexpr int64_t kMaxSeconds = INT64_MAX / kNanoseconds - 1;
  int64_t time = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  std::error_code error;
  for (fs::directory_iterator item(parent_of(clean_path(path)), error), end; !error && item != end;
       item.increment(error)) {
    struct stat status = {};
    if (is_partial_name(item->path().filename().string())) continue;
    // Indices are written with the time that they say: they need not be read for it.
    if (::stat((item->path() / kIndexName).c_str(), &status) != 0 || status.st_mtim.tv_sec > kMaxSeconds) continue;
    time = std::max(time, int64_t(status.st_mtim.tv_sec) * kNanoseconds + int64_t(status.st_mtim.tv_nsec) + 1);
  }
  return time;
}

void remove_older(const std::string& path, const SaveOptions& options) {
  const std::string target = clean_path(path);
  if (options.keep_last == 0 && options.keep_every > 0) {
    log::warn_once("[checkpoint] keep_every removes nothing without keep_last, which says how many of the others stay");
  }
  if (options.keep_last == 0) return;
  if (numbered(fs::path(target).filename().string()).number < 0) {
    log::warn_once(
        c10::str("[checkpoint] keep_last removes nothing: ", target, " has no number at the end of its name"));
    return;
  }
  // The new one is there: what goes wrong with older ones is no failure of the save.
  const auto warn = [&](const std::string& old, const std::string& why) {
    log::warn_once(c10::str("[checkpoint] ", target, " is saved, but of the older ones ", old, " stays: ", why));
  };
  try {
    const std::vector<Numbered> all = older_than(target);
    const size_t others_to_keep = size_t(options.keep_last) - 1;
    for (size_t i = 0; i + others_to_keep < all.size(); ++i) {
      if (options.keep_every > 0 && all[i].number % options.keep_every == 0) continue;
      try {
        remove_or_fail(all[i]);
      } catch (const Failure& failure) {
        warn(all[i].path, failure.text);
      }
    }
  } catch (const std::exception& error) {
    warn("each", error.what());
  }
}

}  // namespace serried::checkpoint::detail
