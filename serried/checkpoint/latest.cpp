// Whether there is a checkpoint, and the newest of a folder.
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "serried/base/log.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/save_job.h"

namespace serried::checkpoint {
namespace detail {
namespace {

namespace fs = std::filesystem;

// When it was saved; none for what is no checkpoint.
std::optional<int64_t> time_of(const fs::path& folder) {
  if (is_partial_name(folder.filename().string()) || !has_index(folder.string())) return std::nullopt;
  // Set aside by a save that was killed: it counts where it is the only one of its name.
  const std::optional<std::string> before = name_before(folder.string());
  if (before && has_index(*before)) return std::nullopt;
  try {
    return read_index(folder.string()).saved_at;
  } catch (const Failure& failure) {
    if (failure.is_for_want_of_files()) throw;
    log::warn_once(c10::str("[checkpoint::latest] passes over ", folder.string(), ": ", failure.text));
    return std::nullopt;
  }
}

std::string newest_in(const std::string& folder) {
  check_no_nul(folder);
  std::pair<int64_t, std::string> newest;
  std::error_code error;
  fs::directory_iterator items(folder, error);
  if (error == std::errc::no_such_file_or_directory) return "";
  if (error) fail_with_errno("look into", folder, error.value());
  for (const auto& item : items) {
    const std::optional<int64_t> time = time_of(item.path());
    if (time) newest = std::max(newest, {*time, item.path().string()});
  }
  return newest.second;
}

// One that cannot be seen is not one that is not there: training would begin anew.
bool is_there(const std::string& path) {
  const std::string index = place_of(path) + "/" + kIndexName;
  if (::access(index.c_str(), F_OK) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) fail_with_errno("look for", index, errno);
  return false;
}

}  // namespace
}  // namespace detail

bool exists(const std::string& path, ExistsOptions options) {
  detail::refuse_recording("checkpoint::exists");
  const detail::Ranks ranks(detail::chosen_group(options.process_group));
  try {
    detail::wait_for_saving();
    const std::vector<std::string> found =
        ranks.together([&] { return std::string(ranks.is_first() && detail::is_there(path) ? "yes" : ""); });
    return !found[0].empty();
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::exists", failure);
  }
}

std::optional<std::string> latest(const std::string& folder, LatestOptions options) {
  detail::refuse_recording("checkpoint::latest");
  const detail::Ranks ranks(detail::chosen_group(options.process_group));
  try {
    detail::wait_for_saving();
    const std::vector<std::string> found =
        ranks.together([&] { return ranks.is_first() ? detail::newest_in(folder) : std::string(); });
    return found[0].empty() ? std::nullopt : std::optional(found[0]);
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::latest", failure);
  }
}

}  // namespace serried::checkpoint
